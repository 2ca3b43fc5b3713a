"""The real ai-toolkit job, plain and stock offloading beside `offload: bouncing`; each an unmodified run.py of its own.

    AI_TOOLKIT_PATH=/path/to/ai-toolkit python3 benchmarks/aitoolkit_gpu.py [--configs plain,stock,all/raw,...] [--json FILE]

Run by path from anywhere; AI_TOOLKIT_PYTHON names the Python that runs ai-toolkit (default: this one; docs/ai-toolkit.md
says what it needs). The job trains a LoRA on a Z-Image-shaped random model (--layers 12: 2.9 B parameters), 512 px, batch 1,
bf16, checkpointing on, latents and captions cached by a first job that is not counted. A configuration is `plain`, `stock`
(layer_offloading) or BUDGET/CODEC for bouncing, where BUDGET is a size, `auto`, `all` (everything streams: what stock's peak
leaves beside the activations) or `half` (of plain's peak, activations included); "float8-" before it quantises the model.
Seconds per step: from the end of a step to the end of the next, median of the warm ones; peaks: of torch's allocator
over the same steps. Without a GPU: `--tiny --cpu`, which proves the path and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
CONFIGS = "plain,stock,all/raw,all/lossless,half/auto,float8-plain,float8-half/auto"
WARM = 5  # the probe's steps before the figures begin
FLOAT8 = "float8-"
LEAST = re.compile(r"least budget that works is (\d+) bytes")  # of a BudgetError in a job's log
TINY_BUDGET = "34MiB"  # no device's peaks to derive one from


@dataclass(frozen=True)
class Config:
    """One word of --configs."""

    word: str

    @property
    def float8(self) -> bool:
        return self.word.startswith(FLOAT8)

    @property
    def bounces(self) -> bool:
        return "/" in self.word

    @property
    def budget(self) -> str:
        return self.word.removeprefix(FLOAT8).partition("/")[0]

    @property
    def codec(self) -> str:
        return self.word.partition("/")[2]

    @property
    def plain(self) -> str:
        """The word of the run that this one's losses and peaks are compared with."""
        return FLOAT8 + "plain" if self.float8 else "plain"


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    checkout = os.environ.get("AI_TOOLKIT_PATH")
    if not checkout:
        print("set AI_TOOLKIT_PATH to an ai-toolkit checkout")
        return 2
    lib = load_checkout()
    record = lib["record"].new_record("aitoolkit_gpu", sys.argv[1:] if argv is None else argv)
    record |= {"layers": arguments.layers, "steps": arguments.steps, "rank": arguments.rank, "runs": []}
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="carom-ait-", dir=arguments.work))
    card: Any = contextlib.nullcontext()
    if arguments.limit:
        card = lib["card"].Card(lib["sizes"].parse_size(arguments.limit, setting="limit"))
    try:
        with card:
            bench = Bench(Path(checkout).resolve(), folder, arguments, lib)
            bench.prepare()
            print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
            for config in (Config(word) for word in arguments.configs.split(",")):
                if time.monotonic() - started > arguments.seconds:
                    run: dict[str, Any] = {"status": "skipped", "reason": "the time given was over"}
                else:
                    run = bench.run(config)
                record["runs"].append({"config": config.word, **run})
                print(_line(record["runs"][-1]), flush=True)
                if arguments.json:
                    lib["record"].write_record(record, arguments.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(record))
    return 0 if all(run["status"] != "failed" for run in record["runs"]) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", default=CONFIGS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--limit", help="free memory of the card, the rest held by another process")
    parser.add_argument(
        "--touch-gb", type=float, default=0, help="first use so much host memory: guests that grow"
    )
    parser.add_argument("--seconds", type=float, default=480, help="no configuration begins after this")
    parser.add_argument("--json", type=Path, help="keep the record here")
    parser.add_argument("--logs", type=Path, help="keep the jobs' logs in this folder")
    parser.add_argument("--work", help="where models and outputs go; removed afterwards (default: temporary)")
    parser.add_argument("--tiny", action="store_true", help="a model of 20 M parameters, 64 pixels")
    parser.add_argument("--cpu", action="store_true", help="no GPU")
    return parser


