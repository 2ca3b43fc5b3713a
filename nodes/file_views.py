"""`FileViews`: the weights of a model that are views of a mapped file, so that they can be views of it again."""

from __future__ import annotations

from torch import nn

from ..core.host.page_release import MappedFiles
from .spilled_weights import is_on_host


class FileViews:
    """The weights of ``root`` that are in mapped files now. The object keeps these files mapped."""

    def __init__(self, root: nn.Module) -> None:
        files = MappedFiles()
        found = {}
        for tensor in (*root.parameters(), *root.buffers()):
            if is_on_host(tensor) and files.contains(tensor.data_ptr(), tensor.nbytes):
                found[id(tensor)] = tensor, tensor.detach()
        self._views = list(found.values())

    def restore(self) -> None:
        """Let the weights that are on the host, with the same shape and dtype, be views of their files again."""
        for tensor, view in self._views:
            if tensor.device.type == "cpu" and tensor.shape == view.shape and tensor.dtype == view.dtype:
                tensor.data = view
