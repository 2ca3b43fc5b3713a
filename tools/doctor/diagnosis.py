"""Rules that turn probed figures of a machine into findings, each with a verdict and a remedy, for `carom
doctor`.

Nothing is measured here; the probes are in hardware.py, and in core/host/probe.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...core.common.commit_memory import PAGEFILE_ADVICE
from ...core.common.sizes import GIB, format_size
from ...core.host.probe import NOT_ASKED, HostMemory
from ..planner import presets
from ..planner.presets import GB, TFLOPS
from .hardware import Gpu, Hardware

# good: nothing to do; fair: works, could be better; poor: noticeably slow or short of memory; missing: not
# installed or not present; info: neither good nor bad.
VERDICTS = ("good", "fair", "poor", "missing", "info")
NOTHING = "nothing to do"

# Copies from pinned host memory to the device, bytes/s: what PCIe Gen4 x16 reaches on a good host, and what
# Gen3 x16 or Gen4 x8 reaches (design note).
LINK_GOOD, LINK_FAIR = 20 * GB, 9 * GB
# Direct reads from a drive, bytes/s: a Gen4 drive and a Gen3 drive (the design note's 7 and 3.5 GB/s, with
# some tolerance).
DISK_GOOD, DISK_FAIR = 5 * GB, 2 * GB
COMPUTE_SHARE = 0.75  # a card is slow below this share of the FLOP/s that presets.py lists for the card
OTHERS_SHARE = 0.15  # share of VRAM held by other programs above which the finding is "poor"
FREE_GOOD, FREE_FAIR = 16 * GIB, 8 * GIB  # bytes of free VRAM


@dataclass(frozen=True)
class Finding:
    """One line of the table that `carom doctor` prints.

    `verdict`: one of VERDICTS; `remedy`: what the user can do; `data`: the underlying figures for `--json`
    (bytes, bytes/s, FLOP/s). Raises ValueError for an unknown verdict or an empty remedy.
    """

    topic: str
    value: str
    verdict: str
    remedy: str
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS or not self.remedy:
            raise ValueError(f"finding {self.topic!r} needs a verdict of {VERDICTS} and a remedy")


def rate(value: float | None) -> str:
    """Return a rate in bytes/s as text in decimal GB/s, the unit in which drives and links are sold;
    "unknown" for None.
    """
    return "unknown" if value is None else f"{value / GB:.1f} GB/s"


def diagnose(hardware: Hardware) -> list[Finding]:
    """Return all findings on ``hardware``, in the order in which `carom doctor` prints them."""
    found = [_torch(hardware)]
    found += _gpu(hardware) if hardware.gpu is not None else [_no_gpu(hardware)]
    found += _memory(hardware)
    found.append(_disk(hardware))
    found += [_extra(extra) for extra in hardware.extras]
    return found


def _torch(hardware: Hardware) -> Finding:
    """Return the finding on the installed torch."""
    torch = hardware.torch
    data = asdict(torch)
    if torch.error is not None:
        return Finding(
            "torch",
            f"cannot be imported: {torch.error}",
            "missing",
            "install PyTorch: https://pytorch.org/get-started/locally",
            data,
        )
    value = f"{torch.version} ({torch.build} build)"
    if torch.build == "cpu":
        return Finding(
            "torch",
            value,
            "fair",
            "fine without a GPU; with one, install the CUDA or ROCm build of PyTorch",
            data,
        )
    return Finding("torch", value, "good", NOTHING, data)


def _no_gpu(hardware: Hardware) -> Finding:
    """Return the finding for a machine without a usable GPU."""
    speed = f"; the CPU reaches {hardware.cpu_flops / 1e9:.0f} GFLOP/s in fp32" if hardware.cpu_flops else ""
    remedy = "plans for a card you do not have still work: carom plan MODEL --gpu rtx4090"
    if hardware.torch.build == "cpu":
        remedy = (
            "if there is a card: this torch is the CPU build, install the CUDA or ROCm one; else " + remedy
        )
    else:
        remedy = "if there is a card: check its driver (nvidia-smi, rocminfo); else " + remedy
    return Finding(
        "GPU", f"none: {hardware.gpu_reason}{speed}", "missing", remedy, {"cpu_flops": hardware.cpu_flops}
    )


def _gpu(hardware: Hardware) -> list[Finding]:
    """Return the findings on the GPU, which must be present, and on probes that failed."""
    gpu = hardware.gpu
    assert gpu is not None
    driver = f"driver {gpu.driver}" if gpu.driver else "driver version not visible"
    found = [
        Finding("GPU", f"{gpu.name}, {gpu.capability}, {driver}", *_capability(gpu), {"name": gpu.name, "capability": gpu.capability, "driver": gpu.driver}),
        _vram(gpu), _link(gpu), _pageable(gpu), _compute(gpu), *_host(gpu), _pinning_speed(gpu), *_pins(gpu),
    ]  # fmt: skip
    found += [
        Finding(f"probe of {name}", reason, "poor", "free VRAM or RAM and run carom doctor again")
        for name, reason in gpu.failures.items()
    ]
    return found


def _capability(gpu: Gpu) -> tuple[str, str]:
    """Return the verdict and remedy on the GPU's generation."""
    if gpu.flops_dtype == "fp16":
        return "fair", "this card has no bf16: use fp16 weights"
    return "good", NOTHING