def load_checkout() -> dict[str, Any]:
    """The checkout's modules, imported as the package carom whatever its folder is called; the tests' by their path."""
    if "carom" not in sys.modules:
        _load("carom", ROOT / "__init__.py", [str(ROOT)])
    names = ("core.sizes", "benchmarks.record", "benchmarks.card")
    lib: dict[str, Any] = {
        name.rpartition(".")[2]: importlib.import_module(f"carom.{name}") for name in names
    }
    return {**lib, "matrix": _load("aitoolkit_matrix", TESTS / "aitoolkit_matrix.py")}


def _load(name: str, path: Path, folders: list[str] | None = None) -> Any:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Bench:
    """The checkout behind links, the model and the jobs, all below ``folder``."""

    def __init__(
        self, checkout: Path, folder: Path, arguments: argparse.Namespace, lib: dict[str, Any]
    ) -> None:
        self.folder, self.arguments, self.lib = folder, arguments, lib
        self.place, self.checkout = folder / "ai-toolkit", checkout
        self.python = os.environ.get("AI_TOOLKIT_PYTHON", sys.executable)
        links = folder / "path"
        links.mkdir()
        (links / "carom").symlink_to(ROOT, target_is_directory=True)
        path = [str(TESTS / "aitoolkit_site"), str(links), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "SEED": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg",
            "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        if arguments.cpu:
            self.env |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
        self.done: dict[str, dict[str, Any]] = {}

    def prepare(self) -> None:
        """Host memory, the checkout with our two extensions, the model, and the caches of latents and captions."""
        arguments = self.arguments
        if arguments.touch_gb:
            self.lib["card"].touch(int(arguments.touch_gb * 1e9))
        self.lib["matrix"].mirror(self.checkout, self.place)
        self._call([self.python, "-m", "carom", "install-ai-toolkit", str(self.place)])
        probe = self.place / "extensions" / "carom_bench_probe"
        probe.mkdir()
        shutil.copy(ROOT / "benchmarks" / "aitoolkit_probe.py", probe / "__init__.py")
        layers, pixels = (0, 64) if arguments.tiny else (arguments.layers, arguments.pixels)
        script = str(ROOT / "benchmarks" / "aitoolkit_shape.py")
        print(
            self._call(
                [self.python, script, str(TESTS), str(self.folder / "models"), str(layers), str(pixels)]
            ),
            end="",
        )
        warm = self._job("warm", Config("plain"), None, steps=2)
        if warm["status"] != "ok":
            raise RuntimeError(f"the job that fills the caches failed: {warm['reason']}\n{warm['log']}")

    def _call(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:3])} failed:\n{done.stderr[-4000:]}")
        return done.stdout

    def run(self, config: Config) -> dict[str, Any]:
        """Figures of one configuration; a failure is a result too."""
        budget: int | str | None = None
        if config.bounces:
            try:
                budget = self._budget(config)
            except KeyError as error:
                return {"status": "skipped", "reason": f"needs {error.args[0]} run before it"}
        result = self._job(config.word, config, budget)
        least = LEAST.search(result.get("log", ""))
        if result["status"] == "failed" and least and config.budget in ("all", "half"):
            first, budget = budget, int(least[1])
            result = self._job(config.word, config, budget)
            result["budget_refused"] = first
        if config.bounces:
            result["budget"] = budget
        self.done[config.word] = result
        other = self.done.get(config.plain)
        if result["status"] == "ok" and other is not None and other["status"] == "ok":
            result["against_plain"] = against(result["losses"], other["losses"])
        if result["status"] == "ok":
            result.pop("log", None)
        return result

    def _budget(self, config: Config) -> int | str:
        """Bytes for "all" and "half", from the peaks of the runs before; other words as they are."""
        if config.budget not in ("all", "half"):
            return config.budget
        if self.arguments.cpu:
            return TINY_BUDGET
        plain = self._peak("plain")
        weights = sum(
            f.stat().st_size
            for f in (self.folder / "models" / "zimage" / "transformer").glob("*.safetensors")
        )
        beside = max(0, plain - weights)  # activations, adapters, optimizer: all but the model's own weights
        if config.budget == "all":
            return self._peak("stock") - beside
        return self._peak(config.plain) // 2 - beside

    def _peak(self, word: str) -> int:
        found = self.done.get(word, {})
        if found.get("status") != "ok":
            raise KeyError(word)
        return found["peak_reserved_bytes"]

    def _config(self, name: str, config: Config, budget: int | str | None, steps: int) -> dict[str, Any]:
        cpu, arguments = self.arguments.cpu, self.arguments
        model: dict[str, Any] = {"name_or_path": str(self.folder / "models" / "zimage"), "arch": "zimage"}
        if config.float8:
            model |= {"quantize": True, "qtype": "float8"}
        if config.bounces:
            model |= {"offload": "bouncing", "offload_kwargs": {"vram": budget, "codec": config.codec}}
        elif config.word.removeprefix(FLOAT8) == "stock":
            model["layer_offloading"] = True
        pixels = 64 if arguments.tiny else arguments.pixels
        process = {
            "type": "sd_trainer",
            "training_folder": str(self.folder / "output"),
            "device": "cpu" if cpu else "cuda",
            "network": {"type": "lora", "linear": arguments.rank, "linear_alpha": arguments.rank},
            "save": {"dtype": "float16", "save_every": 1 << 20, "max_step_saves_to_keep": 1},
            "datasets": [
                {
                    "folder_path": str(self.folder / "models" / "images"), "caption_ext": "txt",
                    "resolution": [pixels], "cache_latents_to_disk": True,
                }
            ],
            "train": {
                "batch_size": 1, "steps": steps, "gradient_checkpointing": not arguments.no_checkpointing,
                "train_unet": True, "train_text_encoder": False, "noise_scheduler": "flowmatch", "optimizer": "adamw",
                "lr": 1e-4, "dtype": "float32" if cpu else "bf16", "disable_sampling": True,
                "cache_text_embeddings": True,
            },
            "model": model,
            "sample": {
                "sampler": "flowmatch", "sample_every": 1 << 20, "width": pixels, "height": pixels,
                "prompts": ["a red cat"], "neg": "", "seed": 42, "guidance_scale": 3, "sample_steps": 2,
            },
        }  # fmt: skip
        return {
            "job": "extension",
            "config": {"name": name, "process": [process]},
            "meta": {"name": "[name]"},
        }

    def _job(
        self, word: str, config: Config, budget: int | str | None, steps: int | None = None
    ) -> dict[str, Any]:
        name = "job-" + re.sub(r"[^A-Za-z0-9]+", "-", word)
        path, told, log = (self.folder / f"{name}{end}" for end in (".job.json", ".told.json", ".txt"))
        told.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "output", ignore_errors=True)
        path.write_text(
            json.dumps(self._config(name, config, budget, steps or self.arguments.steps)), encoding="utf-8"
        )
        began = time.monotonic()
        with log.open("w") as out:
            try:
                code = subprocess.run(
                    [self.python, "run.py", str(path)], cwd=self.place, stdout=out, stderr=subprocess.STDOUT, timeout=600,
                    env={**self.env, "CAROM_BENCH_OUT": str(told)},
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = -1
        text = log.read_text(encoding="utf-8", errors="replace")
        if self.arguments.logs:
            self.arguments.logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, self.arguments.logs / log.name)
        steps_done = json.loads(told.read_text(encoding="utf-8"))["steps"] if told.exists() else []
        result: dict[str, Any] = {"job_s": time.monotonic() - began, "steps_done": len(steps_done)}
        result["carom_lines"] = [line for line in text.splitlines() if line.startswith("carom: ")]
        result["oom_skipped"] = text.count("OOM during training step, skipping")
        if code or not steps_done:
            errors = [line for line in text.splitlines() if "Error" in line] or text.splitlines()[-1:]
            return {
                **result,
                "status": "failed",
                "reason": (errors or ["no output"])[-1][-500:],
                "log": text[-4000:],
            }
        result |= figures(json.loads(told.read_text(encoding="utf-8")))
        report = next((self.folder / "output").rglob("report.json"), None)
        result["report"] = None if report is None else json.loads(report.read_text(encoding="utf-8"))
        return {**result, "status": "ok", "log": text[-4000:]}


