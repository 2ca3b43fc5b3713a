"""The CPU matrix: real ai-toolkit jobs on tiny random models, plain and with `offload: bouncing`, compared bit for
bit.

    AI_TOOLKIT_PATH=/path/to/ai-toolkit python tests/support/ai_toolkit/aitoolkit_matrix.py [ROW ...]

prints a line for each row. AI_TOOLKIT_PYTHON names the Python that runs ai-toolkit (default: this one);
docs/ai-toolkit.md lists the packages that it needs in addition to Carom's. The checkout is only read: the jobs run in
a folder of links to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE))
from aitoolkit_models import job  # noqa: E402

SAMPLING = {"disable_sampling": False}
WITH_STAGING = "60MiB"  # of a Z-Image whose weights stream packed: beside slots there is room to unpack them
BUDGET = {"zimage": "34MiB", "sd1": "4MiB", "sdxl": "5MiB", "flux": "8MiB"}


@dataclass(frozen=True)
class Row:
    """A row of the matrix. ``both``: changes of both jobs; ``bouncing``: further changes of the bouncing job's model
    section.
    """

    name: str
    kind: str = "zimage"
    both: dict[str, Any] = field(default_factory=dict)
    bouncing: dict[str, Any] = field(default_factory=dict)
    budget: str = ""
    resume: int = 0  # train to so many steps first, in a process of its own
    twice: bool = False  # two processes in one job
    env: dict[str, str] = field(default_factory=dict)  # of both sides' processes
    says: str = ""  # what both logs hold, else the row shows nothing
    shows: str = ""  # a pattern that the bouncing job's log holds, else the row shows nothing
    packs: bool = False  # whether units of the bouncing job are packed, else the row shows nothing

    def model(self) -> dict[str, Any]:
        """Return the keys of the bouncing job's model section."""
        budget = self.budget or BUDGET[self.kind]
        return {"offload": "bouncing", "offload_kwargs": {"vram": budget}, **self.bouncing}


# Of the UI's database, what its trainer reads and writes.
JOB_COLUMNS = "status TEXT, info TEXT, speed_string TEXT, step INTEGER, stop INTEGER, return_to_queue INTEGER, save_now INTEGER, sample_now INTEGER"
# What the log says of the model that trains.
STREAMED = re.compile(r"carom: \w*(?:Transformer|UNet)2D\w+: .* stream through ")
STAYED = re.compile(r"carom: \w*(?:Transformer|UNet)2D\w+: .* stay on ")
FROM_DISK = r"carom: \w*Transformer2D\w+: .* stream through .* from disk"
SKIPPED = "OOM during training step, skipping batch"
SMALL = {
    "uint4": "14MiB",
    "nvfp4": "14MiB",
}  # quantised models are small: so that something is left to stream
QTYPES = ("float8", "qfloat8", "convrot8", "uint4", "nvfp4")


def _quantised(qtype: str) -> Row:
    return Row(qtype, both={"model": {"quantize": True, "qtype": qtype}}, budget=SMALL.get(qtype, "20MiB"))


def _lossless(name: str, **both: Any) -> Row:
    model = both.get("model", {})
    vram = SMALL.get(model["qtype"], "20MiB") if "qtype" in model else WITH_STAGING
    return Row(
        f"lossless {name}".strip(),
        both=both,
        bouncing={"offload_kwargs": {"vram": vram, "codec": "lossless"}},
        packs="qtype" not in model,
    )


# SPILL stands for the folder of spill files.
def _disk(name: str, ram: str, vram: str = "", disk: str = "SPILL", **both: Any) -> Row:
    kwargs = {"vram": vram or BUDGET["zimage"], "ram": ram, "disk": disk}
    return Row(name, both=both, bouncing={"offload_kwargs": kwargs}, shows=FROM_DISK)


def _train(name: str, kind: str = "zimage", **keys: Any) -> Row:
    return Row(name, kind, {"train": keys})


