"""Counts, on the CPU, what patches (LoRA and other adapters) cost a step in ComfyUI beside their arithmetic; no times.

    COMFYUI_PATH=/path/to/ComfyUI python3 benchmarks/hosts/comfy_patches.py [--json FILE] [--root CHECKOUT]

Run by path from any folder, with the Python that runs ComfyUI. For each kind of adapter a small model whose weights
stream runs with the adapter on each weight: once, once more, with another strength, with a second adapter of its kind
and without any. The record has for each of these loads:

- `host_reads`: for each step, the operators that read a tensor of the adapters in host memory. Each is a copy to the
  device, if there is one;
- `calls`: Python and C functions that are called to patch one weight. `stock_calls`: the same for ComfyUI alone;
- `prepared_bytes`: bytes of the adapters' tensors that Carom holds on the device;
- `equal`: whether the outputs equal those of ComfyUI bit for bit: of its low-VRAM path as it is, and with patches that
  are copied in the way of its dynamic patcher.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
WIDTH, BLOCKS, RANK, STEPS = 128, 8, 16, 3
KINDS = ("lora", "dora", "lokr", "loha", "oft", "boft", "glora", "diff")
VRAM = "4MiB"  # room for the adapters; in mode "stream" at least 1/8 of the weights stream
CPU = torch.device("cpu")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="keep the record here")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout of Carom to run")
    arguments = parser.parse_args(argv)
    comfyui = os.environ.get("COMFYUI_PATH", "").split(os.pathsep)[0]
    if not comfyui:
        print("set COMFYUI_PATH to a ComfyUI folder")
        return 2
    _start(comfyui, arguments.root.resolve())
    kinds = {kind: _run(kind) for kind in KINDS}
    record = {"steps": STEPS, "patched_weights": BLOCKS, "kinds": kinds}
    for kind, loads in kinds.items():
        for name, told in loads.items():
            print(f"{kind:6} {name:9} {told}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1), "utf-8")
    return 0 if all(told["equal"] for loads in kinds.values() for told in loads.values()) else 1


def _start(comfyui: str, root: Path) -> None:
    """Import ComfyUI for the CPU, and the checkout ``root`` as the package carom."""
    sys.argv = sys.argv[:1]
    sys.path.insert(0, comfyui)
    from comfy.cli_args import args  # type: ignore[import-not-found]

    args.cpu = True
    spec = importlib.util.spec_from_file_location(
        "carom", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["carom"] = module
    spec.loader.exec_module(module)


def adapter(kind: str, name: str, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter of ``kind`` for the square weight ``name``, as a file has them."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).to(dtype)

    up, down, alpha, block = made(WIDTH, RANK), made(RANK, WIDTH), torch.tensor(8.0), WIDTH // 8
    parts: dict[str, torch.Tensor] = {
        "lora": {"lora_up.weight": up, "lora_down.weight": down, "alpha": alpha},
        "dora": {"lora_up.weight": up, "lora_down.weight": down, "alpha": alpha, "dora_scale": made(WIDTH, 1) + 1},
        "lokr": {"lokr_w1": made(8, 8), "lokr_w2_a": made(block, 4), "lokr_w2_b": made(4, block), "alpha": alpha},
        "loha": {
            "hada_w1_a": up, "hada_w1_b": down, "hada_w2_a": made(WIDTH, RANK), "hada_w2_b": made(RANK, WIDTH),
            "alpha": alpha,
        },
        "oft": {"oft_blocks": made(8, block, block), "alpha": torch.tensor(0.01)},
        "boft": {"oft_blocks": made(2, 8, block, block), "alpha": torch.tensor(0.01)},
        "glora": {
            "a1.weight": down, "a2.weight": up, "b1.weight": made(RANK, WIDTH), "b2.weight": made(WIDTH, RANK),
            "alpha": alpha,
        },
        "diff": {"diff": made(WIDTH, WIDTH)},
    }[kind]  # fmt: skip
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}


class Model(nn.Module):
    """In the form of ComfyUI's models: the network is one of its members."""

    manual_cast_dtype = None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        from comfy.ops import disable_weight_init  # type: ignore[import-not-found]

        layers = [disable_weight_init.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(BLOCKS)]
        self.diffusion_model = nn.Sequential(*layers)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


