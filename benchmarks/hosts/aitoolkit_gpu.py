"""The real ai-toolkit job, plain and stock offloading beside `offload: bouncing`; each an unmodified run.py of its own.

    AI_TOOLKIT_PATH=/path/to/ai-toolkit python3 benchmarks/hosts/aitoolkit_gpu.py [--configs plain,stock,all/auto,...] [--json FILE]

Run by path from any folder. AI_TOOLKIT_PYTHON names the Python that runs ai-toolkit (default: this one;
docs/ai-toolkit.md lists the packages that it needs). The job trains a LoRA on a Z-Image-shaped random model (--layers
12: 2.9 B parameters) with 512 px, batch 1, bf16 and checkpointing. Latents and captions are cached by a first job
with a small model.

A configuration is `plain`, `stock` (layer_offloading of all layers), `stock50` (of that many percent of the layers)
or BUDGET/CODEC for bouncing. BUDGET is one of:

- a size, or `auto`;
- `all`: everything streams; the budget is the peak of the stock run minus activations and other memory
  (`--stock-peak` gives that peak if stock does not run);
- `half`: the budget leads to half of the peak of the plain run, activations included.

The prefix "float8-" quantises the model, and the suffixes "@RANK" and "#STEPS" apply to one job. `--text-layers`
gives the jobs a second model that works in every step. The configurations of one comparison take turns, each in a
fresh process, `--rounds` times; ";" in --configs begins another comparison, which runs after the one before it. Two
plain runs show how much two runs of the same job differ. `--limit` leaves so many bytes of the card to configurations
whose BUDGET is `auto`, and another process holds the rest. `--limit fit` leaves the bytes of weights, adapters,
gradients and optimizer together.

The whole job is measured: the seconds from its start to the end of its first step, of samples and of saves between
steps, and of all of it (aitoolkit_parts.py). The table has their ratios to the plain run and to stock.

Seconds per step are the median of the time from the end of a step to the end of the next, over warm steps without a
sample or a save; the record keeps these samples. Two more steps run under the profiler, for the kernel time of a step. Peaks are those of torch's
allocator over the steps. The run ends within `--limit-s` seconds: a case that is not expected to end in time is
skipped, and the record says so. Without a GPU, `--tiny --cpu` tests the path and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = ROOT / "tests" / "support" / "ai_toolkit"
if __name__ == "__main__":  # run by its path: runs itself as a part of the package, for any folder name
    sys.path.insert(0, str(ROOT / "benchmarks" / "engines"))
    launch = importlib.import_module("launch")
    sys.path.pop(0)  # its modules could shadow others
    launch.load_checkout()
    sys.exit(importlib.import_module("carom.benchmarks.hosts.aitoolkit_gpu").main())

from .aitoolkit_cases import (  # noqa: E402
    Config,
    Shape,
    against,
    figures,
    fits,
    job,
    line,
    losses,
    needed,
    phases,
    table,
)  # fmt: skip
from .aitoolkit_ready import Ready, copied, processes  # noqa: E402
from .rounds import TimeLimit, interleaved  # noqa: E402

CONFIGS = "plain,stock,stock50,all/auto,half/auto;float8-plain,float8-half/auto"
LEAST = re.compile(
    r"least budget that works is (\d+) bytes"
)  # matches the text of a BudgetError in a job's log
TINY_BUDGET = "34MiB"  # used on the CPU, where no device peak is known


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    checkout = os.environ.get("AI_TOOLKIT_PATH")
    if not checkout:
        print("set AI_TOOLKIT_PATH to an ai-toolkit checkout")
        return 2
    comparisons = [[Config(word) for word in words.split(",")] for words in arguments.configs.split(";")]
    configs = interleaved(comparisons, arguments.rounds)
    if not arguments.cpu and (lacking := needed(configs, bool(arguments.stock_peak))):
        print(lacking)
        return 2
    time_limit = TimeLimit(arguments.limit_s)
    folder = Path(tempfile.mkdtemp(prefix="carom-ait-", dir=arguments.work))
    bench = Bench(Path(checkout).resolve(), folder, arguments, len(configs), time_limit)
    try:
        lib = bench.lib = load_checkout()
        peers = {"ai-toolkit": lib["process"].checkout_commit(Path(checkout))}
        record = lib["record"].new_record(
            "aitoolkit_gpu", sys.argv[1:] if argv is None else argv, peers=peers
        )
        record |= {
            "layers": arguments.layers,
            "text_layers": arguments.text_layers,
            "steps": arguments.steps,
            "rank": arguments.rank,
            "rounds": arguments.rounds,
            "runs": [],
        }
        record["prepared"] = bench.prepare()
        print(f"ready after {time_limit.elapsed_s():.0f} s: {record['prepared']}", flush=True)
        for config in configs:
            if not time_limit.fits(config.word):
                run: dict[str, Any] = {
                    "status": "skipped",
                    "reason": f"no time left of {arguments.limit_s:g} s",
                }
            else:
                began = time.monotonic()
                run = bench.run(config)
                time_limit.took(config.word, time.monotonic() - began)
            record["runs"].append({"config": config.word, **run})
            print(line(record["runs"][-1]), flush=True)
            if arguments.json:
                lib["record"].write_record(record, arguments.json)
    finally:
        bench.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(table(record))
    print(losses(record))
    return 0 if all(run["status"] != "failed" for run in record["runs"]) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", default=CONFIGS)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each configuration, in turns")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument(
        "--text-layers", type=int, default=0, metavar="N",
        help="captions are encoded in every step, by a Qwen3 of N layers of the real widths (default: cached ones)",
    )  # fmt: skip
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--mode", default="bouncing", help="of offload, where a configuration has a budget")
    parser.add_argument("--granularity", default="auto", help="of offload_kwargs")
    parser.add_argument("--limit", help="free memory of the card where BUDGET is auto: a size, or `fit`")
    parser.add_argument("--stock-peak", help="VRAM that a kept run of stock took: a size, for BUDGET `all`")
    parser.add_argument(
        "--touch-gb", type=float, default=0, help="first use so much host memory: guests that grow"
    )
    parser.add_argument("--limit-s", type=float, default=560, help="seconds within which the run ends")
    parser.add_argument("--json", type=Path, help="keep the record here")
    parser.add_argument("--logs", type=Path, help="keep the jobs' logs in this folder")
    parser.add_argument(
        "--host-profile", action="store_true",
        help="samples, saves and some steps run under cProfile; files *.prof in the folder of --logs; no times to report",
    )  # fmt: skip
    parser.add_argument("--work", help="where models and outputs go; removed afterwards (default: temporary)")
    parser.add_argument("--tiny", action="store_true", help="a model of 20 M parameters, 64 pixels")
    parser.add_argument(
        "--device", default="cuda", help="of the jobs: cuda:1 is one (memory is read of the first)"
    )
    parser.add_argument("--cpu", action="store_true", help="no GPU")
    return parser


def load_checkout() -> dict[str, Any]:
    """Return the checkout's modules that the benchmark uses, by name."""
    names = (
        "core.common.sizes",
        "benchmarks.engines.record",
        "benchmarks.hosts.card",
        "benchmarks.hosts.process",
        "tools.ai_toolkit_folder",
    )
    return {name.rpartition(".")[2]: importlib.import_module(f"carom.{name}") for name in names}


