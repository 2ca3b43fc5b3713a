"""Converts arguments of `carom.stream` to packing settings and to budgets in bytes."""

from __future__ import annotations

import contextlib

from torch import nn

from ..budget.device_governor import beside
from ..budget.shared_budget import SharedBudget
from ..common.errors import BudgetError, UnsupportedError
from ..common.sizes import GIB, MIB, format_size, parse_size
from ..device import wddm
from ..device.engine import Engine
from ..host.kept_pieces import release_idle
from ..host.page_release import MappedFiles
from ..host.probe import host_memory, on_windows
from ..placement.packer import Packing
from .stream_settings import StreamSettings
from .weight_pool import WeightPool

# Fewer bytes of device memory in host memory than these are not reported: sizes are rounded.
_LEAST_IN_HOST_MEMORY = 64 * MIB


def packing(asked: StreamSettings, engine: Engine, compiled: bool, pool: WeightPool) -> Packing | None:
    """Return how weights are packed, or None if they are copied to the device unpacked. ``compiled``: whether
    torch.compile compiled a part of the module.

    Weights that several processes share, or that lie in a registered store, are not packed. Packed weights cannot be in a VBAR (an address range of
    comfy-aimdo). So if weights are packed, the pool changes to torch's allocator. With ``pool="aimdo"`` and
    ``codec="auto"``, the pool stays and weights are not packed. Raises UnsupportedError for settings that cannot be
    combined.
    """
    found = None if asked.group is not None or asked.store is not None else _packing(asked, engine)
    if found is not None and found.auto and compiled:
        return None  # the guards of compiled code read weights, and a packed parameter has no values to read
    if found is not None and pool.native is not None:
        if pool.asked == "aimdo" and asked.codec == "auto":
            return None
        pool.refuse("packed weights are unpacked into torch's memory; codec='raw' leaves the choice")
    return found


def _packing(asked: StreamSettings, engine: Engine) -> Packing | None:
    if asked.codec == "lossless":
        if asked.weights is not None:
            raise UnsupportedError(
                "codec='lossless' packs weights of a loaded module; a file is packed once, with "
                "`carom pack --codec lossless`, and streamed with codec='auto'"
            )
        return Packing(keep_raw=asked.host == "raw", rewritten=asked.rewritten)
    if asked.codec == "auto" and asked.host == "auto" and asked.weights is None and engine.unpacks:
        return Packing(auto=True, rewritten=asked.rewritten)
    return None


def vram_budget(value: int | str | SharedBudget, engine: Engine, mine: int = 0, waiting: int = 0) -> int:
    """Return the VRAM budget in bytes that ``value`` (a percentage, for example) amounts to.

    ``mine``: device bytes that the session holds already and may use again.
    ``waiting``: for a device that shares the host's memory, the host bytes that are freed when weights move
    to the device. Raises BudgetError.
    """
    if isinstance(value, SharedBudget):
        return min(value.nbytes, value.free_bytes + mine)
    free = engine.free_bytes() + mine + waiting
    if value == "auto":
        most = max(0, int(free * 0.7) - GIB)
        return min(most, _auto_ram() + mine + waiting) if engine.shares_host else most
    return _size(value, free, "vram")


