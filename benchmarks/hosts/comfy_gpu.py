"""The real ComfyUI server, stock beside Carom, with the card's free memory held to a limit; a fresh server each.

    COMFYUI_PATH=/path/to/ComfyUI python3 benchmarks/hosts/comfy_gpu.py [--limits 6GiB,4GiB,none] [--json FILE]

Run by path from any folder. COMFYUI_PYTHON names the Python that runs ComfyUI (default: this one). First a
Flux-shaped checkpoint of random bf16 weights is written (--double and --single: its depth; 19 and 38 are Flux.1-dev's
22 GiB). For each limit the loaders take turns (stock, Carom, stock, Carom for two `--rounds`), each time in a fresh
headless server that starts as on a user's machine (stock: DynamicVRAM if ComfyUI chooses it).

A server gets two prompts. The first prompt loads the file, which is not in the page cache then. The second, with
another seed, is timed by device events between sampler steps; its samples are `samples_s`. `--settle` adds prompts of
20 steps in which Carom lays the weights out by measured times, and times one more prompt, apart from the second one
(`samples_settled_s`). A last, short prompt is profiled: it gives the kernel time of an iteration. Whole
prompts, and models that take turns, are measured by `prompts.py`.

Device memory is the decrease of free memory of the whole card. Host memory is the increase of the server's anonymous
memory (RssAnon) since before the first prompt, sampled. `--ram-limit` starts each server in a control group of that much
memory. A model of 24 GB on a machine of 16 GB beside a card of 8 GiB, with and without stock's fast-disk:

    --double 19 --single 38 --limits 8GiB --ram-limit 16GB --loaders stock,stock+fast-disk,auto

The run ends within `--limit-s` seconds: a case that is not
expected to end in time is skipped, and the record says so. Without a GPU, `--tiny --cpu` tests the path and measures
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """The shape of the model, and the size of a sampler step: ``tokens`` of text, ``side`` of the latent (8 pixels
    each).
    """

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
    """A configuration of the benchmark.

    ``limit``: free bytes of the card, None for all; ``loader``: "stock", or a codec of Carom's loader, followed by
    "@" and the value of its vram widget if that is not auto. "stock" may be followed by "+" and the name of a server option ("stock+fast-disk").
    """

    limit: int | None
    loader: str

    @property
    def codec(self) -> str:
        return self.loader.partition("@")[0].partition("+")[0]

    @property
    def options(self) -> list[str]:
        option = self.loader.partition("+")[2]
        return [f"--{option}"] if option else []

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
    table = lib["comfy_table"]
    shape = replace(TINY if arguments.tiny else Shape(), **{
        name: value for name in ("double", "single") if (value := getattr(arguments, name)) is not None
    })  # fmt: skip
    parse = lib["sizes"].parse_size
    limits = [None] if arguments.cpu else [
        None if word == "none" else parse(word, setting="limits") for word in arguments.limits.split(",")
    ]  # fmt: skip
    loaders = [word for word in arguments.loaders.split(",") if word]
    comparisons = [[Config(limit, loader) for loader in loaders] for limit in limits]
    rounds = lib["rounds"]
    time_limit = rounds.TimeLimit(arguments.limit_s)
    peers = {"ComfyUI": lib["process"].checkout_commit(Path(comfyui))}
    record = lib["record"].new_record("comfy_gpu", sys.argv[1:] if argv is None else argv, peers=peers)
    record |= {"shape": asdict(shape), "steps": arguments.steps, "rounds": arguments.rounds, "runs": []}
    folder = Path(tempfile.mkdtemp(prefix="carom-comfy-", dir=arguments.work))
    try:
        bench = Bench(lib, comfyui, folder, shape, arguments, time_limit)
        bench.prepare()
        record["file_bytes"] = bench.file.stat().st_size
        size = record["file_bytes"] / GIB
        print(f"checkpoint of {size:.2f} GiB ready after {time_limit.elapsed_s():.0f} s", flush=True)
        for config in rounds.interleaved(comparisons, arguments.rounds):
            if not time_limit.fits(config.codec):
                run: dict[str, Any] = {
                    "status": "skipped",
                    "reason": f"no time left of {arguments.limit_s:g} s",
                }
            else:
                began = time.monotonic()
                run = bench.run(config)
                time_limit.took(config.codec, time.monotonic() - began)
            record["runs"].append({**asdict(config), **run})
            record["pooled"] = rounds.pooled(table.samples(record))
            print(table.line(record["runs"][-1]), flush=True)
            if arguments.json:
                lib["record"].write_record(record, arguments.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table.table(record))
    return 0 if all(run["status"] != "failed" for run in record["runs"]) and table.same_latents(record) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limits", default="6GiB,4GiB,none", help="free memory of the card, none: all of it")
    parser.add_argument(
        "--loaders",
        default="stock,auto",
        help="stock, stock+OPTION (of the server: stock+fast-disk), or CODEC or CODEC@VRAM of Carom's loader",
    )
    parser.add_argument("--mode", default="auto", help="of Carom's loader")
    parser.add_argument(
        "--ram-limit",
        default="",
        help="memory of the server, in a control group that kills beyond it, as in 16GiB",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="servers of each loader and limit, in turns")
    parser.add_argument(
        "--settle", type=int, default=0,
        help="steps of Carom's prompts between the second and a last timed one, in which a layout found by their times is taken",
    )  # fmt: skip
    parser.add_argument("--double", type=int, help="double blocks (8)")
    parser.add_argument("--single", type=int, help="single blocks (16)")
    parser.add_argument(
        "--touch-gb", type=float, default=0, help="first use so much host memory: guests that grow"
    )
    parser.add_argument("--limit-s", type=float, default=560, help="seconds within which the run ends")
    parser.add_argument("--json", type=Path, help="keep the record here")
    parser.add_argument(
        "--work", help="where the checkpoint goes; it is removed (default: the system's temporary folder)"
    )
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument(
        "--trace", type=Path, help="keep the profiled iterations of each case here (Perfetto opens them)"
    )
    parser.add_argument("--options", default="", help="further options of every server, separated by spaces")
    parser.add_argument("--tiny", action="store_true", help="a model of 18 MB")
    parser.add_argument("--cpu", action="store_true", help="no GPU")
    return parser


def load_checkout() -> dict[str, Any]:
    """Return the checkout's modules by name, imported as the package carom for any folder name."""
    if "carom" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["carom"] = module
        spec.loader.exec_module(module)
    names = (
        "core.common.sizes", "benchmarks.engines.record", "benchmarks.hosts.comfy_host", "benchmarks.hosts.comfy_control_group", "benchmarks.hosts.comfy_table",
        "benchmarks.hosts.card", "benchmarks.hosts.process", "benchmarks.hosts.rounds",
    )  # fmt: skip
    return {name.rpartition(".")[2]: importlib.import_module(f"carom.{name}") for name in names}


