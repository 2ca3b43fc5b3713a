"""The real ComfyUI server, stock beside Carom, with the card's free memory held to a limit; a fresh server each.

    COMFYUI_PATH=/path/to/ComfyUI python3 benchmarks/comfy_gpu.py [--limits none,6GiB,4GiB] [--json FILE]

Run by path from anywhere; COMFYUI_PYTHON names the Python that runs ComfyUI (default: this one). A Flux-shaped checkpoint
of random bf16 weights is written first (--double and --single: its depth; 19 and 38 are Flux.1-dev's 22 GiB). For each limit and
loader a headless server starts as on a user's machine (stock: DynamicVRAM where ComfyUI chooses it) and gets three prompts:
the first loads the file; the second, of another seed, is the one whose iterations are timed (device events between sampler
steps, median without the first); before the first and the third, of two steps, the file is thrown out of the page cache, so
that everybody begins from the disk, and whatever is read again is counted. `--alternate` adds two models taking turns. Device memory is what the whole card lost; host memory is the server's
anonymous memory (RssAnon) beyond what it had before the first prompt, sampled. Without a GPU: `--tiny --cpu`, which proves the path and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """The model, and what one sampler step computes: ``tokens`` of text, ``side`` of the latent (8 pixels each)."""

    double: int = 8
    single: int = 16
    hidden: int = 3072
    width: int = 4096
    pooled: int = 768
    tokens: int = 512
    side: int = 128


TINY = Shape(3, 4, 256, 128, 64, 8, 16)


@dataclass(frozen=True)
class Config:
    """``loader``: "stock", or a codec of Carom's loader, "@" and its vram widget where that is not auto;
    ``alternating``: two models take turns."""

    limit: int | None
    loader: str
    alternating: bool = False

    @property
    def codec(self) -> str:
        return self.loader.partition("@")[0]

    @property
    def vram(self) -> str:
        return self.loader.partition("@")[2] or "auto"


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    comfyui = os.environ.get("COMFYUI_PATH", "").split(os.pathsep)[0]
    if not comfyui:
        print("set COMFYUI_PATH to a ComfyUI folder")
        return 2
    lib = load_checkout()
    shape = replace(TINY if arguments.tiny else Shape(), **{
        name: value for name in ("double", "single") if (value := getattr(arguments, name)) is not None
    })  # fmt: skip
    parse = lib["sizes"].parse_size
    limits = [None] if arguments.cpu else [
        None if word == "none" else parse(word, setting="limits") for word in arguments.limits.split(",")
    ]  # fmt: skip
    loaders = [word for word in arguments.loaders.split(",") if word]
    configs = [Config(limit, loader) for limit in limits for loader in loaders]
    if arguments.alternate:
        limit, _, words = arguments.alternate.partition("=")
        free = None if arguments.cpu or limit == "none" else parse(limit, setting="alternate")
        configs += [Config(free, loader, True) for loader in (words or "stock,lossless").split(",")]
    record = lib["record"].new_record("comfy_gpu", sys.argv[1:] if argv is None else argv)
    record |= {"shape": asdict(shape), "steps": arguments.steps, "runs": []}
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="carom-comfy-", dir=arguments.work))
    try:
        bench = Bench(lib, comfyui, folder, shape, arguments)
        bench.prepare()
        record["file_bytes"] = bench.file.stat().st_size
        print(
            f"checkpoint of {record['file_bytes'] / GIB:.2f} GiB ready after {time.monotonic() - started:.0f} s",
            flush=True,
        )
        for config in configs:
            if time.monotonic() - started > arguments.seconds:
                run: dict[str, Any] = {"status": "skipped", "reason": "the time given was over"}
            else:
                run = bench.run(config)
            record["runs"].append({**asdict(config), **run})
            print(_line(record["runs"][-1]), flush=True)
            if arguments.json:
                lib["record"].write_record(record, arguments.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(record))
    return 0 if all(run["status"] != "failed" for run in record["runs"]) and same_latents(record) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limits", default="none,6GiB,4GiB", help="free memory of the card, none: all of it")
    parser.add_argument(
        "--loaders", default="stock,raw,lossless", help="stock, or CODEC or CODEC@VRAM of Carom's loader"
    )
    parser.add_argument("--mode", default="auto", help="of Carom's loader")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=3, choices=(2, 3), help="2: without the third")
    parser.add_argument(
        "--alternate",
        default="",
        help="LIMIT=LOADERS: two models and a text encoder taking turns, as in 6GiB=stock,raw",
    )
    parser.add_argument("--turns", type=int, default=2, help="of each model, once both were loaded")
    parser.add_argument("--double", type=int, help="double blocks (8)")
    parser.add_argument("--single", type=int, help="single blocks (16)")
    parser.add_argument(
        "--touch-gb", type=float, default=0, help="first use so much host memory: guests that grow"
    )
    parser.add_argument("--seconds", type=float, default=480, help="no configuration begins after this")
    parser.add_argument("--json", type=Path, help="keep the record here")
    parser.add_argument(
        "--work", help="where the checkpoint goes; it is removed (default: the system's temporary folder)"
    )
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--options", default="", help="further options of every server, separated by spaces")
    parser.add_argument("--tiny", action="store_true", help="a model of 18 MB")
    parser.add_argument("--cpu", action="store_true", help="no GPU")
    return parser


def load_checkout() -> dict[str, Any]:
    """The checkout's modules, imported as the package carom whatever its folder is called."""
    if "carom" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["carom"] = module
        spec.loader.exec_module(module)
    names = (
        "core.sizes", "benchmarks.record", "benchmarks.comfy_host", "benchmarks.comfy_alternation", "benchmarks.card",
    )  # fmt: skip
    return {name.rpartition(".")[2]: importlib.import_module(f"carom.{name}") for name in names}


