"""Counts of the bytes that Carom copies, decodes, encodes and reads in this process, for `prompts` on the CPU.

The module is loaded by its path, so it imports nothing of Carom before `Counts` is made.
"""

# mypy: ignore-errors
from __future__ import annotations

import collections
import ctypes
import functools
import importlib
import sys
import threading
from pathlib import Path

import torch

SMALL = 4096  # bytes; copies of less are no weights
CARD = torch.device("cpu", 0)  # not equal to torch.device("cpu"), for which ComfyUI frees no memory


class Counts:
    """Wraps what Carom copies, decodes, encodes and reads with.

    ``link``: bytes that the engine copied to and from its device; ``copied``: bytes of all other copies in memory;
    ``decoded`` and ``encoded``: bytes of the weights that were decoded and encoded; ``read``: bytes that were read from
    files by read calls, and copied from mapped files.
    """

    KEYS = ("link", "copied", "decoded", "encoded", "read")

    def __init__(self, package: str = "carom") -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = collections.defaultdict(int)
        self._root = str(Path(sys.modules[package].__file__).parent)
        self._mapped_files = importlib.import_module(f"{package}.core.checkpoint.memory_maps").mapped_files
        for name in ("copy_", "clone", "to", "cpu", "contiguous"):
            self._watch_copies(name)
        own = ctypes.memmove

        def memmove(target, source, count):
            self._add("copied", count)
            self._note_mapped(source, count)
            return own(target, source, count)

        ctypes.memmove = memmove
        codec = f"{package}.core.codec"
        self._wrap(
            package,
            f"{codec}.lossless_host",
            "decode_bytes",
            "decoded",
            lambda _, blob, header, begin, out: len(out),
        )
        self._wrap(
            package,
            f"{codec}.lossless_torch",
            "decode_torch",
            "decoded",
            lambda _, blob, header, out: out.numel(),
        )
        for module in (
            "lossless_device.encode_on_device",
            "lossless_device.encode_device_blob",
            "lossless.encode",
        ):
            name, _, function = module.rpartition(".")
            self._wrap(package, f"{codec}.{name}", function, "encoded", _first_bytes)
        _count_as_a_card(package)
        files = importlib.import_module(f"{package}.core.checkpoint.direct_io").PosixFile
        read = files.read_into

        def read_into(file, buffer, offset):
            got = read(file, buffer, offset)
            self._add("read", got)
            return got

        files.read_into = read_into

    def take(self) -> dict[str, int]:
        """Return the bytes since the last call."""
        with self._lock:
            found = {key: self._bytes.get(key, 0) for key in self.KEYS}
            self._bytes.clear()
        return found

    def _add(self, key: str, count: int) -> None:
        with self._lock:
            self._bytes[key] += count

    def _note_mapped(self, address: int, count: int) -> None:
        if count >= SMALL and any(file.start <= address < file.end for file in self._mapped_files()):
            self._add("read", count)

    def _watch_copies(self, name: str) -> None:
        """Count the copies that Carom's own code makes by the method ``name`` of a tensor."""
        own = getattr(torch.Tensor, name)

        @functools.wraps(own)
        def method(tensor, *arguments, **options):
            result = own(tensor, *arguments, **options)
            file = sys._getframe(1).f_code.co_filename
            if file.startswith(self._root) and "/benchmarks/" not in file:
                source, target = (arguments[0], tensor) if name == "copy_" else (tensor, result)
                self._note_copy(file, source, target)
            return result

        setattr(torch.Tensor, name, method)

    def _note_copy(self, file: str, source: torch.Tensor, target: torch.Tensor) -> None:
        try:
            count, begin, end = target.nbytes, source.data_ptr(), target.data_ptr()
        except (RuntimeError, NotImplementedError):  # a subclass without a storage; its parts are counted
            return
        if count >= SMALL and begin and begin != end:
            self._add("link" if file.endswith("cpu_engine.py") else "copied", count)
            self._note_mapped(begin, count)

    def _wrap(self, package: str, module: str, name: str, key: str, size) -> None:
        """Count the bytes that ``size`` returns for each call of a function, in all modules that imported it."""
        own = getattr(importlib.import_module(module), name)

        @functools.wraps(own)
        def counted(*arguments, **options):
            result = own(*arguments, **options)
            self._add(key, size(result, *arguments, **options))
            return result

        for found in list(sys.modules.values()):
            if getattr(found, "__name__", "").startswith(package) and found.__dict__.get(name) is own:
                setattr(found, name, counted)


def _first_bytes(_result, value, *_arguments, **_options) -> int:
    return value.nbytes


def _count_as_a_card(package: str) -> None:
    """Let Carom's engine of the CPU seem to pin memory, and scale the sizes from which on it acts (a model of 23 MB stands
    for one of 10 GB), so that weights are parked and return as on a GPU. ComfyUI itself pins nothing on the CPU.
    """
    pinner = importlib.import_module(f"{package}.core.host.arena").Pinner
    engine = importlib.import_module(f"{package}.core.device.cpu_engine").PlainEngine
    engine.pinner = pinner(lambda address, size: None, lambda address: None)
    for name in ("residents", "host_copies"):
        importlib.import_module(f"{package}.core.placement.{name}").SMALL_UNIT = 64 << 10
    settings = importlib.import_module(f"{package}.nodes.node_settings")
    settings.GROW_LEAST, settings.SHRINK_MOST = settings.GROW_LEAST >> 9, settings.SHRINK_MOST >> 9
    importlib.import_module(f"{package}.nodes.comfyui_api").pin_room = lambda: 1 << 40


class ImaginedCard:
    """A card of ``nbytes`` bytes, of which another program holds ``others``."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.others = nbytes, 0


def imagine_card(nbytes: int, inference: int = 4 << 20) -> ImaginedCard:
    """Make ComfyUI on the CPU believe in a card of ``nbytes`` bytes, with ``inference`` bytes for passes; return it."""
    import comfy.model_management as management

    card = ImaginedCard(nbytes)
    own_free, own_is_cpu = management.get_free_memory, management.is_device_cpu

    def free(device=None, torch_free_too=False):
        if device != CARD:
            return own_free(device, torch_free_too)
        held = sum(
            loaded.model_loaded_memory()
            for loaded in management.current_loaded_models
            if loaded.device == CARD
        )
        left = max(0, card.nbytes - card.others - held)
        return (left, 0) if torch_free_too else left

    for name in ("get_torch_device", "text_encoder_device", "vae_device"):
        setattr(management, name, lambda: CARD)
    management.get_free_memory = free
    management.is_device_cpu = lambda device: device != CARD and own_is_cpu(device)
    management.should_use_bf16 = lambda *_, **__: True  # the models then stay as they are in their files
    management.vram_state = management.VRAMState.NORMAL_VRAM
    management.minimum_inference_memory = lambda: inference
    management.extra_reserved_memory = lambda: inference // 4
    management.MIN_WEIGHT_MEMORY_RATIO = 0.0
    return card