class Bench:
    """The copy of the ai-toolkit checkout, the model and the jobs, all below ``folder``; ``lib``: result of
    `load_checkout`.

    The constructor starts slow work in parallel: ``jobs`` processes import, the models are written, and memory is
    touched.
    """

    lib: dict[str, Any]

    def __init__(
        self,
        checkout: Path,
        folder: Path,
        arguments: argparse.Namespace,
        jobs: int,
        time_limit: TimeLimit,
    ) -> None:
        self.folder, self.arguments, self.time_limit = folder, arguments, time_limit
        self.place = folder / "ai-toolkit"
        self.python = os.environ.get("AI_TOOLKIT_PYTHON", sys.executable)
        links = folder / "path"
        links.mkdir()
        (links / "carom").symlink_to(ROOT, target_is_directory=True)
        path = [str(TESTS / "aitoolkit_site"), str(links), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "SEED": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        if arguments.cpu:
            self.env |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
        self.done: dict[str, dict[str, Any]] = {}  # the first result of each configuration
        self.shape = Shape(
            64 if arguments.tiny else arguments.pixels, arguments.rank, not arguments.no_checkpointing,
            "cpu" if arguments.cpu else arguments.device,
            arguments.mode, arguments.granularity, not arguments.text_layers,
        )  # fmt: skip
        self._began = time.monotonic()
        copied(checkout, self.place)
        self._ready = Ready(self.python, self.place, self.env, folder / "imports.txt", processes(jobs + 1))
        self._writing = {part: self._write(part) for part in ("rest", "encoder", "transformer")}
        code = "import numpy, sys; numpy.empty(int(sys.argv[1]), numpy.uint8).fill(1)"
        pieces = int(arguments.touch_gb * 1e9 / 2**30) + 1 if arguments.touch_gb else 0
        self._touching = [
            subprocess.Popen([sys.executable, "-c", code, str(int(arguments.touch_gb * 1e9 / pieces))])
            for _ in range(pieces)
        ]

    def _write(self, part: str) -> subprocess.Popen:
        """Start a process that writes one part of the model."""
        layers = 0 if self.arguments.tiny else self.arguments.layers
        target = [str(TESTS), str(self.folder / "models"), str(layers), str(self.shape.pixels)]
        target.append(str(self.arguments.text_layers))
        return subprocess.Popen(
            [self.python, str(HERE / "aitoolkit_shape.py"), part, *target], env=self.env, text=True,
            stdout=subprocess.DEVNULL, stderr=(self.folder / f"{part}.txt").open("w"),
        )  # fmt: skip

    def prepare(self) -> dict[str, float]:
        """Wait until the background work is done, and fill the caches of latents and captions with a job of a small
        model.

        Return the seconds from the start to the end of each part of the work.
        """
        took: dict[str, float] = {}

        def done(what: str) -> None:
            took[what] = round(time.monotonic() - self._began, 1)

        self.lib["ai_toolkit_folder"].install(self.place)
        probe = self.place / "extensions" / "carom_bench_probe"
        probe.mkdir()
        shutil.copy(HERE / "aitoolkit_probe.py", probe / "__init__.py")
        shutil.copy(HERE / "device_time.py", probe)
        self._written("rest")
        done("small model written")
        warm = self._job("warm", Config("plain"), None, steps=1, model="small")
        if warm["status"] != "ok":
            imports = (self.folder / "imports.txt").read_text("utf-8")[-2000:]
            raise RuntimeError(
                f"the job that fills the caches failed: {warm['reason']}\n{warm['log']}\n{imports}"
            )
        done("caches filled")
        self._written("encoder")
        self._written("transformer")
        done("model written")
        for process in self._touching:
            process.wait()
        done("memory touched")
        self._ready.imported()
        done("all imported")
        return took

    def _written(self, part: str) -> None:
        if self._writing[part].wait(timeout=self.time_limit.left_s()):
            errors = (self.folder / f"{part}.txt").read_text("utf-8")[-4000:]
            raise RuntimeError(f"the model's {part} could not be written:\n{errors}")

    def run(self, config: Config) -> dict[str, Any]:
        """Return the figures of one configuration; a failure is also returned as a result."""
        budget: int | str | None = None
        if config.bounces:
            try:
                budget = self._budget(config)
            except KeyError as error:
                return {"status": "skipped", "reason": f"needs {error.args[0]} run before it"}
        with self._card(config) or contextlib.nullcontext():
            result = self._job(config.word, config, budget)
        least = LEAST.search(result.get("log", ""))
        if result["status"] == "failed" and least and config.budget in ("all", "half"):
            first, budget = budget, int(least[1])
            result = self._job(config.word, config, budget)
            result["budget_refused"] = first
        if config.bounces:
            result["budget"] = budget
        other = self.done.get(config.plain) or self._longer_or_shorter(config)
        self.done.setdefault(config.word, result)
        if result["status"] == "ok" and other is not None and other["status"] == "ok":
            result["against_plain"] = against(result["losses"], other["losses"])
        if result["status"] == "ok":
            result.pop("log", None)
        return result

    def _longer_or_shorter(self, config: Config) -> dict[str, Any] | None:
        """Return a plain run of the same job with another number of steps; its first losses and its peaks are as
        good. None if none ran.
        """
        return next((run for word, run in self.done.items() if Config(word).is_plain_of(config)), None)

    def _budget(self, config: Config) -> int | str:
        """Return the bytes for the budgets "all" and "half", from the peaks of earlier runs; return other budgets
        unchanged.
        """
        if config.budget not in ("all", "half"):
            return config.budget
        if self.arguments.cpu:
            return TINY_BUDGET
        plain = self._peak("plain", Config("plain"))
        beside = max(
            0, plain - self._weights()
        )  # activations, adapters, optimizer: all but the model's own weights
        if config.budget == "all":
            if self.arguments.stock_peak:
                return self.lib["sizes"].parse_size(self.arguments.stock_peak, setting="stock-peak") - beside
            return self._peak("stock") - beside
        return self._peak(config.plain, config) // 2 - beside

    def _peak(self, word: str, config: Config | None = None) -> int:
        found = self.done.get(word) or (config and self._longer_or_shorter(config)) or {}
        if found.get("status") != "ok":
            raise KeyError(word)
        return found["peak_reserved_bytes"]

    def _card(self, config: Config) -> Any:
        """Return the `Card` that limits the memory to `--limit` for a configuration, or None for the whole card."""
        limit = self.arguments.limit
        if not limit or config.budget != "auto":
            return None
        if limit != "fit":
            return self.lib["card"].Card(self.lib["sizes"].parse_size(limit, setting="limit"))
        return self.lib["card"].Card(fits(self._shapes(), self._weights(), config.rank or self.shape.rank))

    def _weights(self) -> int:
        encoder = (self.folder / "models" / "zimage" / "text_encoder").glob("*.safetensors")
        streams = encoder if self.arguments.text_layers else ()
        return sum(file.stat().st_size for file in (*self._files(), *streams))

    def _files(self) -> list[Path]:
        return sorted((self.folder / "models" / "zimage" / "transformer").glob("*.safetensors"))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights that get an adapter: those of Z-Image's layers, but not of its refiners."""
        found = {}
        for file in self._files():
            with file.open("rb") as read:
                header = json.loads(read.read(int.from_bytes(read.read(8), "little")))
            found.update({n: tuple(one["shape"]) for n, one in header.items() if n.startswith("layers.")})
        return found

    def _job(
        self,
        word: str,
        config: Config,
        budget: int | str | None,
        steps: int | None = None,
        model: str = "zimage",
    ) -> dict[str, Any]:
        name = "job-" + re.sub(r"[^A-Za-z0-9]+", "-", word)
        path, told, log = (self.folder / f"{name}{end}" for end in (".job.json", ".told.json", ".txt"))
        told.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "output", ignore_errors=True)
        steps = steps or config.steps or self.arguments.steps
        file = job(name, config, self.shape, self.folder, budget, steps, model)
        path.write_text(json.dumps(file), encoding="utf-8")
        began, start = time.monotonic(), time.time()
        settings = {"CAROM_BENCH_OUT": str(told)}
        if self.arguments.host_profile:
            settings["CAROM_BENCH_PROFILE"] = "1"
        code = self._ready.run(path, log, settings, self.time_limit.left_s(600))
        ended = time.time()
        text = log.read_text(encoding="utf-8", errors="replace")
        if self.arguments.logs:
            self.arguments.logs.mkdir(parents=True, exist_ok=True)
            for source in (log, *self.folder.glob(f"{told.name}.*.prof")):
                shutil.copy(source, self.arguments.logs / source.name)
        steps_done = json.loads(told.read_text(encoding="utf-8"))["steps"] if told.exists() else []
        result: dict[str, Any] = {"job_s": time.monotonic() - began, "steps_done": len(steps_done)}
        result["carom_lines"] = re.findall(
            r"carom: [^\r\n]*", text
        )  # also after a progress bar in the same line
        result["oom_skipped"] = text.count("OOM during training step, skipping")
        if code or not steps_done:
            errors = [line for line in text.splitlines() if "Error" in line] or text.splitlines()[-1:]
            return {
                **result,
                "status": "failed",
                "reason": (errors or ["no output"])[-1][-500:],
                "log": text[-4000:],
            }
        noted = json.loads(told.read_text(encoding="utf-8"))
        result |= {**figures(noted), "seconds": phases(noted, start, ended)}
        result["total_s"] = ended - noted["asked"] - noted["profiling_s"]
        report = next((self.folder / "output").rglob("report.json"), None)
        result["report"] = None if report is None else json.loads(report.read_text(encoding="utf-8"))
        return {**result, "status": "ok", "log": text[-4000:]}

    def close(self) -> None:
        """End the processes that are still running."""
        self._ready.close()
        for process in (*self._touching, *self._writing.values()):
            if process.poll() is None:
                process.kill()
            process.wait()