class HostReads(TorchDispatchMode):
    """Counts the operators that read one of the tensors ``sources``."""

    def __init__(self, sources: list[torch.Tensor]) -> None:
        super().__init__()
        self.count, self._sources = 0, {tensor.data_ptr() for tensor in sources}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [leaf for leaf in tree_leaves((args, kwargs or {})) if type(leaf) is torch.Tensor]
        self.count += any(leaf.data_ptr() in self._sources for leaf in read)
        return function(*args, **(kwargs or {}))


def _run(kind: str) -> dict[str, dict[str, Any]]:
    """Return what was counted for each load of a model with adapters of ``kind``."""
    import comfy.lora  # type: ignore[import-not-found]
    from comfy.model_patcher import ModelPatcher  # type: ignore[import-not-found]

    settings: Any = importlib.import_module("carom.nodes.node_settings")
    patcher: Any = importlib.import_module("carom.nodes.patcher")
    names = [f"diffusion_model.{number}" for number in range(BLOCKS)]
    keys = {name: f"{name}.weight" for name in names}
    files = [
        {key: t for number, name in enumerate(names) for key, t in adapter(kind, name, 100 * one + number).items()}
        for one in range(2)
    ]  # fmt: skip

    def patched(plain: Any, chain: list[tuple[int, float]]) -> Any:
        clone = plain.clone()
        for number, strength in chain:
            clone.add_patches(comfy.lora.load_lora(files[number], keys), strength)
        return clone

    # ComfyUI computes OFT in float32 alone. The adapters are float32, and are cast for the other kinds.
    dtype = torch.float32 if kind in ("oft", "boft") else torch.bfloat16
    ours = loaded = patcher.wear(
        ModelPatcher(Model(dtype), CPU, CPU), settings.Settings(mode="stream", vram=VRAM)
    )
    sources = [tensor for file in files for tensor in file.values()]
    told: dict[str, dict[str, Any]] = {}
    chains = {
        "plain": [], "first": [(0, 1.0)], "again": [(0, 1.0)], "strength": [(0, 0.6)],
        "second": [(0, 0.6), (1, 0.5)], "removed": [],
    }  # fmt: skip
    for name, chain in chains.items():
        one = patched(ours, chain)
        loaded.detach(unpatch_all=False)
        loaded = one
        with torch.inference_mode():
            one.partially_load(CPU, 1e32)
            one.pre_run()
        reads, outputs = [], []
        for _ in range(STEPS):
            with HostReads(sources) as mode:
                outputs.append(_step(one, dtype))
            reads.append(mode.count)
        stock = patched(ModelPatcher(Model(dtype), CPU, CPU), chain)
        with torch.inference_mode():
            stock.partially_load(CPU, 1)
        expected = [_step(stock, dtype)]
        calls = _calls(stock, dtype)
        _prepare_as_dynamic(stock)
        expected.append(_step(stock, dtype))
        prepared = getattr(one.model.__dict__["_carom_streaming"], "patches", None)
        told[name] = {
            "host_reads": reads, "calls": _calls(one, dtype), "stock_calls": calls,
            "prepared_bytes": 0 if prepared is None else prepared.nbytes,
            "equal": all(torch.equal(output, one) for output in outputs for one in expected),
        }  # fmt: skip
    return told


def _prepare_as_dynamic(patcher: Any) -> None:
    """Copy the patches of ``patcher`` as ComfyUI's dynamic patcher does before a step."""
    for module in patcher.model.diffusion_model:
        for function in module.weight_function:
            if hasattr(function, "prepare"):  # else ComfyUI is older
                function.prepare(torch.empty(function.memory_required(), dtype=torch.uint8), None)


def _step(patcher: Any, dtype: torch.dtype) -> torch.Tensor:
    network = patcher.model.diffusion_model
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).to(dtype)
    with torch.inference_mode():
        return network(x).clone()


def _calls(patcher: Any, dtype: torch.dtype) -> int:
    """Return the number of Python and C functions that are called to patch the first weight."""
    count = [0]
    functions = patcher.model.diffusion_model[0].weight_function
    weight = torch.ones(WIDTH, WIDTH, dtype=dtype)

    def note(frame: Any, event: str, arg: Any) -> None:
        count[0] += event in ("call", "c_call")

    with torch.inference_mode():
        sys.setprofile(note)
        try:
            for function in functions:
                weight = function(weight)
        finally:
            sys.setprofile(None)
    return count[0]


if __name__ == "__main__":
    sys.exit(main())