def waiting_bytes(module: nn.Module) -> int:
    """Return the host bytes that are freed when the weights of ``module`` move to other memory: to a device that
    shares the host's memory, to pinned memory, or to disk.

    Only storages that a single tensor uses are counted. Pages of a mapped file are not counted, because the
    system can reclaim them anyway. Returns 0 if mapped files cannot be recognised.
    """
    mapped = MappedFiles()
    if not mapped.supported:
        return 0
    found: dict[int, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # wrapper subclasses have no storage
                storage = tensor.untyped_storage()
                twice = storage.data_ptr() in found
                found[storage.data_ptr()] = 0 if twice else storage.nbytes()
    return sum(nbytes for address, nbytes in found.items() if not mapped.contains(address, nbytes))


def within_dedicated(budget: int, engine: Engine, mine: int = 0) -> tuple[int, str]:
    """Return ``budget``, limited to the GPU's own free memory on Windows, and a note on the limit ("" if
    there is none).

    If a program requests more memory than the GPU has free, Windows (WDDM) raises no error but provides
    shared host memory, which is as slow as the link between host and device.
    ``mine``: device bytes that the session holds already and may use again.
    """
    if engine.device.type != "cuda" or not on_windows():
        return budget, ""
    dedicated = wddm.weights_room(engine.free_bytes() + mine)
    if budget <= dedicated:
        return budget, ""
    return dedicated, (
        f"vram={format_size(budget)} is more than the card has free: Windows would put the rest into the host's memory, which "
        f"is slower than streaming it; {format_size(dedicated)} are used. Close other programs that use the card for more"
    )


def full_device_notes(engine: Engine) -> tuple[str, ...]:
    """Return a note if the driver has put device memory of this process into host memory, as it does on Windows where the
    device is full; else nothing.
    """
    memory = engine.memory() if on_windows() else None
    if memory is None or memory.in_host_memory < _LEAST_IN_HOST_MEMORY:
        return ()
    return (
        f"the card is full: Windows has put {format_size(memory.in_host_memory)} of this process's device memory into the "
        "host's memory, which makes steps many times slower. Close other programs that use the card, or set a smaller vram",
    )


def device_note(engine: Engine) -> str:
    """Return a note on a property of the device that limits streaming, or "" if there is none.

    Such properties are: no streams, memory shared with the host, host memory that cannot be pinned, and an
    untested backend.
    """
    if engine.blocking and engine.device.type != "cpu":
        return (
            f"torch has no streams for {engine.device}: every copy is waited for, none runs beside computing"
        )
    if getattr(engine, "shares_host", False):
        return f"{engine.name} computes in the host's memory: vram and ram are parts of one budget"
    if engine.device.type not in ("cpu", "cuda"):
        # On XPU, torch copies such memory into a pinned buffer of its own before the copy to the device
        # (src/ATen/native/xpu/Copy.cpp of https://github.com/intel/torch-xpu-ops).
        pageable = (
            "copies are from pageable memory, which is slower and takes time of the host, as torch cannot pin memory "
            f"that is in use for a device of type {engine.device.type}; "
        )
        return (
            f"{engine.device} streams by torch's generic interface: {pageable if engine.pinner is None else ''}"
            "Carom was never run there, so report what you see"
        )
    return ""


def ram_budget(value: int | str, on_device: int = 0, waiting: int = 0) -> int:
    """Return the RAM budget in bytes: the limit of pinned memory, or of the host cache if weights come from
    disk.

    ``on_device``: if the device shares the host's memory, the bytes that weights on the device take,
    otherwise 0.
    ``waiting``: host bytes that the module's weights take already. They are free for the session besides what is
    available, because it replaces them. Raises BudgetError.
    """
    if value == "auto":
        whole = _auto_ram() + waiting
        return beside(whole, on_device) if on_device else whole
    return _size(value, _available(), "ram")


def ram_beside_device(
    value: int | str, engine: Engine, module: nn.Module, vram: int, waiting: int, held: int = 0
) -> int:
    """Return the RAM budget in bytes, for a session with ``vram`` bytes of weights on the device.

    If the device shares the host's memory, weights on the device reduce the RAM budget, except the ``held``
    bytes that the session already has on the device.
    ``waiting``: as in `ram_budget`. Raises BudgetError.
    """
    if not engine.shares_host:
        return ram_budget(value, 0, waiting)
    tensors = (*module.parameters(), *module.buffers())
    on_device = min(vram, sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return ram_budget(value, max(0, on_device - held), waiting)


def _auto_ram() -> int:
    """Return the bytes of host memory that weights may take with ``ram="auto"``."""
    release_idle()  # what parked sessions keep of their files would leave this session too little for good
    # `host_memory` respects the limit of a container. If little memory is available, take a quarter of it
    # nevertheless.
    available = _available()
    return min(int(available * 0.8), max(host_memory().usable, available // 4))


def _available() -> int:
    """Return the bytes of host memory that this process could allocate now, within its container's limit."""
    return host_memory().free


def _size(value: int | str, whole: int, setting: str) -> int:
    try:
        return parse_size(value, whole=whole, setting=setting)
    except ValueError as error:
        raise BudgetError(str(error)) from error