def figures(told: dict[str, Any]) -> dict[str, Any]:
    """Medians and peaks of what the probe noted."""
    ends = [end for _, end, _ in told["steps"]]
    gaps = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    warm = gaps[WARM:] or gaps
    memory = told["memory"]
    end = memory["end"]
    return {
        "s_per_step": statistics.median(warm) if warm else math.nan,
        "s_per_step_min_max": [min(warm), max(warm)] if warm else [],
        "s_in_step": statistics.median(b - a for a, b, _ in told["steps"][WARM + 1 :] or told["steps"]),
        "losses": [loss for _, _, loss in told["steps"]],
        "peak_reserved_bytes": end.get("peak_reserved_bytes", 0),
        "peak_reserved_whole_job_bytes": max(m.get("peak_reserved_bytes", 0) for m in memory.values()),
        "rss_bytes": end["rss_bytes"],
        "anonymous_bytes": end.get("anonymous_bytes"),
        "peak_rss_bytes": end.get("peak_rss_bytes"),
        "torch_pinned_bytes": end.get("torch_pinned_bytes"),
        "memory": memory,
    }


def against(losses: list[float], plain: list[float]) -> dict[str, Any]:
    """How far a loss curve is from the plain run's: steps that are equal, and the largest relative difference."""
    pairs = [(a, b) for a, b in zip(losses, plain, strict=False) if a is not None and b is not None]
    return {
        "compared": len(pairs),
        "equal": sum(a == b for a, b in pairs),
        "largest_relative": max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0),
    }


