import os
from types import SimpleNamespace


def is_available():
    return os.environ.get("CAROM_FAKE") != "no_gpu"


def mem_get_info(device):
    return 8 << 30, 16 << 30


def get_device_properties(device):
    return SimpleNamespace(gcnArchName="gfx1201")


def get_device_name(device):
    return "AMD Radeon RX 9070 XT"


def synchronize():
    if os.environ.get("CAROM_FAKE") == "error":
        raise RuntimeError("HIP error: invalid device function")
