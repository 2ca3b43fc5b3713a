"""Patches of four ai-toolkit classes. Each patched method calls the original unless Carom manages the model.

Only methods of classes are patched, because ai-toolkit imports everything else by name before it imports an extension.
One process of a job runs at a time. `_current` is the `JobOffload` of that process, from before its model loads until
the process has ended.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ..core.common.errors import CaromError, UnsupportedError
from .job import JobOffload, attaches_itself
from .merging import merging_on_the_device
from .options import PERCENTS, Policy, read

PROCESS = ("jobs.process.BaseSDTrainProcess", "BaseSDTrainProcess")
SEAMS = {
    ("toolkit.config_modules", "ModelConfig"): ("__init__",),
    PROCESS: (
        "run",
        "hook_after_sd_init_before_load",
        "hook_before_train_loop",
        "ensure_params_requires_grad",
        "sample",
    ),
    ("toolkit.memory_management.manager", "MemoryManager"): (
        "attach",
        "detach",
        "free",
        "release_cached_memory",
    ),
    ("toolkit.network_mixins", "ToolkitNetworkMixin"): ("merge_in", "merge_out"),
}
POLICY = "_carom_policy"
JOB = "_carom_job"

_current: JobOffload | None = None
_undo: list[Callable[[], None]] = []


def install() -> None:
    """Patch ai-toolkit's classes. A second call does nothing.

    Raises UnsupportedError, before any change, if this ai-toolkit lacks a class or method in `SEAMS`.
    """
    if _undo:
        return
    found: dict[str, Any] = {}
    for (module, name), attributes in SEAMS.items():
        owner = getattr(importlib.import_module(module), name, None)
        lacking = [name] if owner is None else [f"{name}.{a}" for a in attributes if a not in vars(owner)]
        if lacking:
            raise UnsupportedError(f"this ai-toolkit has no {', '.join(lacking)} in {module}; update Carom")
        found[name] = owner
    config, process = found["ModelConfig"], found["BaseSDTrainProcess"]
    _wrap(config, "__init__", _read_config)
    _wrap(process, "run", _run)
    _wrap(process, "hook_after_sd_init_before_load", _before_load)
    _wrap(process, "hook_before_train_loop", _before_train_loop)
    _wrap(process, "ensure_params_requires_grad", _before_optimizer)
    _wrap(process, "sample", _sample)
    for name, wrapper in (
        ("attach", _attach),
        ("detach", _detach),
        ("free", _free),
        ("release_cached_memory", _release),
    ):
        _wrap(found["MemoryManager"], name, wrapper)
    for name in ("merge_in", "merge_out"):
        _wrap(found["ToolkitNetworkMixin"], name, _merge)
    before = sys.excepthook
    sys.excepthook = functools.partial(_one_line, before)
    _undo.append(lambda: setattr(sys, "excepthook", before))


def uninstall() -> None:
    """Restore every patched attribute. For tests."""
    while _undo:
        _undo.pop()()


def _wrap(owner: type, name: str, wrapper: Callable) -> None:
    before = vars(owner)[name]
    if isinstance(before, classmethod):

        @functools.wraps(before.__func__)
        def method(cls: type, *args: Any, **kwargs: Any) -> Any:
            return wrapper(functools.partial(before.__func__, cls), *args, **kwargs)

        after: Any = classmethod(method)
    else:

        @functools.wraps(before)
        def after(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(before, self, *args, **kwargs)

    setattr(owner, name, after)
    _undo.append(lambda: setattr(owner, name, before))


# -- the configuration


def _read_config(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    policy = read(kwargs, os.environ)
    if policy is not None:
        # ai-toolkit's `layer_offloading` would also change the quantised types and forbid merging. It is set later,
        # only in the configuration that loaders read.
        _refuse_other_processes()
        percents = policy.transformer_percent, policy.text_encoder_percent
        kwargs = {**kwargs, "layer_offloading": False, "auto_memory": False}
        kwargs |= {name: 1.0 if p is None else p for name, p in zip(PERCENTS, percents, strict=True)}
    original(self, *args, **kwargs)
    if policy is not None:
        setattr(self, POLICY, policy)


def _refuse_other_processes() -> None:
    """Raise UnsupportedError if the process whose configuration is being read does not train."""
    frame: FrameType | None = sys._getframe(1)
    base = getattr(importlib.import_module(PROCESS[0]), PROCESS[1])
    while frame is not None:
        owner = frame.f_locals.get("self")
        if any(cls.__name__ == "BaseProcess" for cls in type(owner).__mro__):
            if not isinstance(owner, base):
                raise UnsupportedError(
                    f"model.offload works in processes that train, and {type(owner).__name__} does not: remove the line"
                )
            return
        frame = frame.f_back


def _one_line(before: Callable, kind: type, error: BaseException, trace: Any) -> None:
    """Print a CaromError in one line, and pass others to ``before``. Replaces ``sys.excepthook``.

    ai-toolkit's run.py has reported the error to the job and the UI before.
    """
    if isinstance(error, CaromError):
        print(f"carom: {' '.join(str(error).split())}", file=sys.stderr)
    else:
        before(kind, error, trace)


# -- the process


def _run(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    global _current
    try:
        return original(self, *args, **kwargs)
    finally:
        job = self.__dict__.pop(JOB, None)
        if job is not None:
            _current = None
            try:
                if (
                    not job.reports.told
                ):  # a job without samples gets its line of progress and advice at the end
                    job.reports.progress(getattr(self, "step_num", None))
                folder = job.reports.write(self.save_root, self.job.name, pictures=True)
                if folder is not None:
                    what = "report, timelines and traces" if any(folder.glob("timeline-*")) else "report"
                    job.say(f"{what}: {folder}")
            finally:
                job.close()


def _before_load(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    global _current
    policy: Policy | None = getattr(self.model_config, POLICY, None)
    sd = self.sd
    if policy is not None:
        say = importlib.import_module("toolkit.print").print_acc
        job = JobOffload(policy, sd.device_torch, say)
        if not job.choice.pool:
            _stock(self.model_config, sd.model_config)
        else:
            self.__dict__[JOB] = _current = job
            # This copy of the configuration is for loaders. Only classes that call `attach` themselves get the switch,
            # because some of the others refuse to load with it.
            sd.model_config.layer_offloading = attaches_itself(sd)
            load = sd.load_model

            def load_model() -> Any:
                del sd.__dict__["load_model"]
                return job.load(sd, load)

            sd.load_model = load_model
    return original(self, *args, **kwargs)


def _stock(*configs: Any) -> None:
    """Turn ai-toolkit's own layer offloading on, including its change of the quantised types."""
    for config in configs:
        config.layer_offloading = True
        for name in ("qtype", "qtype_te"):
            if getattr(config, name, None) == "qfloat8":
                setattr(config, name, "float8")