class Bench:
    """The data folder of the servers, below ``folder``, and one run per configuration."""

    def __init__(
        self, lib: dict[str, Any], comfyui: str, folder: Path, shape: Shape, arguments: argparse.Namespace
    ) -> None:
        self.lib, self.comfyui, self.folder, self.shape, self.arguments = (
            lib,
            comfyui,
            folder,
            shape,
            arguments,
        )
        self.file = folder / "models" / "diffusion_models" / "bench.safetensors"
        self.text_encoder = folder / "models" / "text_encoders" / "bench_clip.safetensors"
        self.python = lib["comfy_host"].PYTHON

    def prepare(self) -> None:
        """Host memory, node packs, an empty page (no frontend package is needed) and the checkpoint."""
        if self.arguments.touch_gb:
            self.lib["card"].touch(int(self.arguments.touch_gb * 1e9))
        pack = self.folder / "custom_nodes" / "carom_bench"
        for path in (pack, self.folder / "input", self.folder / "user", self.folder / "page"):
            path.mkdir(parents=True)
        shutil.copy(ROOT / "benchmarks" / "comfy_pack.py", pack / "__init__.py")
        (self.folder / "custom_nodes" / "carom").symlink_to(ROOT, target_is_directory=True)
        (self.folder / "page" / "index.html").write_text(
            "<!doctype html><title>no page</title>", encoding="utf-8"
        )
        script = str(ROOT / "benchmarks" / "comfy_checkpoint.py")
        clip = [str(self.text_encoder)] if self.arguments.alternate else []
        made = subprocess.run(
            [self.python, script, self.comfyui, str(self.file), json.dumps(asdict(self.shape)), *clip],
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"the checkpoint could not be made:\n{made.stderr[-4000:]}")
        print(made.stdout.strip().splitlines()[-1], flush=True)

    def run(self, config: Config) -> dict[str, Any]:
        """Figures of one configuration; a failure is a result too."""
        card: Any = contextlib.nullcontext()
        if not self.arguments.cpu:
            card = self.lib["card"].Card(config.limit)
        turns = "-turns" if config.alternating else ""
        log = self.folder / f"server-{config.limit}-{config.loader}{turns}.log"
        server = self.lib["comfy_host"].ComfyServer(self.comfyui, self.folder, log)
        try:
            with card as held, contextlib.closing(contextlib.ExitStack()) as stack:
                stack.callback(server.stop)
                return self._measure(config, server, held)
        except Exception as error:
            return {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[-1500:]}"}
        finally:
            if self.arguments.logs and log.exists():
                self.arguments.logs.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, self.arguments.logs / f"{log.stem.replace('@', '-')}.txt")

    def _measure(self, config: Config, server: Any, card: Any) -> dict[str, Any]:
        options = [*(["--cpu"] if self.arguments.cpu else []), *self.arguments.options.split()]
        began = time.monotonic()
        server.start("--front-end-root", str(self.folder / "page"), "--disable-api-nodes", *options)
        result: dict[str, Any] = {"status": "ok", "server_start_s": time.monotonic() - began}
        result["dynamic_vram"] = "DynamicVRAM support detected and enabled" in server.tail(1 << 20)
        widgets = server.get("/object_info/CaromLoadDiffusionModel")["CaromLoadDiffusionModel"]["input"][
            "optional"
        ]
        codecs = widgets["codec"][1].get("options") or widgets["codec"][0]
        if config.codec != "stock" and config.codec not in codecs:
            return {"status": "skipped", "reason": f"the node offers no codec {config.codec!r}"}
        if config.alternating:
            _evict(self.file)
            alternation = self.lib["comfy_alternation"]
            found = alternation.run(server, self, config, self.arguments.turns, self.arguments.steps, _evict)
            return result | found | ({} if card is None else {"card": card.figures()})
        prompts = [("first", 1, self.arguments.steps), ("second", 2, self.arguments.steps), ("third", 2, 2)]
        prompts = prompts[: self.arguments.prompts]
        with watched(server.pid) as memory:
            for name, seed, steps in prompts:
                if name != "second":
                    _evict(self.file)
                before, posted = _io(server.pid), time.time()
                told = server.run(self.prompt(config, seed, steps), timeout=300)["sample"]["told"][0]
                after = _io(server.pid)
                told["read_bytes"] = {key: after[key] - before[key] for key in after}
                told["wall_s"] = told["ended"] - posted
                told["loading_s"] = told["started"] - posted
                result[name] = told
                if card is not None:
                    told["card"] = card.figures()
            result["host"] = memory.summary()
        if card is not None:
            least = min(result[name]["card"]["least_free"] for name, _, _ in prompts)
            result["card"] = {
                "free_before_bytes": card.start["free"],
                "peak_bytes": card.start["free"] - least,
            }
        timed = result["second"]["iterations_s"][1:] or result["second"]["iterations_s"]
        result["s_per_iteration"] = statistics.median(timed)
        result["s_per_iteration_min_max"] = [min(timed), max(timed)]
        return result

    def io(self, pid: int) -> dict[str, int]:
        return _io(pid)

    def prompt(self, config: Config, seed: int, steps: int, name: str = "") -> dict[str, Any]:
        """One image with the model of that file name."""
        node, name = self.lib["comfy_host"].node, name or self.file.name
        if config.codec == "stock":
            loader = node("UNETLoader", unet_name=name, weight_dtype="default")
        else:
            vram, mode = config.vram, self.arguments.mode
            if self.arguments.cpu:  # where auto leaves all to ComfyUI
                vram, mode = "8MiB" if vram == "auto" else vram, "stream"
            loader = node(
                "CaromLoadDiffusionModel",
                unet_name=name,
                weight_dtype="default",
                mode=mode,
                vram=vram,
                codec=config.codec,
            )
        shape = self.shape
        sample = node(
            "CaromBenchSample", model=["load", 0], tokens=shape.tokens, width=shape.width, pooled=shape.pooled,
            side=shape.side, seed=seed, steps=steps,
        )  # fmt: skip
        return {"load": loader, "sample": sample}


