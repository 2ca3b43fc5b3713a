"""A LoRA on a card with little free memory, in ComfyUI without its server: the latents of stock and of Carom.

    COMFYUI_PATH=/path/to/ComfyUI python3 benchmarks/hosts/comfy_lora.py [--limit 6GiB] [--json FILE]

Run by path from any folder. COMFYUI_PYTHON names the Python that runs ComfyUI (default: this one). First a Flux-shaped
checkpoint of random bf16 weights is written (9.4 GiB). Then stock (its dynamic path, where ComfyUI chooses it) and Carom
run the same prompts, each in a fresh process, while a second process holds the rest of the card: `--plain` prompts without
a LoRA, two with one on all linear weights of the blocks, and one without. The run fails if latents differ, or if ComfyUI
logged that it left out the LoRA of a weight.

ComfyUI's folders comfy, comfy_execution, comfy_config and utils and its top-level files are enough. `--root` names the
checkout of Carom to run (default: this one). Without a GPU, `--tiny --cpu` tests the path; stock's low-VRAM path is the
reference then.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RANK = 32


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    comfyui = os.environ.get("COMFYUI_PATH", "").split(os.pathsep)[0]
    if not comfyui:
        print("set COMFYUI_PATH to a ComfyUI folder")
        return 2
    sys.path.insert(0, str(HERE))
    comfy_gpu: Any = importlib.import_module("comfy_gpu")
    lib = comfy_gpu.load_checkout()
    shape = comfy_gpu.TINY if arguments.tiny else comfy_gpu.Shape()
    limit = lib["sizes"].parse_size(arguments.limit, setting="limit")
    peers = {"ComfyUI": lib["process"].checkout_commit(Path(comfyui))}
    record = lib["record"].new_record("comfy_lora", sys.argv[1:] if argv is None else argv, peers=peers)
    record |= {"shape": asdict(shape), "steps": arguments.steps, "limit": limit, "runs": {}}
    folder = Path(tempfile.mkdtemp(prefix="carom-comfy-lora-", dir=arguments.work))
    python = lib["comfy_host"].PYTHON
    try:
        file = folder / "bench.safetensors"
        subprocess.run(
            [python, str(HERE / "comfy_checkpoint.py"), comfyui, str(file), json.dumps(asdict(shape))],
            check=True,
        )
        if arguments.touch_gb:
            lib["card"].touch(int(arguments.touch_gb * 1e9))
        for loader in ("stock", "carom"):
            job = {
                "comfyui": comfyui, "file": str(file), "shape": asdict(shape), "loader": loader, "cpu": arguments.cpu,
                "steps": arguments.steps, "root": str(arguments.root.resolve()), "vram": arguments.vram,
                "plain": arguments.plain,
            }  # fmt: skip
            card = contextlib.nullcontext() if arguments.cpu else lib["card"].Card(limit, python)
            with card:
                record["runs"][loader] = _run(python, job)
            if arguments.json:
                lib["record"].write_record(record, arguments.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _verdict(record["runs"], arguments.plain + 3)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", default="6GiB", help="free memory of the card")
    parser.add_argument("--vram", default="auto", help="vram of Carom's node")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plain", type=int, default=3, help="prompts without a LoRA before those with one")
    parser.add_argument("--json", type=Path, help="keep the record here")
    parser.add_argument("--work", help="where the checkpoint goes; it is removed")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the checkout of Carom to run")
    parser.add_argument(
        "--touch-gb", type=float, default=0, help="first use so much host memory: guests that grow"
    )
    parser.add_argument("--tiny", action="store_true", help="a model of 18 MB")
    parser.add_argument("--cpu", action="store_true", help="no GPU")
    return parser


def _run(python: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the prompts in a new process; return what it told of each."""
    print(f"-- {job['loader']}", flush=True)
    command = [python, str(Path(__file__).resolve()), "--job", json.dumps(job)]
    told = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line.rstrip(), flush=True)
            if line.startswith("{"):
                told.append(json.loads(line))
    if process.returncode:
        told.append({"failed": process.returncode})
    return told


def _verdict(runs: dict[str, list[dict[str, Any]]], prompts: int) -> int:
    pairs = list(zip(runs["stock"], runs["carom"], strict=False))
    same = [one.get("hash") == other.get("hash") for one, other in pairs if "hash" in one]
    ok = len(same) == prompts and all(same)
    ok = ok and not any(
        run.get("errors") or not run.get("finite") for found in runs.values() for run in found
    )
    print(f"latents equal: {same}; {'ok' if ok else 'broken'}")
    return 0 if ok else 1


# -- in the process that runs ComfyUI