def _before_train_loop(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    job: JobOffload | None = self.__dict__.get(JOB)
    if job is not None:
        averages = getattr(getattr(getattr(self, "train_config", None), "ema_config", None), "use_ema", False)
        merges = getattr(getattr(self, "train_config", None), "merge_network_on_save", False)
        job.check(getattr(self, "optimizer", None), averages, merges)
        if getattr(self.model_config, "compile", False):
            job.ready()
    return result


def _before_optimizer(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    job: JobOffload | None = self.__dict__.get(JOB)
    if job is not None:
        job.ready(trainable_only=True)
    return result


def _sample(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    job: JobOffload | None = self.__dict__.get(JOB)
    if job is not None:
        job.sampling(getattr(self, "network", None))
        job.reports.progress(args[0] if args else kwargs.get("step"))
        job.reports.write(self.save_root, self.job.name, pictures=False, kept=True)
    return original(self, *args, **kwargs)


# -- the memory manager


def _attach(
    original: Callable, module: torch.nn.Module, device: torch.device, offload_percent: float = 1.0,
    ignore_modules: Any = (),
) -> None:  # fmt: skip
    job = _current
    # ai-toolkit's own manager offloads adapters (network.layer_offloading), also if Carom streams their model.
    if job is None or hasattr(module, "get_all_modules"):
        original(module, device, offload_percent, list(ignore_modules))
        return
    policy = job.policy
    asked = policy.transformer_percent, policy.text_encoder_percent
    percent = offload_percent if policy.vram == "auto" and offload_percent in asked else None
    job.attach(module, percent=percent, ignored=tuple(ignore_modules))


def _detach(original: Callable, module: torch.nn.Module) -> None:
    if _current is not None and _current.of(module) is not None:
        _current.release(module)
        return
    original(module)


def _free(original: Callable, module: torch.nn.Module) -> None:
    if _current is not None and _current.of(module) is not None:
        _current.release(module, discard=True)
    original(module)


def _release(original: Callable) -> None:
    original()


# -- networks


def _merge(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        with warnings.catch_warnings():  # torch treats packed weights as weights without a value, and warns
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter.*")
            with merging_on_the_device(self, () if _current is None else _current.attachments):
                return original(self, *args, **kwargs)
    finally:
        if _current is not None:
            _current.refresh()
