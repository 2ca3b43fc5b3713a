"""`carom demo`: streams a model in a quarter of its memory, trains the model, and compares all results bit
for bit.

The same inference and LoRA training run once with all weights on the device and once streamed by Carom.
"""

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

from ..core.common.errors import UnsupportedError
from ..core.common.sizes import GIB, MIB, format_size, parse_size

if TYPE_CHECKING:
    import torch

    from ..core.metrics.report import Report
    from .demo_model import DecoderConfig
    from .demo_trial import RunResults

CPU_BYTES, GPU_BYTES = 352 * MIB, 4 * GIB  # default bytes of weights
CPU_TOKENS, GPU_TOKENS = 128, 2048  # tokens of a step
KIND_LABELS = {
    "outputs": "outputs",
    "losses": "losses",
    "gradients": "gradients",
    "adapters": "trained adapters",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `carom demo` to ``parser``; all are optional."""
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
    """The settings of a run: the device, the model's shape, the device budget in bytes, tokens of a step and
    steps.
    """

    device: torch.device
    config: DecoderConfig
    vram: int
    tokens: int
    steps: int


@dataclass(frozen=True)
class Result:
    """The results of a run: reports, computed tensors of the resident and the streamed run, and their
    differences.
    """

    inference: Report
    training: Report
    resident: RunResults
    streamed: RunResults
    differences: dict[str, list[str]]
    resident_peak: int | None  # peak bytes of the device's allocator, activations included; None on cpu
    streamed_peak: int | None

    @property
    def bit_exact(self) -> bool:
        """Whether the streamed run computed the same bits as the resident run."""
        return not any(self.differences.values())

    @property
    def within_budget(self) -> bool:
        """Whether the peak of the weights on the device stayed within the budget."""
        return all(r.vram_peak_bytes <= r.vram_budget_bytes for r in (self.inference, self.training))


def run(args: argparse.Namespace) -> int:
    """Run the demo and return the exit code: 1 where a bit differs or the budget was exceeded, else 0."""
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
    """Choose the settings that were not given, before anything is written.

    Raises ValueError for a bad option and UnsupportedError where memory or the device is not sufficient.
    """
    import torch

    from .demo_model import config_for

    if not 1 <= args.steps <= 100:  # limited because the gradients of every step are kept for the comparison
        raise ValueError(f"--steps {args.steps}: must be between 1 and 100")
    device = pick_device(args.device)
    on_gpu = device.type != "cpu"
    size = parse_size(args.size, setting="--size") if args.size else default_size(device)
    config = config_for(size, torch.bfloat16 if on_gpu else torch.float32)
    vram = parse_size(args.vram, whole=config.weight_bytes, setting="--vram")
    # RAM for the weights, for their copy in Carom's host memory, for memory that the allocator keeps after
    # the weights were freed (measured), and for the program itself.
    need = 3 * config.weight_bytes + 512 * MIB
    free = available_memory()
    if free < need:
        raise UnsupportedError(
            f"a demo of {format_size(config.weight_bytes)} needs about {format_size(need)} of RAM and "
            f"{format_size(free)} is free: ask for less with --size {max((free - 512 * MIB) // 3 // MIB, 1)}MiB"
        )
    return Setting(device, config, vram, GPU_TOKENS if on_gpu else CPU_TOKENS, args.steps)


def pick_device(name: str | None) -> torch.device:
    """Return the device called ``name``, after trying it once; default: the accelerator, else cpu.

    Raises ValueError for a bad name and UnsupportedError for a device that does not work here.
    """
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
    """Return the bytes of weights to use by default: few enough that the resident run fits too, with its
    activations.
    """
    import torch

    if device.type == "cpu":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(min(GPU_BYTES, int(free * 0.5), int(available_memory() * 0.25)), CPU_BYTES)


def available_memory() -> int:
    """Return the bytes of RAM that are free or can be freed at once."""
    import psutil

    return psutil.virtual_memory().available


def check_folders(parent: Path | None, weight_bytes: int) -> Path:
    """Return the folder in which to write the checkpoint.

    Raises an error where it is missing or its drive too full.
    """
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
    """Create the folder for results and check that it can be written; remove a new folder again if the run
    fails.
    """
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
    """Create a new folder in ``parent``, and remove it afterwards unless ``keep`` is set and the run
    succeeded.
    """
    # The name is chosen before the folder exists: see `finally`.
    folder = parent / f"carom-demo-{secrets.token_hex(8)}"
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
    finally:  # also covers an interrupt right after mkdir, before the next line runs
        if not (keep and done):
            shutil.rmtree(folder, ignore_errors=True)


class ProgressBar:
    """A progress bar on stderr, in tenths of a percent of the expected work."""

    def __init__(self, bar: Any, weight_bytes: int, steps: int) -> None:
        self._bar, self._bytes, self._steps = bar, weight_bytes, steps

    def stage(self, words: str) -> None:
        """Show ``words`` as the present stage."""
        self._bar.set_description(words)

    def wrote(self, nbytes: int) -> None:
        """Advance by ``nbytes`` of the checkpoint written or read; writing and reading are a fifth of the bar
        each.
        """
        self._bar.update(200 * nbytes / self._bytes)

    def stepped(self) -> None:
        """Advance by one pass or step; all of them are the remaining three fifths of the bar."""
        self._bar.update(600 / self._steps)


@contextlib.contextmanager
def progress(setting: Setting, quiet: bool) -> Iterator[ProgressBar]:
    """Provide a tqdm bar on stderr that is silent where ``quiet``."""
    from tqdm import tqdm

    from .demo_trial import PASSES

    layout = "{desc:<26} {percentage:3.0f}% |{bar}| {elapsed}"
    columns = min(shutil.get_terminal_size().columns, 100)
    with tqdm(
        total=1000, disable=quiet, file=sys.stderr, bar_format=layout, leave=False, ncols=columns
    ) as bar:
        yield ProgressBar(bar, setting.config.weight_bytes, 2 * (PASSES + setting.steps))


def experiment(setting: Setting, folder: Path, bar: ProgressBar) -> Result:
    """Write and load a checkpoint, run the model resident and streamed, and compare the results.

    Raises UnsupportedError where the device has too little memory for the resident run.
    """
    import torch

    from ..core.session.session import stream
    from .demo_model import load_checkpoint, remove_lora, write_checkpoint
    from .demo_trial import (
        SEED,
        RunResults,
        deterministic,
        differences,
        fresh_adapters,
        release,
        run_inference,
        run_training,
    )

    device, config = setting.device, setting.config
    resident, streamed = RunResults(), RunResults()
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
    """Return the peak bytes of the device's allocator since the last `release`; None on cpu."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def figures(setting: Setting, result: Result) -> dict[str, Any]:
    """Return the entries of the JSON that come on top of the training report."""
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
    """Return the printed result of the demo."""
    from ..core.metrics.report import format_seconds

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
        lines.append(f"  {KIND_LABELS[kind]:<18}  {verdict}")
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