class _Errors(logging.Handler):
    """Collects the lines with which ComfyUI's adapters report a weight whose patch they left out."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("ERROR ") or "Calculate Weight Failed" in text:
            self.lines.append(text)


def run_job(job: dict[str, Any]) -> None:
    """Run the prompts and print a line of JSON for each."""
    errors = _start_comfyui(job)
    import comfy.sample  # type: ignore[import-not-found]
    import comfy.sd  # type: ignore[import-not-found]
    import torch

    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(job["file"])
        if job["loader"] == "carom":
            model = _with_carom(job, model)
        patched, _ = comfy.sd.load_lora_for_models(model, None, _lora(job["file"]), 1.0, 0.0)
        seeds = range(1, job["plain"] + 1)
        for seed, with_lora in (*((seed, False) for seed in seeds), (101, True), (102, True), (1, False)):
            began = time.monotonic()
            one = patched if with_lora else model
            if job["cpu"] and job["loader"] == "stock":
                one = _low_vram(one.clone())
            latent = _sample(job, one, seed)
            told = {
                "seed": seed, "lora": with_lora, "seconds": round(time.monotonic() - began, 2),
                "hash": hashlib.sha256(latent.view(torch.uint8).numpy().tobytes()).hexdigest(),
                "finite": bool(torch.isfinite(latent.float()).all()), "errors": errors.lines[:],
                "class": type(one).__name__, "loaded_bytes": int(one.loaded_size()),
            }  # fmt: skip
            errors.lines.clear()
            streaming = one.model.__dict__.get("_carom_streaming")
            if streaming is not None:
                names = ("offer", "kept", "needs", "lacked", "budget", "held", "streamed", "from_disk")
                told["carom"] = {name: getattr(streaming, name, None) for name in names}
            if not job["cpu"]:
                told["free_bytes"] = torch.cuda.mem_get_info()[0]
            print(json.dumps(told), flush=True)


def _start_comfyui(job: dict[str, Any]) -> _Errors:
    """Import ComfyUI as its main.py does, with dynamic VRAM where main.py would choose it."""
    sys.argv = ["main.py", *(["--cpu"] if job["cpu"] else [])]
    sys.path.insert(0, job["comfyui"])
    os.chdir(job["comfyui"])
    import comfy.options  # type: ignore[import-not-found]

    comfy.options.enable_args_parsing()
    from comfy.cli_args import args, enables_dynamic_vram  # type: ignore[import-not-found]

    errors = _Errors()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    logging.getLogger().addHandler(errors)
    if not job["cpu"]:
        importlib.import_module("cuda_malloc")  # chooses torch's allocator
    control: Any = importlib.import_module("comfy_aimdo.control")
    if enables_dynamic_vram():
        control.init(simple_vram_headroom=None, nvml_pressure=not args.disable_nvml_pressure)
    import comfy.memory_management  # type: ignore[import-not-found]
    import comfy.model_management  # type: ignore[import-not-found]
    import comfy.model_patcher  # type: ignore[import-not-found]

    if enables_dynamic_vram():
        devices = [device.index for device in comfy.model_management.get_all_torch_devices()]
        headroom = int(args.vram_headroom * 1024**3)
        if control.init_devices((index, headroom) for index in devices):
            comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
            comfy.memory_management.aimdo_enabled = True
    print(f"dynamic VRAM: {comfy.memory_management.aimdo_enabled}", flush=True)
    return errors


def _with_carom(job: dict[str, Any], model: Any) -> Any:
    root = Path(job["root"])
    spec = importlib.util.spec_from_file_location(
        "carom", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["carom"] = module
    spec.loader.exec_module(module)
    convert: Any = importlib.import_module("carom.nodes.convert_patchers")
    mode, vram = ("stream", "8MiB") if job["cpu"] else ("auto", job["vram"])
    made, way = convert.offload(model, convert.Settings(mode=mode, vram=vram), fresh=True)
    print(f"carom: {way}", flush=True)
    return made


def _low_vram(patcher: Any) -> Any:
    own = type(patcher)
    patcher.__class__ = type(
        own.__name__, (own,), {"load": lambda self, to=None, *a, **k: own.load(self, to, 1)}
    )
    return patcher


def _lora(file: str) -> dict[str, Any]:
    import torch
    from safetensors import safe_open

    generator = torch.Generator().manual_seed(11)
    found = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no dict
            shape = opened.get_slice(name).get_shape()
            if "_blocks." in name and name.endswith(".weight") and len(shape) == 2:
                base = f"diffusion_model.{name.removesuffix('.weight')}"
                down, up = (RANK, shape[1]), (shape[0], RANK)
                for kind, size in (("lora_down", down), ("lora_up", up)):
                    value = torch.randn(size, generator=generator) * 0.02
                    found[f"{base}.{kind}.weight"] = value.to(torch.bfloat16)
    return found


def _sample(job: dict[str, Any], model: Any, seed: int) -> Any:
    import comfy.sample
    import torch

    shape, generator = job["shape"], torch.Generator().manual_seed(7)
    extra = {"pooled_output": torch.randn(1, shape["pooled"], generator=generator)}
    condition = [[torch.randn(1, shape["tokens"], shape["width"], generator=generator), extra]]
    latent = torch.zeros(1, 16, shape["side"], shape["side"])
    noise = comfy.sample.prepare_noise(latent, seed)
    result = comfy.sample.sample(
        model, noise, job["steps"], 1.0, "euler", "simple", condition, condition, latent, denoise=1.0, seed=seed,
        disable_pbar=True,
    )  # fmt: skip
    return result.cpu().contiguous()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        run_job(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
