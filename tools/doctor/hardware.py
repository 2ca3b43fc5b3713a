"""Probes of the accelerator: its identity, free memory, compute rate, copy rates and kernel launch time.

torch is imported inside the probes, so that a broken installation becomes a finding and not a crash. Every
probe is limited in time and memory, draws no random numbers and changes no torch setting. Figures are
medians, in bytes/s and FLOP/s.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ...core.common.sizes import MIB
from ...core.host import probe as host_probe
from ...core.host.pin_limit import ALL_PINNED, PinLimit
from ...core.host.probe import DiskRate, HostMemory
from .extras import OptionalBackend, probe_aimdo

if TYPE_CHECKING:
    from ...core.device.pin_ways import PinTrial

LINK_SIZES = tuple(mib * MIB for mib in (1, 8, 32, 128))  # bytes of the timed copies of pinned memory
PAGEABLE_SIZE = 32 * MIB  # bytes of the timed copy of pageable memory
# Shapes (tokens, inputs, outputs) of linear layers in real models: Flux.1's attention and MLP, a Llama-3-8B
# MLP.
COMPUTE_SHAPES = ((4096, 3072, 3072), (4096, 3072, 12288), (4096, 12288, 3072), (2048, 4096, 14336))
CPU_SHAPES = ((256, 1024, 1024),)
# Time limit of the GPU probe. The measurements take about 2 s, but the first use of a driver and its
# libraries can take long.
GPU_SECONDS = 20.0


@dataclass(frozen=True)
class TorchInstall:
    """The installed torch.

    `build`: "cuda 13.0", "rocm 7.1", "cpu", ...; `error`: why torch cannot be imported.
    """

    version: str | None
    build: str
    error: str | None = None


@dataclass(frozen=True)
class LinkSample:
    """The measured rate of copies of one size between host and device.

    `direction`: "to device" or "to host"; `pinned`: whether the host memory is pinned; `size`: bytes; `rate`:
    bytes/s.
    """

    direction: str
    pinned: bool
    size: int
    rate: float


@dataclass(frozen=True)
class Gpu:
    """An accelerator and its measured figures.

    Memory in bytes, rates in bytes/s, `flops` in FLOP/s; None: not measured.

    `kind`: "cuda" or "rocm"; `used_by_others`: VRAM held by other programs; `flops_by_shape`: FLOP/s of a
    linear layer for each (tokens, inputs, outputs); `pin_rate` and `register_rate`: host memory pinned by
    allocation, and by registration; `pin_trials`: the ways to get pinned memory that were tried (Windows); `pin_limit`:
    the system's limit of pinned memory, None if it sets none; `failures`: name of a probe -> why the probe failed.
    """

    index: int
    name: str
    kind: str
    driver: str | None
    capability: str
    total: int
    free: int
    used_by_others: int | None
    link: tuple[LinkSample, ...] = ()
    flops: float | None = None
    flops_by_shape: tuple[tuple[tuple[int, int, int], float], ...] = ()
    flops_dtype: str = "bf16"
    memory_rate: float | None = None
    pin_rate: float | None = None
    register_rate: float | None = None
    launch_seconds: float | None = None  # seconds that Python takes to issue one operator
    # Seconds that Python takes to issue the forward of a transformer block.
    layer_seconds: float | None = None
    failures: dict[str, str] = field(default_factory=dict)
    pin_trials: tuple[PinTrial, ...] = ()
    pin_limit: PinLimit | None = None

    def link_rate(self, direction: str = "to device", pinned: bool = True) -> float | None:
        """Return the highest rate in bytes/s over the measured copy sizes; None where none was measured."""
        rates = [s.rate for s in self.link if s.direction == direction and s.pinned == pinned]
        return max(rates, default=None)


@dataclass(frozen=True)
class Hardware:
    """All probed figures of a machine, which `carom doctor` reports.

    `gpu_reason`, `disk_reason`: why there is no figure for the GPU or the drive; `cpu_flops`: FLOP/s of the
    CPU in float32, measured where there is no GPU; `seconds`: duration of the probes.
    """

    system: str
    torch: TorchInstall
    memory: HostMemory
    gpu: Gpu | None
    gpu_reason: str | None
    cpu_flops: float | None
    disk: DiskRate | None
    disk_reason: str | None
    extras: tuple[OptionalBackend, ...]
    seconds: float


def torch_build() -> TorchInstall:
    """Return which torch is installed, without touching a device."""
    try:
        import torch
    except Exception as error:  # a broken torch raises ImportError or OSError, and worse on some systems
        return TorchInstall(None, "none", f"{type(error).__name__}: {str(error)[:200]}")
    if torch.version.hip:
        return TorchInstall(torch.__version__, f"rocm {torch.version.hip}")
    if torch.version.cuda:
        return TorchInstall(torch.__version__, f"cuda {torch.version.cuda}")
    return TorchInstall(
        torch.__version__, "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else "cpu"
    )


def _smi(query: str) -> str | None:
    """Return the value of one nvidia-smi field.

    Return None where nvidia-smi is absent, takes more than 3 s, or lists several GPUs with different values.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=3, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    values = {line.strip()[:80] for line in done.stdout.splitlines() if line.strip()}
    return values.pop() if done.returncode == 0 and len(values) == 1 else None


