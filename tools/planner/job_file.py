"""Reading of an ai-toolkit job (a YAML file) for the planner.

Only the settings that decide memory and time are read. The file is parsed with `yaml.safe_load`, and every value
that is used is checked. Defaults are ai-toolkit's own (its toolkit/config_modules.py at commit 27a03a9, August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.common.errors import UnsupportedError

MAX_JOB = 1 << 18  # bytes; ai-toolkit's own example jobs have at most 10 KB
MAX_ENTRIES = 1000  # processes of a job, datasets of a process, resolutions of a dataset
SUFFIXES = (".yaml", ".yml")
MODES = ("bouncing", "aimdo", "auto")  # of model.offload, beside off
# Old settings that name an architecture -> the value of `arch` that they mean. The first one that is true counts.
_OLD_ARCHES = {
    "is_v2": "sd2", "is_v3": "sd3", "is_xl": "sdxl", "is_pixart": "pixart", "is_auraflow": "auraflow",
    "is_flux": "flux", "is_lumina2": "lumina2",
}  # fmt: skip
_CONTROLS = ("control_path", "control_path_1", "control_path_2", "control_path_3")


@dataclass(frozen=True)
class Dataset:
    """A dataset: `resolutions` in pixels (square roots of the images' areas), `frames` of a clip (1: images), and
    the number of `controls`, which are images that an editing model gets beside each target image.
    """

    resolutions: tuple[int, ...]
    frames: int = 1
    controls: int = 0


@dataclass(frozen=True)
class OffloadSettings:
    """The job's `model.offload` (None: absent or off), and `vram`, `codec` and `disk` of its `offload_kwargs`."""

    mode: str | None = None
    vram: int | str = "auto"
    codec: str = "auto"
    disk: bool = False


@dataclass(frozen=True)
class JobModel:
    """The `model` section of a process.

    `path`: `name_or_path`; `extras`: where the text encoder is; `arch`: ai-toolkit's name of the architecture;
    `qtype`, `qtype_te`: formats of quantised weights of the transformer and the text encoders (None: not
    quantised); `options`: `model_kwargs`; `stock_offloading`: whether `layer_offloading` is true.
    """

    path: str
    extras: str
    arch: str
    qtype: str | None
    qtype_te: str | None
    offload: OffloadSettings
    options: Mapping[str, Any]
    stock_offloading: bool = False


@dataclass(frozen=True)
class Process:
    """A process of a job, which trains one model.

    `number`: from 1; `rank`: of the LoRA; `network`: kind of the adapter (None: the weights themselves are
    trained); `dtype`: number format of weights that are not quantised; `caches_text`: whether text embeddings are
    computed before the training and the text encoder is unloaded.
    """

    number: int
    type: str
    model: JobModel
    datasets: tuple[Dataset, ...]
    batch: int
    rank: int
    network: str | None
    dtype: str
    checkpointing: bool
    caches_text: bool
    trains_text_encoder: bool


@dataclass(frozen=True)
class TrainingJob:
    """An ai-toolkit job."""

    path: str
    name: str
    processes: tuple[Process, ...]


def is_job(path: str) -> bool:
    """Return whether `path` names a job: its name ends in .yaml or .yml."""
    return path.lower().endswith(SUFFIXES)


def read_job(path: str) -> TrainingJob:
    """Return the job in the file `path`.

    Raises ValueError where the file is no job that trains, and UnsupportedError where pyyaml is not installed.
    """
    return parse_job(_load(path), path)


def parse_job(data: Any, path: str) -> TrainingJob:
    """Return the job of the parsed YAML `data`; `path` is for messages. Raises ValueError where it is no job that
    trains.
    """
    if not isinstance(data, dict) or "job" not in data or not isinstance(data.get("config"), dict):
        raise ValueError(f"{path} is no ai-toolkit job: it must have `job` and a `config` section")
    kind = data["job"]
    if kind != "extension":
        raise ValueError(
            f"{path}: job: {_show(kind)} loads no extensions, so Carom has no effect there; only `job: extension` is planned"
        )
    config = data["config"]
    found = config.get("process")
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_ENTRIES:
        raise ValueError(f"{path}: config.process must be a list of 1 to {MAX_ENTRIES} processes")
    processes = tuple(_process(entry, number, path) for number, entry in enumerate(found, 1))
    name = config.get("name")
    return TrainingJob(path, name[:200] if isinstance(name, str) else Path(path).stem, processes)


def _load(path: str) -> Any:
    """Return the parsed contents of the YAML file `path`."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path} is not there (or is no regular file); name an ai-toolkit job or a model")
    try:
        import yaml
    except ImportError as error:
        raise UnsupportedError(
            f"{path}: a job cannot be read without pyyaml; run: python -m pip install pyyaml"
        ) from error
    with open(file, "rb") as stream:
        raw = stream.read(MAX_JOB + 1)
    if len(raw) > MAX_JOB:
        raise ValueError(f"{path} is larger than {MAX_JOB >> 10} KiB, which no job needs to be")
    try:
        # Merges of merges can grow exponentially, and ai-toolkit's jobs do without them.
        if any(isinstance(event, yaml.ScalarEvent) and event.value == "<<" for event in yaml.parse(raw)):
            raise ValueError(f"{path}: merge keys (<<) are not read; write the settings out")
        return yaml.safe_load(raw)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        raise ValueError(
            f"{path} is not YAML: {getattr(error, 'problem', None) or 'bad text'}{line}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be a job") from error


def _process(entry: Any, number: int, path: str) -> Process:
    """Return the process described by `entry`, the entry `number` (from 1) of `config.process`."""
    where = f"{path}: config.process[{number - 1}]"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a section of settings")
    train, network = _section(entry, "train", where), entry.get("network")
    datasets = entry.get("datasets") or []
    if not isinstance(datasets, list) or len(datasets) > MAX_ENTRIES:
        raise ValueError(f"{where}.datasets must be a list of at most {MAX_ENTRIES} datasets")
    read = tuple(_dataset(dataset, f"{where}.datasets[{i}]") for i, dataset in enumerate(datasets))
    rank, kind = 4, None
    if network is not None:
        network = _section(entry, "network", where)
        kind = str(network.get("type", "lora"))[:40]
        rank = _whole(network, "linear", f"{where}.network", 4, most=1 << 16)
        rank = _whole(network, "rank", f"{where}.network", rank, most=1 << 16)
    cached = any(
        isinstance(dataset, dict) and dataset.get("cache_text_embeddings") is True for dataset in datasets
    )
    return Process(
        number, str(entry.get("type", "?"))[:80], _model(_section(entry, "model", where), f"{where}.model"),
        read or (Dataset((512,)),), _whole(train, "batch_size", f"{where}.train", 1, most=1 << 16), rank, kind,
        str(train.get("dtype", "fp32"))[:40], train.get("gradient_checkpointing", True) is not False,
        cached or train.get("cache_text_embeddings") is True or train.get("unload_text_encoder") is True,
        train.get("train_text_encoder") is True,
    )  # fmt: skip


def _model(model: Mapping[str, Any], where: str) -> JobModel:
    """Return the `model` section `model` of a process."""
    path = model.get("name_or_path")
    if not isinstance(path, str) or not path:
        raise ValueError(
            f"{where}.name_or_path must name a model: a folder, a .safetensors file or a hub name"
        )
    extras, options = model.get("extras_name_or_path"), model.get("model_kwargs")
    quantize = model.get("quantize") is True
    return JobModel(
        path, extras if isinstance(extras, str) else path, _arch(model),
        _qtype(model, "qtype") if quantize else None,
        _qtype(model, "qtype_te") if model.get("quantize_te", quantize) is True else None,
        _offload(model, where), options if isinstance(options, dict) else {}, model.get("layer_offloading") is True,
    )  # fmt: skip


def _arch(model: Mapping[str, Any]) -> str:
    """Return ai-toolkit's name of the architecture, also for jobs that give it in the old way (`is_flux: true`)."""
    arch = model.get("arch")
    if isinstance(arch, str) and arch:
        arch = arch.partition(":")[0][:80]  # its UI adds a tag after a colon
        return "flux" if arch == "flex1" else arch
    return next((meant for old, meant in _OLD_ARCHES.items() if model.get(old) is True), "sd1")


def _qtype(model: Mapping[str, Any], name: str) -> str:
    """Return the quantised format without the accuracy recovery adapter that may follow it after a bar."""
    value = model.get(name)
    return value.partition("|")[0][:40] if isinstance(value, str) else "qfloat8"


def _offload(model: Mapping[str, Any], where: str) -> OffloadSettings:
    """Return the job's own settings of Carom."""
    mode = model.get("offload")
    if mode is None or mode is False or mode == "off":  # YAML reads a bare `off` as false
        return OffloadSettings()
    if mode not in MODES:
        raise ValueError(f"{where}.offload={_show(mode)} is not known; write bouncing, aimdo, auto or off")
    options = _section(model, "offload_kwargs", where)
    vram, codec = options.get("vram") or "auto", options.get("codec") or "auto"
    if not isinstance(vram, (int, str)):
        raise ValueError(
            f"{where}.offload_kwargs.vram={_show(vram)} is not a size; write one as 12GiB, or auto"
        )
    return OffloadSettings(mode, vram, codec if isinstance(codec, str) else "auto", bool(options.get("disk")))


def _dataset(dataset: Any, where: str) -> Dataset:
    """Return the dataset `dataset`."""
    if not isinstance(dataset, dict):
        raise ValueError(f"{where} is not a section of settings")
    asked = dataset.get("resolution", 512)
    sizes = asked if isinstance(asked, list) else [asked]
    if not 1 <= len(sizes) <= MAX_ENTRIES or any(
        type(size) is not int or not 1 <= size <= 1 << 14 for size in sizes
    ):
        raise ValueError(f"{where}.resolution must be pixels, as 1024 or [512, 1024], each at most {1 << 14}")
    controls = [path for key in _CONTROLS if (path := dataset.get(key))]
    count = sum(len(path) if isinstance(path, list) else 1 for path in controls)
    return Dataset(
        tuple(sorted(set(sizes))), _whole(dataset, "num_frames", where, 1, most=1 << 16), min(count, MAX_ENTRIES)
    )  # fmt: skip


def _section(parent: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Return the section `name` of `parent`; {} where it is absent. Raises ValueError where it is something else."""
    found = parent.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{where}.{name}={_show(found)} must be a section of settings")
    return found


def _whole(section: Mapping[str, Any], name: str, where: str, default: int, *, most: int) -> int:
    """Return the whole number `name` of `section`, from 1 to `most`; `default` where it is absent."""
    value = section.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{where}.{name}={_show(value)} must be a whole number from 1 to {most}")
    return value


def _show(value: Any) -> str:
    """Return a short text of `value` for a message. Lists and sections are not printed: aliases can make them huge."""
    return type(value).__name__ if isinstance(value, (dict, list, set, tuple)) else repr(value)[:60]
