"""The runs of `prompts`: a process for each configuration, the card held to its limit, and the record."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.common.sizes import parse_size
from ..engines.record import new_record, write_record
from . import prompt_table
from .card import Card, touch
from .comfy_control_group import control_group
from .comfy_host import PYTHON
from .process import checkout_commit, evict
from .prompt_cases import LORAS, MODELS, Case, Sizes, Way, graph
from .rounds import TimeLimit

HERE = Path(__file__).resolve().parent
LOADERS = ("stock", "carom")
FILES = {"model": "models/a", "text": "text/text", "vae": "vae/vae", "lora": "loras/first"}
MARK = "@@"  # before each line of JSON that the process prints, as in prompt_host.py


@dataclass(frozen=True)
class Config:
    """One process: a case, the free memory of the card (None: all of it), whether the files are in the page cache, the
    loader ("stock" or "carom"), and whether the copies over the link are counted (then times are not compared).
    """

    case: str
    limit: int | None
    cache: str
    loader: str
    round: int
    link: bool = False


def run(
    arguments: argparse.Namespace, comfyui: str, sizes: Sizes, chosen: Sequence[Case], argv: list[str]
) -> int:
    """Run the ``chosen`` cases, print what was measured, and keep the record; return the exit status."""
    peers = {"ComfyUI": checkout_commit(Path(comfyui))}
    record = new_record("prompts", argv, peers=peers)
    record |= {"sizes": asdict(sizes), "runs": []}
    limit = TimeLimit(arguments.limit_s)
    bench = Bench(arguments, comfyui, sizes)
    bench.make_files()
    record["file_bytes"] = {name: bench.file_bytes(file) for name, file in FILES.items()}
    if arguments.touch_gb:
        touch(int(arguments.touch_gb * 1e9))
    print(f"files ready after {limit.elapsed_s():.0f} s", flush=True)
    known = {case.name: case for case in chosen}
    for config in configs(arguments, list(known)):
        kind = f"{config.loader} {config.case}"
        if not limit.fits(kind):
            found: dict[str, Any] = {
                "status": "skipped",
                "reason": f"no time left of {arguments.limit_s:g} s",
            }
        else:
            print(f"-- {config}", flush=True)
            began = time.monotonic()
            found = bench.run(config, known[config.case])
            limit.took(kind, time.monotonic() - began)
        record["runs"].append({**asdict(config), **found})
        if arguments.json:
            write_record(record, arguments.json)
    print(prompt_table.table(record))
    wrong = prompt_table.faults(record)
    print("\n".join(wrong) or "all results equal stock's")
    return 1 if wrong else 0


def configs(arguments: argparse.Namespace, names: list[str]) -> Iterator[Config]:
    """Yield the configurations in the order in which they run: stock and Carom of a case beside each other."""
    limits = [
        None if word == "none" or arguments.cpu else parse_size(word, setting="limits")
        for word in arguments.limits.split(",")
    ]
    loaders = LOADERS if not arguments.only else (arguments.only,)
    for limit in dict.fromkeys(limits):
        for name in names:
            for cache in arguments.cache.split(","):
                for number in range(arguments.repeat):
                    for loader in loaders:
                        yield Config(name, limit, cache, loader, number)
            if arguments.link:
                for loader in loaders:
                    yield Config(name, limit, "warm", loader, 0, link=True)


def missing_files(work: Path, sizes: Sizes, cpu: bool) -> list[dict[str, Any]]:
    """Return the jobs for `prompt_files` that make the files that folder ``work`` lacks."""
    wanted = [("model", f"models/{name}", seed) for seed, name in enumerate(MODELS, 1)]
    wanted += [("text", "text/text", 3), ("vae", "vae/vae", 4)]
    wanted += [("lora", f"loras/{name}", seed) for seed, name in enumerate(LORAS, 5)]
    return [
        {"kind": kind, "file": str(work / f"{name}.safetensors"), "seed": seed, "cpu": cpu, **asdict(sizes)}
        for kind, name, seed in wanted
        if not (work / f"{name}.safetensors").exists()
    ]


class Bench:
    """The files, below ``--work``, and one run for each configuration."""

    def __init__(self, arguments: argparse.Namespace, comfyui: str, sizes: Sizes) -> None:
        self.arguments, self.comfyui, self.sizes = arguments, comfyui, sizes
        self.work = arguments.work.resolve() / ("tiny" if arguments.tiny else "full")

    def make_files(self) -> None:
        """Write the files that are missing: large ones all at once, each in a process of its own."""
        jobs = missing_files(self.work, self.sizes, self.arguments.cpu)
        each = [jobs] if self.arguments.tiny else [[job] for job in jobs]
        command = [PYTHON, str(HERE / "prompt_files.py"), self.comfyui]
        running = [subprocess.Popen([*command, json.dumps(part)]) for part in each if part]
        if any(process.wait() for process in running):
            raise RuntimeError("a file could not be made; its process says why")

    def file_bytes(self, name: str) -> int:
        return (self.work / f"{name}.safetensors").stat().st_size

    def run(self, config: Config, case: Case) -> dict[str, Any]:
        """Return the figures of one configuration; a failure is also returned as a result."""
        files = sorted(self.work.rglob("*.safetensors"))
        for file in files:
            if config.cache == "cold":
                evict(file)
            else:
                with file.open("rb", buffering=0) as opened:
                    while opened.read(1 << 24):
                        pass
        try:
            with contextlib.ExitStack() as stack:
                card = None if self.arguments.cpu else stack.enter_context(Card(config.limit, PYTHON))
                prefix: list[str] = []
                if case.ram is not None:
                    try:
                        prefix = stack.enter_context(control_group(case.ram)).prefix
                    except OSError as error:
                        return {"status": "skipped", "reason": str(error)}
                return self._prompts(config, case, card, prefix)
        except Exception as error:
            return {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[-1500:]}"}

    def _prompts(self, config: Config, case: Case, card: Any, prefix: list[str]) -> dict[str, Any]:
        result: dict[str, Any] = {"status": "ok", "prompts": []}
        name = f"{config.case}-{config.limit}-{config.cache}-{config.loader}-{config.round}{'-link' * config.link}"
        job = self.work / "job.json"
        job.write_text(json.dumps(self._job(config, case, name)), "utf-8")
        command = [*prefix, PYTHON, str(HERE / "prompt_host.py"), str(job)]
        log: Any = contextlib.nullcontext()
        if self.arguments.logs:
            self.arguments.logs.mkdir(parents=True, exist_ok=True)
            log = (self.arguments.logs / f"{name}.txt").open("w", encoding="utf-8")
        lines: list[str] = []
        with (
            log as kept,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if kept is not None:
                    kept.write(line)
                if not line.startswith(MARK):
                    continue
                told = json.loads(line.removeprefix(MARK))
                if "ready" not in told:
                    if card is not None:
                        told["device_peak_bytes"] = card.start["free"] - card.figures()["least_free"]
                    result["prompts"].append(told)
                    print(prompt_table.line(told), flush=True)
                elif card is not None:
                    card.figures()
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write("\n")
                    process.stdin.flush()
        if process.returncode or len(result["prompts"]) < len(case.prompts):
            tail = "".join(lines)[-3000:]
            print(tail, flush=True)
            result |= {"status": "failed", "reason": f"exit status {process.returncode}: {tail}"}
        return result

    def _job(self, config: Config, case: Case, name: str) -> dict[str, Any]:
        arguments = self.arguments
        carom = config.loader == "carom"
        way = Way(carom, "auto", arguments.vram)
        if arguments.cpu:  # on the CPU, auto leaves all weights to ComfyUI
            way = Way(
                carom,
                "stream",
                "8MiB" if arguments.vram == "auto" else arguments.vram,
                merges_little=not carom,
            )
        profile = ""
        if arguments.profile:
            arguments.profile.mkdir(parents=True, exist_ok=True)
            profile = str(arguments.profile.resolve() / f"{name}.txt")
        return {
            "comfyui": self.comfyui, "files": str(self.work), "sizes": asdict(self.sizes), "cpu": arguments.cpu,
            "carom": carom, "profile": profile, "link": config.link, "ram": case.ram,
            "graphs": [graph(case, number, self.sizes, way) for number in range(len(case.prompts))],
        }  # fmt: skip
