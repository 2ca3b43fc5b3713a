"""`carom demo`: stream a real checkpoint through a quarter of its size, train it, prove that nothing was lost."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UnsupportedError
from ..core.sizes import GIB, MIB, format_size, parse_size

if TYPE_CHECKING:
    import torch

    from ..core.report import Report
    from .demo_model import DecoderConfig
    from .demo_trial import Outcome

CPU_BYTES, GPU_BYTES = 352 * MIB, 4 * GIB
CPU_TOKENS, GPU_TOKENS = 128, 2048
WORDS = {"outputs": "outputs", "losses": "losses", "gradients": "gradients", "adapters": "trained adapters"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the demo; none is needed."""
    add = parser.add_argument
    add("--device", help="cpu, cuda, cuda:1 (default: the accelerator, else cpu)")
    add("--vram", default="25%", help="device budget: 1GiB, or a share of the weights (default: %(default)s)")
    add("--size", help="bytes of weights (default: 352MiB on cpu; 4GiB on a GPU, less where memory is short)")
    add("--steps", type=int, default=4, help="training steps (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("carom-demo"),
        help="folder for picture and trace (default: ./%(default)s)",
    )
    add(
        "--dir",
        type=Path,
        help="folder the checkpoint is written under (default: the system's temporary one)",
    )
    add("--keep", action="store_true", help="keep the checkpoint")


@dataclass(frozen=True)
class Setting:
    """What this run does: the device, the model's shape, the budget in bytes, tokens and steps."""

    device: torch.device
    config: DecoderConfig
    vram: int
    tokens: int
    steps: int


@dataclass(frozen=True)
class Result:
    """What this run found."""

    inference: Report
    training: Report
    resident: Outcome
    streamed: Outcome
    differences: dict[str, list[str]]
    resident_peak: int | None  # of the device's allocator, activations included; None on cpu
    streamed_peak: int | None

    @property
    def bit_exact(self) -> bool:
        return not any(self.differences.values())

    @property
    def within_budget(self) -> bool:
        return all(r.vram_peak_bytes <= r.vram_budget_bytes for r in (self.inference, self.training))


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 where a bit differs or the budget was passed."""
    start = time.perf_counter()
    setting = settle(args)
    from .demo_trial import one_thread

    parent = check_folders(args.dir, setting.config.weight_bytes)
    with output_folder(args.out) as out, checkpoint_folder(parent, args.keep) as checkpoint:
        quiet = args.json or not sys.stderr.isatty()
        with one_thread(setting.device), progress(setting, quiet) as bar:
            result = experiment(setting, checkpoint, bar)
        picture, trace = out / "timeline.png", out / "trace.json"
        result.training.plot(picture)
        result.training.trace(trace)
    extras = figures(setting, result) | {"timeline": str(picture), "trace": str(trace)}
    extras["checkpoint"] = str(checkpoint) if args.keep else None
    extras["seconds"] = round(time.perf_counter() - start, 3)
    if args.json:
        print(json.dumps(result.training.to_dict() | extras, allow_nan=False))
    else:
        print(text(setting, result, extras))
    return 0 if result.bit_exact and result.within_budget else 1


def settle(args: argparse.Namespace) -> Setting:
    """Choose what was not given, and refuse what cannot run, before anything is written."""
    import torch

    from .demo_model import config_for

    if not 1 <= args.steps <= 100:  # every step's gradients are kept, to compare
        raise ValueError(f"--steps {args.steps}: between 1 and 100")
    device = pick_device(args.device)
    on_gpu = device.type != "cpu"
    size = parse_size(args.size, setting="--size") if args.size else default_size(device)
    config = config_for(size, torch.bfloat16 if on_gpu else torch.float32)
    vram = parse_size(args.vram, whole=config.weight_bytes, setting="--vram")
    # the weights, their place in the store, what the allocator keeps of the former (measured), the program
    need = 3 * config.weight_bytes + 512 * MIB
    free = available_memory()
    if free < need:
        raise UnsupportedError(
            f"a demo of {format_size(config.weight_bytes)} needs about {format_size(need)} of RAM and "
            f"{format_size(free)} is free: ask for less with --size {max((free - 512 * MIB) // 3 // MIB, 1)}MiB"
        )
    return Setting(device, config, vram, GPU_TOKENS if on_gpu else CPU_TOKENS, args.steps)


def pick_device(name: str | None) -> torch.device:
    """The device asked for, tried once; default the accelerator that torch names, else cpu."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device {name!r} is no device: write cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name!r}: the demo runs on cpu and cuda (ROCm's name too)")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedError(
            f"--device {name!r} cannot be used here ({reason}): try --device cpu"
        ) from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def default_size(device: torch.device) -> int:
    """Weights that the resident reference run can hold too, with room for its activations."""
    import torch

    if device.type == "cpu":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(min(GPU_BYTES, int(free * 0.5), int(available_memory() * 0.25)), CPU_BYTES)