def _vram(gpu: Gpu) -> Finding:
    """Return the finding on device memory: free, total, and held by other programs."""
    others = gpu.used_by_others
    value = f"{format_size(gpu.free)} free of {format_size(gpu.total)}"
    value += f", {format_size(others)} held by other programs" if others is not None else ""
    data = {"free": gpu.free, "total": gpu.total, "used_by_others": others}
    if others is not None and others > OTHERS_SHARE * gpu.total:
        return Finding(
            "VRAM",
            value,
            "poor",
            "close other programs that use the GPU (browser, games, another model)",
            data,
        )
    if gpu.free >= FREE_GOOD:
        return Finding("VRAM", value, "good", NOTHING, data)
    return Finding(
        "VRAM",
        value,
        "fair" if gpu.free >= FREE_FAIR else "poor",
        "models larger than this stream; see carom plan MODEL",
        data,
    )


def _link(gpu: Gpu) -> Finding:
    """Return the finding on copies between pinned host memory and the device."""
    down, up = gpu.link_rate(), gpu.link_rate("to host")
    data = {"samples": [asdict(sample) for sample in gpu.link]}
    if down is None:
        return Finding(
            "link, pinned", "not measured", "poor", "free VRAM and RAM and run carom doctor again", data
        )
    small = min((s for s in gpu.link if s.pinned and s.direction == "to device"), key=lambda s: s.size)
    value = f"{rate(down)} to the card, {rate(up)} back; {rate(small.rate)} in copies of {format_size(small.size)}"
    if down >= LINK_GOOD:
        return Finding("link, pinned", value, "good", NOTHING, data)
    if down >= LINK_FAIR:
        return Finding(
            "link, pinned",
            value,
            "fair",
            "as PCIe Gen3 x16 or Gen4 x8 does; if the card and board can do more, check slot and BIOS",
            data,
        )
    return Finding(
        "link, pinned",
        value,
        "poor",
        "put the card in the board's first x16 slot, without a riser; check PCIe speed in the BIOS",
        data,
    )


def _pageable(gpu: Gpu) -> Finding:
    """Return the finding on copies from pageable host memory to the device."""
    down = gpu.link_rate(pinned=False)
    return Finding(
        "link, pageable",
        f"{rate(down)} to the card",
        "info",
        "Carom pins what it streams; this rate is for what cannot be pinned",
        {"rate": down},
    )


