"""The proof of `carom doctor --amd`: a small model, streamed and trained on the AMD GPU, must equal the resident one.

The steps run in a child process, because any of them may crash or hang. A line on stdout before and after each step
tells the parent (amd.py) which step did not come back.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "@carom "
# A float32 layer has 4 MiB: more than the granularity of allocators, so that three of the five layers have to stream.
WIDTH, DEPTH = 1024, 5
BUDGET = 3 * WIDTH * WIDTH * 4 + (2 << 20)  # bytes of device memory


class Refused(Exception):
    """A step that failed, with the reason as its text; the proof of later steps goes on."""


def tell(step: str, state: str, **facts: Any) -> None:
    """Print one event as a line of its own, because libraries write to the same stream."""
    sys.stdout.write(f"\n{MARK}{json.dumps({'step': step, 'state': state, **facts}, default=str)}\n")
    sys.stdout.flush()


def run_step(step: str, action: Callable[[], dict[str, Any] | None]) -> bool:
    """Run ``action`` between its two events and return whether it succeeded."""
    tell(step, "start")
    try:
        facts = action() or {}
    except Exception as error:
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        tell(step, "failed", why=text[:500])
        return False
    tell(step, "ok", **facts)
    return True


def import_torch() -> dict[str, Any]:
    """Return torch's version, and the version of HIP that torch was built with."""
    import torch

    return {"version": torch.__version__, "hip": torch.version.hip}


def find_gpu(device: Any) -> dict[str, Any]:
    """Return the GPU's name, architecture and memory in bytes, after one exact computation on it."""
    import torch

    values = torch.arange(4096, dtype=torch.int32)
    if device.type == "cpu":
        return {"name": "CPU", "arch": "", "vram_bytes": 0, "integrated": False}
    if not torch.cuda.is_available():
        raise Refused("torch sees no GPU")
    if not torch.equal((values.to(device) * 3 + 1).cpu(), values * 3 + 1):
        raise Refused("integers computed on the GPU are wrong")
    from ...core.device.make_engine import make_engine

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "arch": getattr(properties, "gcnArchName", ""),
        "vram_bytes": properties.total_memory,
        "integrated": bool(make_engine("cuda:0").shares_host),
    }


def find_runtimes() -> dict[str, Any]:
    """Return the HIP runtimes that this process has loaded, and those that torch's packages brought."""
    import torch

    from ...core.device.runtime_library import loaded_libraries

    package = Path(torch.__file__).resolve().parent
    brought: list[Path] = []
    for folder in (
        package / "lib",
        *package.parent.glob("_rocm_sdk_*/bin"),
        *package.parent.glob("_rocm_sdk_*/lib"),
    ):
        brought += folder.glob("*amdhip64*")
    names = [
        path
        for path in loaded_libraries()
        if "amdhip64" in path.replace("\\", "/").rpartition("/")[2].lower()
    ]
    return {"loaded": sorted(set(names)), "brought": sorted(map(str, brought))}


def pin(device: Any) -> None:
    """Copy pinned memory to the GPU and back, and compare."""
    import torch

    values = torch.arange(1 << 20, dtype=torch.int32)
    pinned = values if device.type == "cpu" else values.pin_memory()
    back = torch.empty_like(values).copy_(pinned.to(device, non_blocking=True))
    if not torch.equal(back, values):
        raise Refused("a copy from pinned memory to the GPU and back changed bytes")


def train(device: Any, stream: Callable[..., Any]) -> dict[str, Any]:
    """Train the resident model and the streamed one for two steps and compare outputs, gradients and weights.

    Raises Refused where they differ, unless two resident runs differ as well.
    """
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)), torch.nn.Linear(WIDTH, 8)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    model[:DEPTH].requires_grad_(False)
    x = torch.randn(8, WIDTH, generator=generator).to(device).requires_grad_()

    def steps(trained: Any) -> list[torch.Tensor]:
        """Return what two steps of SGD compute: outputs, gradients of the input, and the trained weights."""
        seen: list[torch.Tensor] = []
        for _ in range(2):
            x.grad = None
            output = trained(x)
            output.square().sum().backward()
            assert x.grad is not None
            seen += [output.detach().clone(), x.grad.clone()]
            with torch.no_grad():
                for parameter in trained[DEPTH].parameters():
                    parameter -= 1e-4 * parameter.grad
                    parameter.grad = None
        return seen + [parameter.detach().clone() for parameter in trained[DEPTH].parameters()]

    resident = [steps(copy.deepcopy(model).to(device)) for _ in range(2)]
    repeats = all(map(torch.equal, *resident))
    settings = {"granularity": "layer", "codec": "raw", "pool": "torch"}
    with stream(model, device=device, vram=BUDGET, **settings) as session:
        if session.plan.all_resident:
            raise Refused("the model did not stream")
        streamed = steps(model)
    close = all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(resident[0], streamed, strict=True)
    )
    if not close or (repeats and not all(map(torch.equal, resident[0], streamed))):
        raise Refused("a streamed model gave other results than the resident one")
    return {"exact": repeats}


def main(device_name: str = "cuda:0") -> None:
    """Run all steps; a step that needs an earlier one is left out where that one failed."""
    if not run_step("torch", import_torch):
        return
    import torch

    device = torch.device(device_name)
    if not run_step("gpu", lambda: find_gpu(device)):
        return
    run_step("runtime", find_runtimes)
    run_step("pin", lambda: pin(device))

    def streamed() -> dict[str, Any]:
        from ...core.session.session import stream

        return train(device, stream)

    run_step("train", streamed)
    tell("end", "ok")


def try_triton(device_name: str = "cuda:0") -> None:
    """Tell why Triton cannot decode on the device, or "" if it can."""
    import torch

    from ...core.codec.backends import triton_hindrance

    tell("triton", "ok", reason=triton_hindrance(torch.device(device_name)))
