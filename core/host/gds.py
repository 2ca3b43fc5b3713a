"""GPUDirect Storage through kvikio (the extra `gds`): reads from the drive into device memory, bypassing host
memory.

GPUDirect Storage is used only if three conditions hold: the nvidia-fs kernel module is loaded; kvikio is not in
its compatibility mode (which reads through host memory as Carom does); and, in a trial on the first bytes of
the checkpoint, it is faster than reading through host memory. Sources: kvikio's documentation of `CuFile.pread`
and of its runtime settings; NVIDIA's GPUDirect Storage guide.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..checkpoint.file_read import FileRead
from ..checkpoint.index import SourceFile

logger = logging.getLogger("carom")

NVIDIA_FS = "/proc/driver/nvidia-fs/stats"
DEVICES = ("cuda",)
# GPUDirect Storage is used only if its rate is at least this factor times the rate of reads through host
# memory.
LEAST_GAIN = 1.05
# {(device, file system's number): measured rate relative to reads through host memory}.
_MEASURED_GAIN: dict[tuple[str, int], float] = {}


def load_kvikio(device: torch.device) -> Any:
    """Return the kvikio module if kvikio can read to ``device`` directly, else None. Never raises."""
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
    except Exception as error:  # a broken kvikio is treated like one that is not installed
        logger.info("carom: kvikio is installed and does not work: %s", error)
        return None
    return kvikio


class GdsReader:
    """A reader of files straight into device memory. Files stay open until `close`."""

    def __init__(self, kvikio: Any) -> None:
        self._kvikio = kvikio
        self._files: dict[SourceFile, Any] = {}

    def submit(self, reads: Sequence[FileRead], target: torch.Tensor, start: int) -> Callable[[], None]:
        """Begin reads into ``target`` (uint8, on the device) and return a function that waits for them.

        ``start``: the byte of ``target`` at which byte 0 of the reads lies. Both calls may raise errors of
        kvikio; the wait function also raises WeightsError for a file that changed.
        """
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


def is_faster(
    device: torch.device, file: SourceFile, direct: Callable[[], float], through_host: Callable[[], float]
) -> bool:
    """Return whether reading with GPUDirect Storage is faster than reading through host memory by at least
    `LEAST_GAIN`. The trial is made once for each device and file system.

    Each callable reads the same bytes and returns the seconds it took: ``direct`` with GPUDirect Storage,
    ``through_host`` through host memory.
    """
    key = str(device), file.device
    if key not in _MEASURED_GAIN:
        direct()  # a warm-up: the first read opens files and registers memory
        _MEASURED_GAIN[key] = through_host() / max(direct(), 1e-9)
        logger.info(
            "carom: GPUDirect Storage reads at %.2f of the rate through host memory", _MEASURED_GAIN[key]
        )
    return _MEASURED_GAIN[key] >= LEAST_GAIN