def driver_version() -> str | None:
    """Return the version of NVIDIA's or AMD's kernel driver; None where no version is visible."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            text = Path(path).read_text("utf-8", "replace")[:1000]
        except OSError:
            continue
        found = re.search(r"\d+\.\d+(\.\d+)*", text)
        if found:
            return found[0]
    return _smi("driver_version")


def _used_before_us() -> int | None:
    """Return the bytes of VRAM in use before this process creates its own CUDA context.

    Return None where the context already exists, or nvidia-smi does not answer.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return None
    used = _smi("memory.used")
    return int(used) * MIB if used and used.isdecimal() else None


def _pattern(torch, shape, dtype, device):
    """Return a tensor of varied values, made without the random generator.

    A matrix of equal values would draw less power and let the card clock higher than real weights do.
    """
    count = shape[0] * shape[1]
    values = torch.arange(count, device=device, dtype=torch.int32).remainder_(251).sub_(125)
    return values.to(dtype).div_(125).reshape(shape)


def _timed(torch, work: Callable[[], object], seconds: float, most: int = 20) -> float:
    """Return the median seconds of one call of `work`, timed by device events after one warm-up call.

    Calls are repeated for about `seconds`, at least 3 and at most `most` times.
    """
    work()
    torch.cuda.synchronize()
    times: list[float] = []
    deadline = time.monotonic() + seconds
    while len(times) < 3 or (len(times) < most and time.monotonic() < deadline):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return max(median(times), 1e-9)