def carom_pinned(run: dict[str, Any]) -> int:
    """Bytes that Carom pinned, of all models in its report."""
    models = ((run.get("report") or {}).get("models") or {}).values()
    return sum(model.get("pinned_peak_bytes") or 0 for model in models)


def _line(run: dict[str, Any]) -> str:
    if run["status"] != "ok":
        return f"{run['config']}: {run['status']}: {run['reason']}"
    return f"{run['config']}: {run['s_per_step']:.4f} s/step ({run['job_s']:.0f} s)"


def table(record: dict[str, Any]) -> str:
    """The comparison, a line a run; GB are 10^9 bytes."""
    lines = [
        f"{'config':<24}{'s/step':>8}{'of plain':>9}{'VRAM GB':>8}{'RSS GB':>8}{'anon GB':>8}{'pinned GB':>10}{'waited':>8}"
        "  losses equal, largest difference"
    ]
    seconds = {run["config"]: run["s_per_step"] for run in record["runs"] if run["status"] == "ok"}
    for run in record["runs"]:
        if run["status"] != "ok":
            lines.append(f"{run['config']:<24}{run['status']}: {run['reason'][:110]}")
            continue
        plain = seconds.get(Config(run["config"]).plain)
        ratio = f"{run['s_per_step'] / plain:.3f}" if plain else ""
        pinned = (run["torch_pinned_bytes"] or 0) + carom_pinned(run)
        models = ((run["report"] or {}).get("models") or {}).values()
        stalls = [
            (m["stall_seconds"], m["step_seconds"])
            for m in models
            if m.get("step_seconds") and m.get("stall_seconds") is not None
        ]
        waited = f"{100 * stalls[0][0] / stalls[0][1]:.1f} %" if stalls else ""
        found = run.get("against_plain")
        losses = f"{found['equal']} of {found['compared']}, {found['largest_relative']:.1e}" if found else ""
        lines.append(
            f"{run['config']:<24}{run['s_per_step']:>8.4f}{ratio:>9}{run['peak_reserved_bytes'] / 1e9:>8.2f}"
            f"{run['rss_bytes'] / 1e9:>8.2f}{(run['anonymous_bytes'] or 0) / 1e9:>8.2f}{pinned / 1e9:>10.2f}{waited:>8}  {losses}"
            + (f"  {run['oom_skipped']} steps skipped by OOM" if run["oom_skipped"] else "")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
