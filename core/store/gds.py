"""GPUDirect Storage through kvikio (the extra `gds`): from the drive to the device, past host memory.

Used when it is real and faster: the nvidia-fs kernel module is loaded, kvikio is not in its compatibility mode (which reads
through host memory as we do), and a trial on the checkpoint's own first bytes beats the way through host memory.
Sources: kvikio's documentation of `CuFile.pread` and of its runtime settings; NVIDIA's GPUDirect Storage guide.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .index import SourceFile
from .pieces import Read

logger = logging.getLogger("carom")

NVIDIA_FS = "/proc/driver/nvidia-fs/stats"
DEVICES = ("cuda",)
FASTER = 1.05  # times the rate of the way through host memory, to be worth another way
_TRIED: dict[tuple[str, int], float] = {}  # device, file system -> how much faster it was


def find(device: torch.device) -> Any:
    """The kvikio module where it reads to ``device`` directly, else None. Never raises."""
    if (
        device.type not in DEVICES
        or not os.path.exists(NVIDIA_FS)
        or importlib.util.find_spec("kvikio") is None
    ):
        return None
    try:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        get = getattr(defaults, "get", None)
        mode = get("compat_mode") if get is not None else defaults.compat_mode()
        driver = importlib.import_module("kvikio.cufile_driver")
        if (
            str(getattr(mode, "name", mode)).upper() in ("ON", "TRUE")
            or not driver.DriverProperties().is_gds_available
        ):
            return None
    except Exception as error:  # an extra that is broken is an extra that is not there
        logger.info("carom: kvikio is installed and does not work: %s", error)
        return None
    return kvikio


class Direct:
    """Reads files straight into device memory. Close it; its files stay open until then."""

    def __init__(self, kvikio: Any) -> None:
        self._kvikio = kvikio
        self._files: dict[SourceFile, Any] = {}

    def submit(self, reads: Sequence[Read], target: torch.Tensor, start: int) -> Callable[[], None]:
        """Begin to read into ``target`` (uint8, on the device), where byte 0 of the reads lies at ``start``; the result
        waits. Both raise what kvikio raises, and the result WeightsError for a file that changed."""
        waiting = []
        for read in reads:
            file = self._files.get(read.file)
            if file is None:
                file = self._files[read.file] = self._kvikio.CuFile(read.file.path, "r")
            into = target[start + read.at : start + read.at + read.nbytes]
            waiting.append((read, file.pread(into, read.nbytes, read.offset)))

        def wait() -> None:
            for read, future in waiting:
                got = future.get()
                if got != read.nbytes:
                    raise OSError(f"{got} of {read.nbytes} bytes were read")
            for source in {read.file for read, _ in waiting}:
                source.check()

        return wait

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def faster(
    device: torch.device, file: SourceFile, direct: Callable[[], float], through: Callable[[], float]
) -> bool:
    """Whether reading directly pays: each callable reads the same bytes and returns its seconds. Tried once a file system."""
    key = str(device), file.device
    if key not in _TRIED:
        direct()  # the first one opens files and registers memory
        _TRIED[key] = through() / max(direct(), 1e-9)
        logger.info("carom: GPUDirect Storage reads at %.2f of the rate through host memory", _TRIED[key])
    return _TRIED[key] >= FASTER