def measure_link(torch, device, free: int, seconds: float = 0.04) -> tuple[LinkSample, ...]:
    """Measure copies in both directions, with pinned memory of LINK_SIZES bytes and pageable memory of one
    size.

    `free`: bytes of free VRAM, of which at most a sixteenth is used; `seconds`: time for each copy size and
    direction.
    """
    sizes = [size for size in LINK_SIZES if size <= max(free // 16, MIB)]
    samples = []
    for pinned in (True, False):
        most = max(sizes) if pinned else min(PAGEABLE_SIZE, max(sizes))
        there = torch.zeros(most, dtype=torch.uint8, device=device)
        # Writing zeros maps the pages before timing.
        here = torch.zeros(most, dtype=torch.uint8, pin_memory=pinned)
        for size in sizes if pinned else [most]:
            a, b = there[:size], here[:size]
            down = _timed(torch, partial(a.copy_, b, non_blocking=True), seconds)
            up = _timed(torch, partial(b.copy_, a, non_blocking=True), seconds)
            samples += [
                LinkSample("to device", pinned, size, size / down),
                LinkSample("to host", pinned, size, size / up),
            ]
    return tuple(samples)


def measure_compute(torch, device, dtype, shapes=COMPUTE_SHAPES, seconds: float = 0.1):
    """Measure a linear layer of each shape (tokens, inputs, outputs); return ((shape, FLOP/s), ...)."""
    found = []
    for tokens, inputs, outputs in shapes:
        x = _pattern(torch, (tokens, inputs), dtype, device)
        weight = _pattern(torch, (outputs, inputs), dtype, device)
        took = _timed(torch, partial(torch.nn.functional.linear, x, weight), seconds)
        found.append(((tokens, inputs, outputs), 2 * tokens * inputs * outputs / took))
    return tuple(found)


def measure_launch(torch, device, batches: int = 9, operators: int = 100) -> float:
    """Return the median seconds that Python takes to issue one small operator.

    The device is idle before each batch and computes faster than Python issues, so that no launch has to
    wait.
    """
    x = torch.zeros(256, device=device)
    taken = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(operators):
            x.add_(0.0)
        taken.append((time.perf_counter() - start) / operators)
    torch.cuda.synchronize()
    return median(taken)


def measure_layer(torch, device, dtype, batches: int = 7, calls: int = 10) -> float:
    """Return the median seconds that Python takes to issue the forward of a transformer block.

    The block is a small version of the one in `carom bench` (modulation, attention, MLP: five matrices), so
    that the device computes faster than Python issues.
    """
    functional, d, tokens = torch.nn.functional, 256, 16

    def linear(outputs: int, inputs: int = d):
        """Return a linear layer with zero weights."""
        made = torch.nn.utils.skip_init(
            torch.nn.Linear, inputs, outputs, bias=False, device=device, dtype=dtype
        )
        made.weight.zero_()
        return made

    modulation, qkv, proj, up, down = linear(6 * d), linear(3 * d), linear(d), linear(4 * d), linear(d, 4 * d)
    x = torch.zeros(1, tokens, d, dtype=dtype, device=device)
    c = torch.zeros(1, d, dtype=dtype, device=device)

    def block(x):
        """Return the block's output for `x` (1, tokens, d)."""
        s1, b1, g1, s2, b2, g2 = modulation(functional.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        h = functional.layer_norm(x, (d,)) * (1 + s1) + b1
        q, k, v = qkv(h).view(1, tokens, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, tokens, d)
        x = x + g1 * proj(h)
        h = functional.layer_norm(x, (d,)) * (1 + s2) + b2
        return x + g2 * down(functional.gelu(up(h), approximate="tanh"))

    taken = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            x = block(x)
        taken.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return median(taken)


def combined_rate(by_shape) -> float:
    """Return the FLOP/s of computing each measured shape once: the sum of FLOPs over the sum of seconds."""
    flops = [2 * tokens * inputs * outputs for (tokens, inputs, outputs), _ in by_shape]
    return sum(flops) / sum(n / rate for n, (_, rate) in zip(flops, by_shape, strict=True))


def measure_cpu(seconds: float = 0.3) -> float:
    """Measure a float32 linear layer on the CPU for about `seconds`; return the best FLOP/s."""
    import torch

    tokens, inputs, outputs = CPU_SHAPES[0]
    with torch.no_grad():
        x = _pattern(torch, (tokens, inputs), torch.float32, "cpu")
        weight = _pattern(torch, (outputs, inputs), torch.float32, "cpu")
        best, deadline = float("inf"), time.monotonic() + seconds
        for _ in range(50):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            best = min(best, time.perf_counter() - start)
            if time.monotonic() > deadline:
                break
    return 2 * tokens * inputs * outputs / best


def _pin_rates(torch, size: int) -> tuple[float, float | None]:
    """Return the bytes/s of allocating pinned memory, and of registering memory that is already in use.

    The second is None where the runtime does not offer registration.
    """
    buffer = torch.zeros(size, dtype=torch.uint8)
    start = time.perf_counter()
    pinned = buffer.pin_memory()
    took = time.perf_counter() - start
    del pinned
    runtime = torch.cuda.cudart()
    if not hasattr(runtime, "cudaHostRegister"):
        return size / took, None
    start = time.perf_counter()
    failed = int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
    registered = time.perf_counter() - start
    if failed or int(runtime.cudaHostUnregister(buffer.data_ptr())):
        from ...core.device.cuda_runtime import forget_error

        forget_error(torch.device("cuda", torch.cuda.current_device()))
        return size / took, None
    return size / took, size / registered


def pinning(device) -> tuple[tuple[PinTrial, ...], PinLimit | None]:
    """Return the ways to get pinned memory that were tried, and the system's limit of pinned memory."""
    from ...core.device.stream_engine import runtime_pinner
    from ...core.device.system_pinner import tried_ways

    limit = runtime_pinner(device).limit(ALL_PINNED.nbytes)
    return tried_ways(device), limit


def room_on_card(device, free: int) -> int:
    """Return the bytes of the card that this process can allocate, where the driver reports ``free``."""
    from ...core.device import wddm
    from ...core.device.video_memory import local_memory

    return wddm.room(free, local_memory(device))


def probe_gpu(memory: HostMemory) -> Gpu:
    """Measure the current CUDA or ROCm device in about 2 s, with at most 1 GiB of its memory.

    Raises `Absent` where there is no device. A measurement that fails is noted in `Gpu.failures`.
    """
    before = _used_before_us()
    import torch

    if not torch.cuda.is_available():
        raise host_probe.NotAvailable("torch sees no CUDA or ROCm device")
    index = torch.cuda.current_device()
    device = torch.device("cuda", index)
    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    capability = getattr(properties, "gcnArchName", "") if hip else f"sm_{properties.major}{properties.minor}"
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if bf16 else torch.float16
    failures: dict[str, str] = {}

    def attempt(name: str, work: Callable[[], object]):
        """Return the result of `work`, or None with a note in `failures` if an error was raised."""
        try:
            return work()
        except Exception as error:  # for example out of memory, or refused pinning; each becomes a finding
            failures[name] = f"{type(error).__name__}: {str(error)[:200]}"
            return None

    with torch.no_grad(), torch.cuda.device(index):
        link = attempt("link", lambda: measure_link(torch, device, free)) or ()
        by_shape = attempt("compute", lambda: measure_compute(torch, device, dtype)) or ()
        memory_rate = attempt("memory", lambda: _memory_rate(torch, device, min(256 * MIB, free // 16)))
        launch = attempt("launching", lambda: measure_launch(torch, device))
        layer = attempt("a layer", lambda: measure_layer(torch, device, dtype))
        # Pinning is timed on at most 256 MiB, and on less where little RAM is free.
        size = max(MIB, min(256 * MIB, memory.available // 16))
        pin = attempt("pinning", lambda: _pin_rates(torch, size)) or (None, None)
        trials, limit = attempt("the ways of pinning", lambda: pinning(device)) or ((), None)
        torch.cuda.empty_cache()  # cached memory of the probes would count as used by this process later
    return Gpu(
        index, properties.name, "rocm" if hip else "cuda", driver_version(), capability, total, room_on_card(device, free), before,
        link, combined_rate(by_shape) if by_shape else None, by_shape, "bf16" if bf16 else "fp16",
        memory_rate, pin[0], pin[1], launch, layer, failures, trials, limit,
    )  # fmt: skip


def _memory_rate(torch, device, size: int) -> float:
    """Return the bytes/s of device memory, counting both the read and the write of a copy."""
    a = torch.zeros(max(size, MIB), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * a.numel() / _timed(torch, lambda: b.copy_(a), 0.05)


def probe(
    folder: str | os.PathLike = ".",
    *,
    disk: bool = True,
    extras: bool = True,
    unsafe: TorchInstall | None = None,
) -> Hardware:
    """Probe the whole machine in a few seconds. Never raises.

    `folder`: a folder on the drive to measure, where the models are stored; `disk`, `extras`: whether to
    probe the drive and the optional backends; `unsafe`: a torch that must not be imported in this process,
    because it crashed another one.
    """
    start = time.monotonic()
    torch = unsafe or torch_build()
    memory = host_probe.host_memory()
    gpu: Gpu | None = None
    reason: str | None = "torch cannot be imported"
    cpu_flops = None
    if unsafe is not None:
        reason = "not measured, because the proof on the GPU crashed or hung"
    elif torch.error is None:
        gpu, reason = host_probe.call_with_timeout(lambda: probe_gpu(memory), GPU_SECONDS, "the GPU probe")
        if gpu is None:
            cpu_flops, _ = host_probe.call_with_timeout(measure_cpu, 5.0, "the CPU probe")
    rate, disk_reason = (
        host_probe.call_with_timeout(lambda: host_probe.disk_rate(folder), 15.0, "the disk probe")
        if disk
        else (None, host_probe.NOT_ASKED)
    )
    kind = None if gpu is None else gpu.kind
    found = (probe_aimdo(kind),) if extras else ()
    return Hardware(
        host_probe.system_name(), torch, memory, gpu, reason, cpu_flops, rate, disk_reason, found,
        time.monotonic() - start,
    )  # fmt: skip