ROWS = [
    Row("lora"),
    Row("diffusion_trainer", both={"type": "diffusion_trainer"}),
    _train("no checkpointing", gradient_checkpointing=False),
    _train("accumulation steps", gradient_accumulation_steps=2, steps=4),
    _train("batch list", gradient_accumulation=2),
    _train("bf16", dtype="bf16"),
    _train("ema", ema_config={"use_ema": True, "ema_decay": 0.9}),
    Row("sampling", both={"train": {**SAMPLING, "steps": 5}}),
    Row("percent 0.5", bouncing={"offload_kwargs": {}, "layer_offloading": True, "layer_offloading_transformer_percent": 0.5}),
    Row("percents 1.0", bouncing={"offload_kwargs": {}, "layer_offloading": True, "layer_offloading_transformer_percent": 1.0, "layer_offloading_text_encoder_percent": 1.0}),
    Row("low_vram", both={"model": {"low_vram": True}, "train": SAMPLING}),
    Row("auto", bouncing={"offload": "auto", "offload_kwargs": {}}),
    Row("aimdo", bouncing={"offload": "aimdo"}),
    Row("lokr", both={"network": {"type": "lokr", "lokr_full_rank": True, "lokr_factor": 4}}),
    Row("dora", both={"network": {"type": "dora"}}),
    Row("network offloading", both={"network": {"layer_offloading": True}}),
    Row("cached text", both={"train": {"cache_text_embeddings": True, **SAMPLING}}),
    Row("unloaded text", both={"train": {"unload_text_encoder": True}}),
    _train("blank preservation", blank_prompt_preservation=True),
    Row("class preservation", both={"trigger_word": "sks", "train": {"diff_output_preservation": True, "diff_output_preservation_class": "person"}}),
    *(_quantised(qtype) for qtype in QTYPES),
    Row("text float8", both={"model": {"quantize_te": True, "qtype_te": "float8"}}),
    Row("text qfloat8", both={"model": {"quantize_te": True, "qtype_te": "qfloat8"}}),
    Row("text convrot8", both={"model": {"quantize_te": True, "qtype_te": "convrot8"}}),
    _train("merge on save", merge_network_on_save=True),
    Row("resume", both={"train": {"steps": 4}}, resume=2),
    Row("two processes", twice=True),
    Row("full fine-tune", both={"network": None}),
    Row("full fine-tune ema", both={"network": None, "train": {"ema_config": {"use_ema": True, "ema_decay": 0.9}}}),
    _lossless("", train={**SAMPLING, "steps": 5}),
    _lossless("no checkpointing", train={"gradient_checkpointing": False}),
    _lossless("lokr", network={"type": "lokr", "lokr_full_rank": True, "lokr_factor": 4}),
    _lossless("dora", network={"type": "dora"}),
    _lossless("merge on save", train={"merge_network_on_save": True}),
    *(_lossless(qtype, model={"quantize": True, "qtype": qtype}) for qtype in QTYPES),
    _lossless("text float8", model={"quantize_te": True, "qtype_te": "float8"}),
    _lossless("ema and preservation", train={"ema_config": {"use_ema": True, "ema_decay": 0.9}, "blank_prompt_preservation": True}),
    _disk("disk folder", "48MiB"),
    _disk("disk auto", "48MiB", disk="auto"),
    _disk("disk lokr", "48MiB", network={"type": "lokr", "lokr_full_rank": True, "lokr_factor": 4}),
    _disk("disk bf16", "24MiB", "20MiB", train={"dtype": "bf16"}),
    *(
        _disk(f"disk {qtype}", "10MiB", SMALL.get(qtype, "18MiB"), model={"quantize": True, "qtype": qtype}, train=SAMPLING)
        for qtype in QTYPES
    ),
    Row("sd1 lora", "sd1"),
    _train("sd1 no checkpointing", "sd1", gradient_checkpointing=False),
    Row("sd1 convolutions", "sd1", {"network": {"conv": 4, "conv_alpha": 4}}),
    Row("sd1 sampling", "sd1", {"train": {**SAMPLING, "steps": 5}}),
    _train("sd1 text encoder trained", "sd1", train_text_encoder=True),
    Row("sd1 cached text", "sd1", {"train": {"cache_text_embeddings": True}}),
    Row("sd1 slider", "sd1", {"type": "concept_slider", "slider": {"guidance_strength": 3.0, "anchor_strength": 1.0, "positive_prompt": "cat", "negative_prompt": "dog", "target_class": "a", "anchor_class": ""}}),
    Row("sdxl lora", "sdxl"),
    Row("sdxl sampling", "sdxl", {"train": {**SAMPLING, "steps": 5}}),
    Row("flux.1 lora", "flux"),
    Row("flux.1 sampling", "flux", {"train": {**SAMPLING, "steps": 5}}),
    Row("flux.1 qfloat8", "flux", {"model": {"quantize": True, "quantize_te": True}}, budget="2MiB"),
    Row("ui trainer", both={"type": "ui_trainer", "sqlite_db_path": "DATABASE"}, env={"AITK_JOB_ID": "1"}),
    Row("steps skipped by oom", both={"train": {"steps": 6}}, env={"CAROM_TEST_OOM": "1:forward,3:backward"}, says=SKIPPED),
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The result of a row. ``compared``: number of files; ``different``: files that differ; ``failed``: why no file
    was compared.
    """

    row: Row
    compared: int = 0
    different: tuple[str, ...] = ()
    failed: str = ""
    log: str = ""

    @property
    def identical(self) -> bool:
        return not self.failed and not self.different and self.compared > 0

    def line(self) -> str:
        """Return the result as one line of text."""
        verdict = "identical" if self.identical else self.failed or f"DIFFERENT: {', '.join(self.different)}"
        return f"{self.row.name:<26} {verdict} ({self.compared} files)"


class Bench:
    """The linked copy of the checkout, tiny models and the jobs' folder, all below ``folder``."""

    def __init__(self, checkout: Path, folder: Path, *, extension: bool = True) -> None:
        self.folder, self.place = folder, folder / "ai-toolkit"
        self.python = os.environ.get("AI_TOOLKIT_PYTHON", sys.executable)
        links = folder / "path"
        links.mkdir(parents=True)
        (links / "carom").symlink_to(ROOT, target_is_directory=True)
        self.env = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "aitoolkit_site"), str(links)]), "SEED": "1",
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg",
            # Else MKL's products depend on how their operands are aligned in memory, which no job promises.
            "MKL_CBWR": "COMPATIBLE",
        }  # fmt: skip
        mirror(checkout, self.place)
        if extension:
            command = [self.python, "-m", "carom", "install-ai-toolkit", str(self.place)]
            subprocess.run(command, env=self.env, check=True, capture_output=True, timeout=120)
        models = [self.python, str(HERE / "aitoolkit_models.py"), str(folder / "models")]
        subprocess.run(models, env=self.env, check=True, capture_output=True, timeout=300)
        oom = self.place / "extensions" / "carom_test_oom"
        oom.mkdir()
        shutil.copy(HERE / "aitoolkit_oom.py", oom / "__init__.py")
        for name in BUDGET:
            shutil.copytree(folder / "models" / "images", folder / "models" / f"images-{name}")

    def run(
        self, jobs: list[tuple[str, dict[str, Any]]], env: dict[str, dict[str, str]] | None = None
    ) -> Iterator[tuple[str, int]]:
        """Run named job files one after the other; yield each name and exit code when the job is done. Logs are at
        ``log(name)``.

        ``env``: job name -> additional environment variables.
        """
        listed = []
        for name, config in jobs:
            path = self.folder / f"{name}.job.json"
            path.write_text(self._placed(json.dumps(config), name))
            listed.append({"config": str(path), "log": str(self.log(name)), "env": (env or {}).get(name, {})})
        index, errors = self.folder / "jobs.json", self.folder / "errors.log"
        index.write_text(json.dumps(listed))
        command = [self.python, str(HERE / "aitoolkit_zygote.py"), str(index)]
        done = 0
        with (
            errors.open("w") as err,
            subprocess.Popen(
                command, cwd=self.place, env=self.env, stdout=subprocess.PIPE, stderr=err, text=True
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("CODE "):
                    _, at, code = line.split()
                    done += 1
                    yield jobs[int(at)][0], int(code)
        if done < len(jobs):
            raise RuntimeError(f"ai-toolkit did not import: {errors.read_text()[-3000:]}")

    def run_alone(self, name: str, config: dict[str, Any], prefix: list[str]) -> int:
        """Run a named job as `run.py` in a process of its own, with ``prefix`` before the command; return its exit
        code. The log is at ``log(name)``.
        """
        path = self.folder / f"{name}.job.json"
        path.write_text(self._placed(json.dumps(config), name))
        command = [*prefix, self.python, "run.py", str(path)]
        with self.log(name).open("w") as log:
            return subprocess.run(command, cwd=self.place, env=self.env, stdout=log, stderr=log).returncode

    def _placed(self, text: str, name: str) -> str:
        """Return the job file's text with DATABASE replaced by the path of a new database like the UI's, and SPILL by a folder."""
        if "DATABASE" in text:
            database = self.folder / f"{name}.db"
            with contextlib.closing(sqlite3.connect(database)) as made:
                made.execute(f"CREATE TABLE Job (id TEXT PRIMARY KEY, {JOB_COLUMNS})")
                made.execute("INSERT INTO Job (id) VALUES ('1')")
                made.commit()
            text = text.replace("DATABASE", str(database))
        return text.replace("SPILL", str(self.folder / "spill"))

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def peak(self, name: str) -> tuple[int, int]:
        """Return (most memory in bytes that the job's process had, memory of the process that it was forked from)."""
        most, before = Path(f"{self.log(name)}.peak").read_text().split()
        return int(most), int(before)

    def output(self, side: str) -> Path:
        return self.folder / side

    def job(self, row: Row, side: str, **more: Any) -> dict[str, Any]:
        """Return the job of one side ("plain" or "bouncing"). Both sides have the same name, so that files can be
        compared.
        """
        changes = {**row.both, **more}
        if side == "bouncing":
            changes["model"] = {**changes.get("model", {}), **row.model()}
        config = job(slug(row), row.kind, self.folder / "models", self.output(side), **changes)
        if row.twice:
            second = json.loads(json.dumps(config["config"]["process"][0]))
            second["training_folder"] += "/second"
            second["model"].pop("offload_kwargs", None)
            config["config"]["process"].append(second)
        return config

    def outcomes(self, rows: list[Row]) -> Iterator[Outcome]:
        """Run both sides of ``rows``, after a job of each kind that fills the latent caches; yield results as rows
        end.
        """
        jobs: list[tuple[str, dict[str, Any]]] = []
        for kind in sorted({row.kind for row in rows}):
            # A name of its own each: ai-toolkit would go on from the LoRA that another kind's left under the same one.
            warm = Row(f"warm {kind}", kind, {"train": {"steps": 1}})
            jobs.append((slug(warm), self.job(warm, "warm")))
        last, env = {}, {}
        for row in rows:
            for side in ("plain", "bouncing"):
                name = f"{side}-{slug(row)}"
                if row.resume:
                    first = {**row.both, "train": {**row.both.get("train", {}), "steps": row.resume}}
                    jobs.append((f"{name}-first", self.job(row, side, **first)))
                jobs.append((name, self.job(row, side)))
                env[name] = row.env
            last[name] = row
        codes = {}
        for name, code in self.run(jobs, env):
            codes[name] = code
            if name in last:
                yield self.outcome(last[name], codes)

    def outcome(self, row: Row, codes: dict[str, int]) -> Outcome:
        # The job that has to fill the caches draws random numbers for it: no row shows anything where that was not the first.
        for name in (f"warm-{row.kind}", f"plain-{slug(row)}", f"bouncing-{slug(row)}"):
            side = name.partition("-")[0]
            text = self.log(name).read_text(errors="replace")
            if codes[name]:
                reason = ([line for line in text.splitlines() if line.strip()] or ["no output"])[-1]
                return Outcome(row, failed=f"{side} FAILED: {reason}", log=text)
            if side != "warm" and row.says not in text:
                return Outcome(row, failed=f"{side} never said {row.says!r}", log=text)
        # Of a job that was to bounce and did not, equality would say nothing.
        whole = row.bouncing.get("offload") == "auto"  # with all the memory there is
        if not (STAYED if whole else STREAMED).search(text):
            return Outcome(row, failed="the bouncing job did not stream", log=text)
        if not re.search(row.shows, text):
            return Outcome(row, failed=f"the bouncing job never said {row.shows!r}", log=text)
        reports = [
            json.loads(file.read_text())
            for file in self.output("bouncing").rglob("report.json")
            if slug(row) in file.parts
        ]
        if row.packs and not any(
            model["packed_units"] for one in reports for model in one["models"].values()
        ):
            return Outcome(row, failed="the bouncing job packed nothing", log=text)
        count, different = compare(self.output("plain"), self.output("bouncing"), slug(row))
        return Outcome(row, count, tuple(different), log=text)


def slug(row: Row) -> str:
    return row.name.replace(" ", "-").replace(".", "")


def mirror(checkout: Path, place: Path) -> None:
    """Create a copy of the checkout from links, with a new `extensions` folder."""
    place.mkdir()
    for item in checkout.iterdir():
        if item.name not in ("extensions", "output", ".git"):
            (place / item.name).symlink_to(item)
    (place / "extensions").mkdir()


def compare(plain: Path, other: Path, name: str) -> tuple[int, list[str]]:
    """Return (number of files compared, names of those that differ) of the weights and samples of two jobs with the
    same name.
    """
    from safetensors.torch import load_file

    def found(folder: Path) -> dict[str, Path]:
        files = [
            p
            for p in folder.rglob("*")
            if p.is_file() and p.suffix in (".safetensors", ".jpg", ".png") and "carom" not in p.parts
        ]
        named = {}
        for path in files:
            inner = path.relative_to(folder)
            if name in inner.parts[:2]:
                # samples carry the time of day before the first __
                key = (
                    str(inner.parent / path.name.rpartition("__")[2])
                    if path.suffix != ".safetensors"
                    else str(inner)
                )
                named[key] = path
        return named

    left, right = found(plain), found(other)
    different = sorted(set(left) ^ set(right))
    for key in sorted(set(left) & set(right)):
        if key.endswith(".safetensors"):
            a, b = load_file(left[key]), load_file(right[key])
            same = a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
        else:
            same = left[key].read_bytes() == right[key].read_bytes()
        if not same:
            different.append(key)
    return len(set(left) & set(right)), different


def _same(a: Any, b: Any) -> bool:
    import torch

    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(left, right)


def main() -> int:
    checkout = os.environ.get("AI_TOOLKIT_PATH")
    if not checkout:
        print("skipped: AI_TOOLKIT_PATH is not set: no ai-toolkit to test against")
        return 0
    if not (Path(checkout) / "run.py").exists():
        print(f"AI_TOOLKIT_PATH: {checkout} has no run.py; name the folder of an ai-toolkit checkout")
        return 2
    if unknown := set(sys.argv[1:]) - {row.name for row in ROWS}:
        print(
            f"no row is called {', '.join(sorted(unknown))}; the rows: {', '.join(row.name for row in ROWS)}"
        )
        return 2
    rows = [row for row in ROWS if not sys.argv[1:] or row.name in sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="carom-ai-toolkit-") as folder:
        good = 0
        for outcome in Bench(Path(checkout).resolve(), Path(folder)).outcomes(rows):
            print(outcome.line(), flush=True)
            good += outcome.identical
            if not outcome.identical and os.environ.get("AI_TOOLKIT_LOG"):
                print(outcome.log[-4000:])
    print(f"{good} of {len(rows)} identical")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