class watched:
    """Samples a process's memory while it is entered; Linux (elsewhere the resident set alone)."""

    def __init__(self, pid: int, every_s: float = 0.05) -> None:
        self.pid, self.every_s = pid, every_s
        self.peaks: dict[str, int] = {}
        self.before = dict(_memory(pid))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._used = _used()

    def __enter__(self) -> watched:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self.every_s):
            self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(OSError):
            for key, value in [*_memory(self.pid), ("machine_used_bytes", _used() - self._used)]:
                self.peaks[key] = max(self.peaks.get(key, 0), value)

    def summary(self) -> dict[str, Any]:
        """Peaks so far, and what is held now."""
        self._sample()
        return {"before": self.before, "peak": dict(self.peaks), "now": dict(_memory(self.pid))}


def _memory(pid: int) -> Iterator[tuple[str, int]]:
    names = {
        "RssAnon": "anonymous_bytes",
        "VmRSS": "resident_bytes",
        "RssShmem": "shared_bytes",
        "VmPin": "pinned_bytes",
    }
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        import psutil

        yield "resident_bytes", psutil.Process(pid).memory_info().rss
        return
    for line in status.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key in names:
            yield names[key], int(value.split()[0]) * 1024


def _used() -> int:
    import psutil

    found = psutil.virtual_memory()
    return found.total - found.available


