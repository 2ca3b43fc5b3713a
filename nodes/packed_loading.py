"""`Unpacking`: lets ComfyUI's loaders read files of ``carom pack``, whose packed tensors ComfyUI sees as bytes.

ComfyUI gets the decoded tensors. If they exceed the RAM that the node allows, they are written in batches to ComfyUI's
folder of temporary files while the file is read. Their memory is then that of a mapped file, from which a session streams.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..core.checkpoint.index import PACK_KEY, PAD_PREFIX, Index, open_index
from ..core.checkpoint.load_file import read_tensors
from ..core.checkpoint.packed_source import meta_of
from ..core.common.errors import WeightsError
from . import comfyui_api
from .spilled_batches import in_batches

OWN_METADATA = (
    "carom."  # prefix of the metadata entries of `carom pack`, which describe bytes that were decoded
)


class Unpacking:
    """Decodes the packed files that a loader of ComfyUI reads.

    ``ram``: the value of the node's ``ram`` widget, or None to keep all tensors in memory; ``found``: whether a file of
    ``carom pack`` was read.
    """

    def __init__(self, ram: str | None) -> None:
        self._ram = ram
        self.found = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which files that this thread reads with ``comfy.utils.load_torch_file`` are decoded."""
        import comfy.utils  # type: ignore[import-not-found]

        own, thread = comfy.utils.load_torch_file, threading.get_ident()

        def load(ckpt: str, *args: Any, return_metadata: bool = False, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return own(ckpt, *args, return_metadata=return_metadata, **options)
            weights, metadata = own(ckpt, *args, return_metadata=True, **options)
            if metadata and PACK_KEY in metadata:
                self.found = True
                weights = {name: value for name, value in weights.items() if not name.startswith(PAD_PREFIX)}
                weights.update(self._decoded(ckpt))
                metadata = {key: text for key, text in metadata.items() if not key.startswith(OWN_METADATA)}
            return (weights, metadata) if return_metadata else weights

        comfy.utils.load_torch_file = load
        try:
            yield
        finally:
            comfy.utils.load_torch_file = own

    def keep(self, patcher: Any) -> None:
        """Let ComfyUI decode the file again where it runs the loader of ``patcher`` again."""
        first = getattr(patcher, "cached_patcher_init", None)
        if self.found and first is not None:
            patcher.cached_patcher_init = (self._wrapped(first[0]), *first[1:])

    def _wrapped(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def again(*args: Any, **options: Any) -> Any:
            with self.active():
                return load(*args, **options)

        return again

    def _decoded(self, path: str) -> Mapping[str, torch.Tensor]:
        """Return the packed tensors of the file by name, decoded.

        Raises WeightsError that names the tensor if the file is damaged, BudgetError if the drive of the temporary files
        has no room, and ComfyUI's exception if the user cancels.
        """
        try:
            index = open_index(path)
            names = [name for name, entry in index.entries.items() if meta_of(entry) is not None]
            with torch.inference_mode(False):
                return self._read(index, names)
        except WeightsError as error:
            raise WeightsError(f"{error}, or pack the file again with carom pack") from error

    def _read(self, index: Index, names: list[str]) -> Mapping[str, torch.Tensor]:
        total = sum(index[name].nbytes for name in names)
        bar = comfyui_api.LoadingBar()

        def made() -> Iterator[tuple[str, torch.Tensor]]:
            done = 0
            for name, tensor in read_tensors(index, names):
                done += tensor.nbytes
                bar(done, total)
                bar.finish()  # raises if the user cancelled
                yield name, tensor
                del tensor

        return in_batches(made(), total, index.nbytes, self._ram)