def _compute(gpu: Gpu) -> Finding:
    """Return the finding on the measured FLOP/s, compared with the preset for the same card."""
    data = {"flops": gpu.flops, "dtype": gpu.flops_dtype, "memory_rate": gpu.memory_rate,
            "by_shape": [{"shape": list(shape), "flops": flops} for shape, flops in gpu.flops_by_shape]}  # fmt: skip
    if gpu.flops is None:
        return Finding("compute", "not measured", "poor", "free VRAM and run carom doctor again", data)
    value = f"{gpu.flops / TFLOPS:.0f} TFLOP/s in {gpu.flops_dtype} on layers of real models, memory {rate(gpu.memory_rate)}"
    try:
        card = presets.find("gpu", gpu.name, presets.CARDS)
    except ValueError:
        return Finding("compute", value, "info", "no figure to compare with for this card", data)
    if gpu.flops >= COMPUTE_SHARE * card.bf16:
        return Finding("compute", value, "good", NOTHING, data)
    return Finding(
        "compute",
        value,
        "fair",
        f"{card.bf16 / TFLOPS:.0f} is usual: check power limit, temperature and other programs on the card",
        data,
    )


def _host(gpu: Gpu) -> list[Finding]:
    """Return the finding on how fast Python issues operators; nothing where the probe failed, which is a
    finding already.
    """
    if gpu.launch_seconds is None:
        return []
    return [
        Finding(
            "host",
            f"Python issues an operator in {1e6 * gpu.launch_seconds:.1f} us"
            + (f", a transformer layer in {1e6 * gpu.layer_seconds:.0f} us" if gpu.layer_seconds else ""),
            "info",
            "a step of few tokens cannot take less than that for each of its operators: more tokens a step, or "
            "torch.compile, use the card better",
            {"launch_seconds": gpu.launch_seconds, "layer_seconds": gpu.layer_seconds},
        )
    ]


def _pinning_speed(gpu: Gpu) -> Finding:
    """Return the finding on the bytes/s at which host memory is pinned (page-locked)."""
    data = {"pin_rate": gpu.pin_rate, "register_rate": gpu.register_rate}
    if gpu.pin_rate is None:
        return Finding(
            "pinning",
            "refused",
            "poor",
            "free RAM, or raise the container's limits; Carom falls back to pageable memory",
            data,
        )
    value = f"{rate(gpu.pin_rate)} by allocation, {rate(gpu.register_rate)} by registering memory in use"
    return Finding("pinning", value, "info", "costs time once, when a model is loaded", data)


def _pins(gpu: Gpu) -> list[Finding]:
    """Return the findings on the ways to get pinned memory and on its limit, where the system has several or sets one."""
    found = []
    if gpu.pin_trials:
        works = any(trial.refusal is None for trial in gpu.pin_trials)
        value = "; ".join(
            f"{trial.name}: {rate(trial.rate) if trial.refusal is None else f'refused ({trial.refusal})'}"
            for trial in gpu.pin_trials
        )
        remedy = NOTHING if works else "update the driver; until then all weights wait in pageable memory"
        data = {"trials": [asdict(trial) for trial in gpu.pin_trials]}
        found.append(Finding("ways of pinning", value, "good" if works else "poor", remedy, data))
    if gpu.pin_limit is not None:
        found.append(
            Finding(
                "pinned limit",
                f"{format_size(gpu.pin_limit.nbytes)}: {gpu.pin_limit.reason}",
                "info",
                "further weights wait in pageable memory, and their copies are slower; close other programs that use the GPU",
                asdict(gpu.pin_limit),
            )
        )
    return found