class Bench:
    """The data folder of the servers, below ``folder``, and one run per configuration."""

    def __init__(
        self,
        lib: dict[str, Any],
        comfyui: str,
        folder: Path,
        shape: Shape,
        arguments: argparse.Namespace,
        time_limit: Any,
    ) -> None:
        self.lib, self.comfyui, self.folder, self.shape = lib, comfyui, folder, shape
        self.arguments, self.time_limit = arguments, time_limit
        self.file = folder / "models" / "diffusion_models" / "bench.safetensors"
        self.python = lib["comfy_host"].PYTHON

    def prepare(self) -> None:
        """Touch host memory, and create the node packs, an empty page (no frontend package is needed) and the
        checkpoint.
        """
        if self.arguments.touch_gb:
            self.lib["card"].touch(int(self.arguments.touch_gb * 1e9))
        pack = self.folder / "custom_nodes" / "carom_bench"
        for path in (pack, self.folder / "input", self.folder / "user", self.folder / "page"):
            path.mkdir(parents=True)
        shutil.copy(HERE / "comfy_bench_nodes.py", pack / "__init__.py")
        shutil.copy(HERE / "device_time.py", pack)
        (self.folder / "custom_nodes" / "carom").symlink_to(ROOT, target_is_directory=True)
        (self.folder / "page" / "index.html").write_text(
            "<!doctype html><title>no page</title>", encoding="utf-8"
        )
        script = str(HERE / "comfy_checkpoint.py")
        made = subprocess.run(
            [self.python, script, self.comfyui, str(self.file), json.dumps(asdict(self.shape))],
            capture_output=True, text=True, timeout=self.time_limit.left_s(),
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"the checkpoint could not be made:\n{made.stderr[-4000:]}")
        print(made.stdout.strip().splitlines()[-1], flush=True)

    def run(self, config: Config) -> dict[str, Any]:
        """Return the figures of one configuration; a failure is also returned as a result."""
        card: Any = contextlib.nullcontext()
        if not self.arguments.cpu:
            card = self.lib["card"].Card(config.limit)
        log = self.folder / f"server-{config.limit}-{config.loader}.log"
        try:
            with card as held, contextlib.ExitStack() as stack:
                group = None
                if self.arguments.ram_limit:
                    nbytes = self.lib["sizes"].parse_size(self.arguments.ram_limit, setting="ram-limit")
                    group = stack.enter_context(self.lib["comfy_control_group"].control_group(nbytes))
                server = self.lib["comfy_host"].ComfyServer(
                    self.comfyui, self.folder, log, () if group is None else group.prefix
                )
                stack.callback(server.stop)
                return self._measure(config, server, held)
        except Exception as error:
            return {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[-1500:]}"}
        finally:
            if self.arguments.logs and log.exists():
                self.arguments.logs.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, self.arguments.logs / f"{log.stem.replace('@', '-')}.txt")

    def _measure(self, config: Config, server: Any, card: Any) -> dict[str, Any]:
        options = [
            *(["--cpu"] if self.arguments.cpu else []),
            *self.arguments.options.split(),
            *config.options,
        ]
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
        evict = self.lib["process"].evict
        steps = self.arguments.steps
        prompts = [("first", 1, steps), ("second", 2, steps)]
        if self.arguments.settle and config.codec != "stock" and config.limit is not None:
            many = [("settling", 2, 20)] * -(-self.arguments.settle // 20)
            prompts += [*many, ("settled", 2, steps)]
        with self.lib["process"].watched(server.pid) as memory:
            for name, seed, steps in prompts:
                if name == "first":
                    evict(self.file)
                before, posted = self.io(server.pid), time.time()
                told = self._sample(server, self.prompt(config, seed, steps))
                after = self.io(server.pid)
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
        spread = self.lib["rounds"].spread
        for name, ending in (("second", ""), ("settled", "_settled")):
            if name in result:
                found = spread(result[name]["iterations_s"])
                result |= {key.replace("_s", f"{ending}_s"): value for key, value in found.items()}
                result[f"s_per_iteration{ending}"] = found["median_s"]
        result["profile"] = self._profile(config, server)
        return result

    def _sample(self, server: Any, prompt: dict[str, Any]) -> dict[str, Any]:
        return server.run(prompt, timeout=self.time_limit.left_s(300))["sample"]["told"][0]

    def _profile(self, config: Config, server: Any) -> dict[str, Any] | None:
        """Return the kernel time of an iteration, None without a GPU. A failure costs the case only this figure."""
        trace = ""
        if self.arguments.trace:
            self.arguments.trace.mkdir(parents=True, exist_ok=True)
            trace = str(self.arguments.trace / f"{config.limit}-{config.loader.replace('@', '-')}.json")
        try:
            return self._sample(server, self.prompt(config, 2, 5, profile=True, trace=trace))["profile"]
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {str(error)[-500:]}"}

    def io(self, pid: int) -> dict[str, int]:
        return self.lib["process"].io_of(pid)

    def prompt(
        self, config: Config, seed: int, steps: int, *, profile: bool = False, trace: str = ""
    ) -> dict[str, Any]:
        """Return the prompt for one image. ``profile``: record the kernels of two
        iterations; ``trace``: path for their trace.
        """
        node, name = self.lib["comfy_host"].node, self.file.name
        if config.codec == "stock":
            loader = node("UNETLoader", unet_name=name, weight_dtype="default")
        else:
            vram, mode = config.vram, self.arguments.mode
            if self.arguments.cpu:  # on the CPU, auto leaves all weights to ComfyUI
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
            side=shape.side, seed=seed, steps=steps, profile=profile, trace=trace,
        )  # fmt: skip
        return {"load": loader, "sample": sample}


if __name__ == "__main__":
    sys.exit(main())
