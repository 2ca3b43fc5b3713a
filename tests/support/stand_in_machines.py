"""Invented probe results for tests: a good card, good memory, and changes of them."""

from __future__ import annotations

from carom.core.common.sizes import GIB, MIB
from carom.core.host import probe
from carom.tools.doctor import hardware


def whole(gpu=None, **changes):
    fields = {
        "system": "Linux", "torch": hardware.TorchInstall("2.9", "cuda 13.0" if gpu else "cpu"), "memory": probe.host_memory(),
        "gpu": gpu, "gpu_reason": None if gpu else "none", "cpu_flops": 1e9, "disk": None, "disk_reason": "not asked for",
        "extras": (), "seconds": 1.0,
    }  # fmt: skip
    return hardware.Hardware(**{**fields, **changes})


def gpu_of(**changes):
    link = tuple(
        hardware.LinkSample(way, pinned, 128 * MIB, 24e9 if pinned else 8e9)
        for way in ("to device", "to host") for pinned in (True, False)
    )  # fmt: skip
    fields = {
        "index": 0, "name": "NVIDIA GeForce RTX 4090", "kind": "cuda", "driver": "580.1", "capability": "sm_89",
        "total": 24 * GIB, "free": 23 * GIB, "used_by_others": 500 * MIB, "link": link, "flops": 155e12,
        "memory_rate": 9e11, "pin_rate": 3e9, "register_rate": 2e10,
    }  # fmt: skip
    return hardware.Gpu(**{**fields, **changes})


def memory_of(**changes):
    fields = {
        "total": 64 * GIB, "available": 60 * GIB, "limit": 64 * GIB, "limit_by": "physical memory", "usable": 50 * GIB,
        "cgroup_limit": None, "cgroup_used": None, "memlock": None, "swap_total": 0, "swap_used": 0, "wsl": False, "windows": False,
    }  # fmt: skip
    return probe.HostMemory(**{**fields, **changes})