def _io(pid: int) -> dict[str, int]:
    """Bytes the process had fetched from storage, and bytes it asked for by read calls."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return {"storage": found["read_bytes"], "calls": found["rchar"]}


def _evict(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def same_latents(record: dict[str, Any]) -> bool:
    """Whether all runs made the same bits, and finite ones."""
    done = [run for run in record["runs"] if run["status"] == "ok"]
    runs = [run for run in done if not run.get("alternating")]
    turns = [run for run in done if run.get("alternating")]
    hashes = {
        tuple(run[name]["hash"] for name in ("first", "second", "third") if name in run) for run in runs
    }
    hashes_of_turns = {run["turns"][0]["hash"] for run in turns}
    same = len(hashes) <= 1 and len(hashes_of_turns) <= 1 and all(run["same_latents"] for run in turns)
    return same and all(run["second"]["finite"] for run in runs)


def _limit(run: dict[str, Any]) -> str:
    return "no limit" if run["limit"] is None else f"{run['limit'] / GIB:g} GiB"


def _line(run: dict[str, Any]) -> str:
    if run["status"] != "ok":
        return f"{_limit(run)} {run['loader']}: {run['status']}: {run['reason']}"
    if run.get("alternating"):
        return f"{_limit(run)} {run['loader']}, two models: a turn {run['turn_s']:.2f} s"
    return f"{_limit(run)} {run['loader']}: {run['s_per_iteration']:.4f} s/it, first image {run['first']['wall_s']:.1f} s"


def table(record: dict[str, Any]) -> str:
    """The comparison, a line a run."""
    lines = [
        f"{'free':<9}{'loader':<16}{'s/it':>8}{'of stock':>9}{'first s':>8}{'2nd s':>7}{'card GiB':>9}{'host GiB':>9}"
        f"{'x file':>7}{'read 2nd, 3rd MB':>18}{'waited':>8}  latent"
    ]
    stock: dict[Any, float] = {}
    turns = [run for run in record["runs"] if run.get("alternating")]
    for run in record["runs"]:
        if run in turns and run["status"] == "ok":
            continue
        if run["status"] != "ok":
            lines.append(
                f"{_limit(run):<9}{run['loader']:<16}{run['status']}: {run['reason'].splitlines()[-1][:90]}"
            )
            continue
        seconds = run["s_per_iteration"]
        if run["loader"] == "stock":
            stock[run["limit"]] = seconds
        ratio = f"{seconds / stock[run['limit']]:.3f}" if run["limit"] in stock else ""
        key = "anonymous_bytes" if "anonymous_bytes" in run["host"]["peak"] else "resident_bytes"
        peak = run["host"]["peak"][key] - run["host"]["before"][key]
        card = f"{run['card']['peak_bytes'] / GIB:.2f}" if "card" in run else ""
        reads = ", ".join(
            f"{run[name]['read_bytes'].get('storage', 0) / 1e6:.0f}"
            for name in ("second", "third")
            if name in run
        )
        report = run["second"]["report"] or {}
        waited = (
            f"{100 * report['stall_seconds'] / report['step_seconds']:.1f} %"
            if report.get("step_seconds") and report.get("stall_seconds") is not None
            else ""
        )
        lines.append(
            f"{_limit(run):<9}{run['loader']:<16}{seconds:>8.4f}{ratio:>9}{run['first']['wall_s']:>8.2f}{run['second']['wall_s']:>7.2f}{card:>9}"
            f"{peak / GIB:>9.2f}{peak / record['file_bytes']:>7.2f}{reads:>18}{waited:>8}  {run['second']['hash'][:10]}"
        )
    comfy_alternation = importlib.import_module("carom.benchmarks.comfy_alternation")

    lines += [
        f"{_limit(run):<9}{run['loader']:<16}two models: {comfy_alternation.line(run)}"
        for run in turns
        if run["status"] == "ok"
    ]
    lines.append("latents: " + ("equal, bit for bit" if same_latents(record) else "DIFFERENT"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