def available_memory() -> int:
    """Bytes of RAM that are free or can be freed at once."""
    import psutil

    return psutil.virtual_memory().available


def check_folders(parent: Path | None, weight_bytes: int) -> Path:
    """The folder to write the checkpoint under, with room enough for it."""
    folder = parent or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise ValueError(f"--dir {folder} is no folder: make it, or name another")
    free = shutil.disk_usage(folder).free
    if free < weight_bytes * 1.05:
        raise UnsupportedError(
            f"the checkpoint takes {format_size(weight_bytes)} and {folder} has {format_size(free)} free: "
            "name another folder with --dir, or ask for less with --size"
        )
    return folder


@contextlib.contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """The folder for results, tried before the work; gone again if this run made it and failed."""
    made = not path.exists()
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise OSError(
                f"--out {path} cannot be written ({error.strerror}): name another folder"
            ) from error
        yield path
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)
        raise


@contextlib.contextmanager
def checkpoint_folder(parent: Path, keep: bool) -> Iterator[Path]:
    """A new folder under ``parent``; removed afterwards, unless it is to be kept and nothing failed."""
    folder = parent / f"carom-demo-{secrets.token_hex(8)}"  # named before it is there: see `finally`
    done = False
    try:
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise OSError(
                f"--dir {parent} cannot be written ({error.strerror}): name another folder"
            ) from error
        yield folder
        done = True
    finally:  # an interrupt may come between the folder's making and the next line of Python
        if not (keep and done):
            shutil.rmtree(folder, ignore_errors=True)


class Bar:
    """Progress in tenths of a percent of the expected work, on stderr."""

    def __init__(self, bar: Any, weight_bytes: int, steps: int) -> None:
        self._bar, self._bytes, self._steps = bar, weight_bytes, steps

    def stage(self, words: str) -> None:
        self._bar.set_description(words)

    def wrote(self, nbytes: int) -> None:
        """Bytes of the checkpoint written or read: a fifth of the bar each."""
        self._bar.update(200 * nbytes / self._bytes)

    def stepped(self) -> None:
        """One pass or step done: the runs are the rest of the bar."""
        self._bar.update(600 / self._steps)


@contextlib.contextmanager
def progress(setting: Setting, quiet: bool) -> Iterator[Bar]:
    """A tqdm bar on stderr, silent where ``quiet``."""
    from tqdm import tqdm

    from .demo_trial import PASSES

    layout = "{desc:<26} {percentage:3.0f}% |{bar}| {elapsed}"
    columns = min(shutil.get_terminal_size().columns, 100)
    with tqdm(
        total=1000, disable=quiet, file=sys.stderr, bar_format=layout, leave=False, ncols=columns
    ) as bar:
        yield Bar(bar, setting.config.weight_bytes, 2 * (PASSES + setting.steps))