def _memory(hardware: Hardware) -> list[Finding]:
    """Return the findings on host memory: free RAM, limits, swap, `ulimit -l` and WSL."""
    memory = hardware.memory
    value = f"{format_size(memory.usable)} for weights now; {format_size(memory.available)} free of {format_size(memory.total)}"
    data = asdict(memory)
    tight = memory.usable < memory.limit // 4
    remedy = "close other programs, add RAM, or stream from a drive (--nvme)" if tight else NOTHING
    found = [Finding("RAM", value, "poor" if tight else "good", remedy, data)]
    if memory.limit < memory.total:
        found.append(
            Finding(
                "RAM limit",
                f"{format_size(memory.limit)}, set by {memory.limit_by}",
                "fair",
                "raise the container's memory limit",
                {"limit": memory.limit},
            )
        )
    if memory.commit_limit is not None and memory.commit_left is not None:
        found.append(_page_file(memory, memory.commit_limit, memory.commit_left))
    elif memory.swap_used > GIB:
        found.append(
            Finding(
                "swap",
                f"{format_size(memory.swap_used)} in use",
                "poor",
                "memory is short: close programs before pinning weights",
                {"used": memory.swap_used},
            )
        )
    else:
        found.append(
            Finding(
                "swap",
                f"{format_size(memory.swap_used)} of {format_size(memory.swap_total)} in use",
                "good",
                NOTHING,
                {"used": memory.swap_used},
            )
        )
    if memory.memlock is not None and memory.memlock < memory.total // 2:
        found.append(Finding(
            "ulimit -l", format_size(memory.memlock), "info",
            "the CUDA driver ignores this limit; if pinning is refused, set `ulimit -l unlimited`", {"memlock": memory.memlock},
        ))  # fmt: skip
    if memory.wsl:
        found.append(
            Finding(
                "WSL",
                "Linux under Windows",
                "fair",
                "set memory= in .wslconfig (default: half the RAM); pinned memory is limited under WSL",
                {},
            )
        )
    return found


def _page_file(memory: HostMemory, limit: int, left: int) -> Finding:
    """Return the finding on Windows' page file, which bounds with the RAM what programs can allocate.

    ``limit``, ``left``: bytes that all programs can allocate, and those that this one still can.
    """
    size = max(0, limit - memory.total)
    value = f"{format_size(size)}; programs can allocate {format_size(left)} more ({format_size(limit)} with the RAM in all)"
    data = {"page_file": size, "commit_limit": limit, "commit_left": left}
    if left < memory.available:
        return Finding(
            "page file", value, "poor", f"RAM is free that no program can allocate. {PAGEFILE_ADVICE}", data
        )
    if size < memory.total // 4:
        remedy = (
            "a loader that maps a file is charged with all its bytes: let Windows manage the size of the page file, on a "
            "drive with room for your largest model"
        )
        return Finding("page file", value, "fair", remedy, data)
    return Finding("page file", value, "good", NOTHING, data)


def _disk(hardware: Hardware) -> Finding:
    """Return the finding on the read rate of the drive."""
    disk = hardware.disk
    if disk is None:
        return Finding(
            "drive",
            f"not measured: {hardware.disk_reason}",
            "info",
            "leave out --no-disk to have it measured"
            if hardware.disk_reason == NOT_ASKED
            else "name the folder that holds your models, one that you may write to: carom doctor --folder DIR",
            {},
        )
    best = max(disk.one, disk.several)
    how = "direct I/O" if disk.direct else "through the page cache: an upper bound"
    value = f"{rate(disk.one)} by one reader, {rate(disk.several)} by {disk.threads} ({how})"
    if disk.direct:
        value += f"; sustains a plan that needs up to {rate(best)} (carom plan MODEL --nvme probe)"
    data = asdict(disk)
    if not disk.direct:
        return Finding(
            "drive",
            value,
            "info",
            "this folder's file system has no direct I/O: measure the models' drive with --folder DIR",
            data,
        )
    if best >= DISK_GOOD:
        return Finding("drive", value, "good", NOTHING, data)
    if best >= DISK_FAIR:
        return Finding(
            "drive",
            value,
            "fair",
            "models that fit in RAM do not notice; else a Gen4 or Gen5 NVMe drive",
            data,
        )
    return Finding("drive", value, "poor", "keep models on an NVMe drive, or have the RAM to hold them", data)


def _extra(extra) -> Finding:
    """Return the finding on an optional backend."""
    if extra.usable:
        return Finding(extra.name, extra.reason, "good", NOTHING, asdict(extra))
    if extra.reason == "not installed":
        return Finding(
            extra.name,
            extra.reason,
            "info",
            "optional; Carom's own memory pool and file readers work without",
            asdict(extra),
        )
    return Finding(
        extra.name,
        extra.reason,
        "info",
        "Carom uses its own implementation instead; nothing breaks",
        asdict(extra),
    )