def experiment(setting: Setting, folder: Path, bar: Bar) -> Result:
    """Write, load, run resident, run streamed, compare."""
    import torch

    from ..core.session import stream
    from .demo_model import load_checkpoint, remove_lora, write_checkpoint
    from .demo_trial import (
        SEED,
        Outcome,
        deterministic,
        differences,
        fresh_adapters,
        release,
        run_inference,
        run_training,
    )

    device, config = setting.device, setting.config
    resident, streamed = Outcome(), Outcome()
    bar.stage("writing the checkpoint")
    write_checkpoint(config, folder, device, SEED, bar.wrote)
    bar.stage("reading it")
    model = load_checkpoint(config, folder, bar.wrote)
    try:
        with deterministic():
            bar.stage("resident run, to compare")
            release(device)
            model.to(device)
            run_inference(model, device, setting.tokens, resident, bar.stepped)
            fresh_adapters(model)
            run_training(model, device, setting.tokens, setting.steps, resident, bar.stepped)
            resident_peak = peak(device)
            remove_lora(model)
            model.to("cpu")
            release(device)
            bar.stage("streamed inference")
            with stream(model, device=device, vram=setting.vram) as session:
                run_inference(model, device, setting.tokens, streamed, bar.stepped)
                inference = session.report()
            fresh_adapters(model)
            bar.stage("streamed training")
            with stream(model, device=device, vram=setting.vram) as session:
                run_training(model, device, setting.tokens, setting.steps, streamed, bar.stepped)
                training = session.report()
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"{device} is too small for this demo, whose reference run holds all "
            f"{format_size(config.weight_bytes)} of weights: ask for less with --size"
        ) from error
    return Result(
        inference, training, resident, streamed, differences(resident, streamed), resident_peak, peak(device)
    )


def peak(device: torch.device) -> int | None:
    """Most bytes the device's allocator has handed out since the last `release`."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def figures(setting: Setting, result: Result) -> dict[str, Any]:
    """What the JSON says beyond the training report."""
    equal = {f"{kind}_equal": not names for kind, names in result.differences.items()}
    return {
        "bit_exact": result.bit_exact,
        "within_budget": result.within_budget,
        **equal,
        "differences": {kind: names[:20] for kind, names in result.differences.items() if names},
        "weights_bytes": setting.config.weight_bytes,
        "layers": setting.config.layers,
        "tokens": setting.tokens,
        "dtype": str(setting.config.dtype).removeprefix("torch."),
        "resident_step_seconds": result.resident.median_step_seconds,
        "streamed_step_seconds": result.streamed.median_step_seconds,
        "resident_allocator_peak_bytes": result.resident_peak,
        "streamed_allocator_peak_bytes": result.streamed_peak,
        "inference": result.inference.to_dict(),
    }


def text(setting: Setting, result: Result, extras: dict[str, Any]) -> str:
    """The demo's whole answer for people."""
    from ..core.report import format_seconds

    config = setting.config
    lines = [
        f"A decoder of {config.layers} blocks, {format_size(config.weight_bytes)} of {extras['dtype']} weights, on "
        f"{setting.device}: {len(result.streamed.outputs)} inference passes, then {setting.steps} LoRA training "
        f"steps of {setting.tokens} tokens.",
        "",
        result.training.table(),
        "",
        "Beside the resident run, which holds every weight on the device",
        f"  step time           {format_seconds(extras['streamed_step_seconds'])} streamed, "
        f"{format_seconds(extras['resident_step_seconds'])} resident",
    ]
    if setting.device.type == "cpu":
        lines.append(
            "                      (here host and device are one memory: copies take the processor's own time)"
        )
    if result.resident_peak is not None and result.streamed_peak is not None:
        lines.append(
            f"  allocator's peak    {format_size(result.streamed_peak)} streamed, "
            f"{format_size(result.resident_peak)} resident (activations included)"
        )
    for kind, names in result.differences.items():
        count = len(getattr(result.resident, kind))
        verdict = (
            f"{len(names)} of {count} DIFFER, first {names[0]!r}"
            if names
            else f"all {count} equal, bit for bit"
        )
        lines.append(f"  {WORDS[kind]:<18}  {verdict}")
    lines += [
        "",
        f"timeline: {extras['timeline']}",
        f"trace: {extras['trace']} (open it in https://ui.perfetto.dev)",
    ]
    if extras["checkpoint"]:
        lines.append(f"checkpoint: {extras['checkpoint']}")
    lines += [
        "",
        f"bit_exact: {str(result.bit_exact).lower()}",
        f"within_budget: {str(result.within_budget).lower()}",
    ]
    return "\n".join(lines)
