"""`JobOffload`: manages all models of one process of an ai-toolkit job, their budgets, and the job's reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.budget.shared_budget import SharedBudget
from ..core.common.errors import BudgetError, CaromError, UnsupportedError
from ..core.device.make_engine import make_engine
from ..core.metrics.report import Report
from ..core.model.quantized import FlattenedWeights
from ..core.placement.disk_binding import AUTO
from ..core.session.session import Session
from ..core.session.settings import ram_budget, vram_budget, within_dedicated
from . import log_messages
from .attachment import Attachment, tensors, weight_bytes
from .budget_shares import require
from .choose_mode import choose
from .freed_memory import return_freed_tensors
from .loading import building_on_the_host, models_stay_on_the_host
from .options import Policy
from .spilled_loading import SpilledLoading

logger = logging.getLogger("carom")

DEVICES = ("device_torch", "te_device_torch", "quantize_device")
ROOM = 32 << 20  # additional bytes in the budget of a model that stays on the device as a whole
SLOTS = 3  # slots of the least budget's size that a model with a percentage gets for its streamed part


class JobOffload:
    """The models of one process of a job that Carom manages. The argument ``say`` prints a line into the job's log.

    ``policy``: the settings from the YAML; ``device``: the device that computes; ``attachments``: one for each managed
    model; ``told``: whether the job's log has a line of progress; ``choice``: how the policy's mode runs on the device.
    If ``choice.pool`` is "", Carom does not work on the device, and the caller leaves the job to ai-toolkit.
    """

    def __init__(self, policy: Policy, device: torch.device | str, say: Callable[[str], None]) -> None:
        self.policy, self.device = policy, torch.device(device)
        self.attachments: list[Attachment] = []
        self._say = say
        self._shared: SharedBudget | None = None
        self._bytes: int | None = None  # the budget of the job's models together
        self._reports: dict[str, Report] = {}
        self.told = False
        self.choice = choose(policy, self.device)
        for line in (*policy.remarks, *self.choice.lines):
            self.say(line)

    def say(self, line: str) -> None:
        """Print ``line`` into the job's log."""
        self._say(f"carom: {line}")

    # -- attaching

    def attach(
        self, module: nn.Module, *, percent: float | None = None, ignored: tuple[Any, ...] = ()
    ) -> None:
        """Let Carom manage ``module``. Does nothing if the module or a submodule is already managed."""
        if any("_memory_manager" in part.__dict__ for part in module.modules()):
            return
        name, count = type(module).__name__, 2
        while any(name == other.name for other in self.attachments):
            name, count = f"{type(module).__name__} {count}", count + 1
        attachment = Attachment(module, self.device, self.open, name=name, percent=percent, ignored=ignored)
        self.attachments.append(attachment)

    def load(self, sd: Any, original: Callable[[], Any]) -> Any:
        """Run the loader ``original`` of the model ``sd`` with whole models kept on the host; attach the models.

        Without this, the loader would fill the device before the models stream. Returns the loader's result.
        """
        kept: list[Any] = []
        if attaches_itself(sd):
            with building_on_the_host(sd), models_stay_on_the_host(self.device, self._arrived()) as kept:
                result = original()
        else:  # such classes use these device attributes only for loading
            before = {name: getattr(sd, name) for name in DEVICES if hasattr(sd, name)}
            for name in before:
                setattr(sd, name, torch.device("cpu"))
            try:
                with models_stay_on_the_host(torch.device("cpu"), self._arrived()):
                    result = original()
            finally:
                for name, value in before.items():
                    setattr(sd, name, value)
        encoders = getattr(sd, "text_encoder", None)
        encoders = encoders if isinstance(encoders, (list, tuple)) else [encoders]
        roots = [(getattr(sd, "unet", None), self.policy.transformer_percent)]
        roots += [(encoder, self.policy.text_encoder_percent) for encoder in encoders]
        roots += [(getattr(sd, "refiner_unet", None), self.policy.transformer_percent)]
        alone = [getattr(sd, "vae", None)]  # models that go to the device to which their loader moved them
        for module, percent in roots:
            if percent == 0:
                alone.append(module)
            # A `.to` in the module's own attributes means that the weights must not be moved (bitsandbytes).
            if (
                isinstance(module, nn.Module)
                and percent != 0
                and "to" not in module.__dict__
                and next(tensors(module), None) is not None
            ):
                self.attach(module, percent=percent)
        self._place_the_rest(kept, alone)
        for role in ("unet", "refiner_unet"):
            root = getattr(sd, role, None)
            parts = {id(part) for part in root.modules()} if isinstance(root, nn.Module) else set()
            for attachment in self.attachments:  # two parts of Wan 2.2's root, one for each noise range
                if id(attachment.module) in parts:
                    attachment.trains = True  # set here because the adapters belong to the network
        return result

    def _arrived(self) -> Callable[[nn.Module], None]:
        """Return the function to call with each module whose weights loading brought to the host."""
        disk = self.policy.disk
        if disk is not None:
            return_freed_tensors()
        if disk is None or disk == AUTO:
            return lambda module: None
        return SpilledLoading(disk, ram_budget(self.policy.ram)).note

    def _place_the_rest(self, kept: list[Any], alone: list[Any]) -> None:
        """Place the models in ``kept``, which the loader tried to move to the device and which are not attached yet.

        Models in ``alone``, and parts of them, go to the device. Others, such as an image encoder, are attached. If the
        text encoder's percentage is 0, all of them go to the device.
        """
        apart = {id(part) for module in alone if isinstance(module, nn.Module) for part in module.modules()}
        percent = self.policy.text_encoder_percent
        for module in filter(None, (reference() for reference in kept)):
            if any("_memory_manager" in part.__dict__ for part in module.modules()):
                continue
            if percent == 0 or any(id(part) in apart for part in module.modules()):
                module.to(self.device)
            else:
                self.attach(module, percent=percent)

    def of(self, module: nn.Module | None) -> Attachment | None:
        """Return the attachment whose root is ``module``, None if there is none."""
        return next((a for a in self.attachments if a.module is module), None)

    def release(self, module: nn.Module, *, discard: bool = False) -> None:
        """Detach ``module``. Its part of the budget goes to the models that stay.

        ``discard``: the module's weights will be deleted.
        """
        attachment = self.of(module)
        if attachment is None:
            return
        self._keep_report(attachment)
        attachment.detach(discard=discard)
        self.attachments.remove(attachment)
        # In the middle of a step budgets cannot change. They change with the next model that comes or goes.
        with contextlib.suppress(UnsupportedError):
            self._rebalance()

    def ready(self, *, trainable_only: bool = False) -> None:
        """Open the sessions that would otherwise open at the first forward.

        Optimizers and compilers must see the final location of the weights. ``trainable_only``: open only the sessions
        of models with trainable weights.
        """
        for attachment in self.attachments:
            trains = [p.requires_grad for p in attachment.module.parameters() if p.is_floating_point()]
            if attachment.session is None and (any(trains) or not trainable_only):
                attachment.trains_whole = trainable_only and all(trains)
                attachment.activate()

    def refresh(self) -> None:
        """Discard all copies of weights, because weights were changed without the sessions' knowledge (a merge)."""
        for attachment in self.attachments:
            attachment.refresh()

    def sampling(self, network: Any) -> None:
        """Prepare for samples: open all sessions, and forbid ``network`` to merge into weights that stream from disk.

        ai-toolkit then runs the network beside the model, as it does for quantised models and with its own layer
        offloading. A merge would write all weights to host memory.
        """
        self.ready()
        if getattr(network, "can_merge_in", False) and any(a.trains and a.on_disk for a in self.attachments):
            network.can_merge_in = False
            self.say("samples are made without merging the network, because the model streams from disk")

    # -- before the first step

    def check(self, optimizer: Any, averages: bool, merges: bool = False) -> None:
        """Raise an exception if the job cannot train with these settings; called before the first step.

        Raises BudgetError if a model does not fit its budget. Raises UnsupportedError if trainable weights stream and
        ``optimizer`` cannot step weights on the host, or if they stream and ``averages`` is True: ai-toolkit's average
        of the weights (EMA) cannot be computed on the host either. Raises UnsupportedError if weights stream from disk
        and ``merges`` is True: the job will merge its network into them.
        """
        sharing = self._sharing()
        if not self.choice.alone and any(a.session is None for a in sharing):
            total = self._total() if self._bytes is None else self._bytes
            require(total, {a.name: self._least(a) for a in sharing if a.session is None})
        if merges and self.policy.disk is not None:
            self.ready()
            for attachment in self.attachments:
                if attachment.trains and attachment.on_disk:
                    raise UnsupportedError(
                        f"train.merge_network_on_save changes the weights of {attachment.name}, and these stream from disk: "
                        "they exceed offload_kwargs.ram. Remove merge_network_on_save, or write a ram that holds them"
                    )
        for attachment in self.attachments:
            if attachment.streams_what_trains and (rounds_at_random(optimizer) or averages):
                what = type(optimizer).__name__ if rounds_at_random(optimizer) else "ema_config.use_ema"
                raise UnsupportedError(
                    f"{what} of ai-toolkit rounds weights of {attachment.name} at random, which it does on the GPU only, and these "
                    "stream: they are stepped on the CPU. Write optimizer: adamw without ema, or a vram that holds all that trains"
                )

    # -- budgets

    def open(self, attachment: Attachment) -> Session:
        """Return a new session for ``attachment`` with its part of the job's budget; print a line into the log."""
        self._least(attachment)
        if self._bytes is None and attachment.percent is None and not self.choice.alone:
            self._bytes = self._total()  # from the memory that is free before the first session
        self._rebalance()
        session = self._stream(attachment, self._share(attachment, opening=True))
        if attachment.trains:
            self._rank(session)
        self.say(log_messages.start(attachment.name, session.report()))
        if attachment.trains_whole and self.policy.disk is not None:
            self.say(
                f"{attachment.name}: disk has no effect, because weights that train cannot stream from disk"
            )
        return session

    def _stream(
        self, attachment: Attachment, vram: int | str | SharedBudget, granularity: str | None = None
    ) -> Session:
        policy = self.policy
        disk = None if attachment.trains_whole else policy.disk  # weights on disk cannot be trained
        return Session(
            attachment.module, device=engine_device(self.device), vram=vram, ram=self._ram(attachment), weights=None,
            granularity=granularity or policy.granularity, codec=policy.codec, pool=self.choice.pool, host="auto",
            training=None, disk=disk, backward=attachment.trains,
        )  # fmt: skip

    def _rank(self, session: Session) -> None:
        """Rank the session of a model that trains among the job's sessions, by the policy's ``priority``."""
        if self.policy.priority == "high":
            session.prioritize()
        elif self.policy.priority == "low":
            session.deprioritize()

    def _sharing(self) -> list[Attachment]:
        return [a for a in self.attachments if a.percent is None]

    def _share(self, attachment: Attachment, opening: bool = False) -> int | str | SharedBudget:
        """Return the budget of ``attachment``: bytes, the YAML's ``vram`` for a single model, or a shared budget.

        ``opening``: whether the session of ``attachment`` is about to open. Raises BudgetError if the models cannot
        share the job's budget.
        """
        if self.choice.alone:
            return 2 * weight_bytes(attachment.module) + ROOM
        if attachment.percent is not None:
            least = self._least(attachment, "block")
            return int(weight_bytes(attachment.module) * (1 - attachment.percent)) + SLOTS * least
        sharing = self._sharing()
        if len(sharing) == 1:
            return self.policy.vram
        if self._shared is None:
            total = self._total() if self._bytes is None else self._bytes
            self._shared = SharedBudget(total, by_size=True, grows=self.policy.vram == "auto")
        # A shared budget that shrank counts with its first size for a new model.
        require(max(self._shared.first, self._shared.nbytes), {a.name: self._least(a) for a in sharing})
        # Models without a session leave their parts to the others, except for their least budgets.
        waiting = [a for a in sharing if a.session is None and not (opening and a is attachment)]
        self._shared.later = sum(self._least(a) for a in waiting)
        return self._shared

    def _least(self, attachment: Attachment, granularity: str | None = None) -> int:
        """Return the least budget in bytes that works for a model. Must first be called before the model streams.

        The figure comes from the BudgetError of a session with a budget of 0, and is remembered.
        """
        if granularity not in attachment.least:
            least = 0
            with contextlib.closing(FlattenedWeights(attachment.module)):
                try:
                    self._stream(attachment, 0, granularity).close()
                except BudgetError as error:
                    least = error.least_bytes or 0
            attachment.least[granularity] = least
        return attachment.least[granularity]

    def _total(self) -> int:
        """Return the job's budget in bytes. "auto" and percentages are resolved as in a session of the engine.

        Called before any weight is on the device.
        """
        engine = make_engine(engine_device(self.device))
        return within_dedicated(vram_budget(self.policy.vram, engine), engine)[0]

    def _ram(self, attachment: Attachment) -> int | str:
        from ..core.common.sizes import parse_size

        if self.policy.ram == "auto" or len(self.attachments) == 1:
            return self.policy.ram
        import psutil

        total = parse_size(self.policy.ram, whole=psutil.virtual_memory().available, setting="ram")
        everything = sum(weight_bytes(a.module) for a in self.attachments) or 1
        return total * weight_bytes(attachment.module) // everything

    def _rebalance(self) -> None:
        """Set the budgets of open sessions anew, because models began or ceased to share the job's budget."""
        for attachment in self._sharing():
            share = self._share(attachment)
            if attachment.session is not None and share != attachment.given:
                attachment.session.set_budget(vram=share)
            attachment.given = share

    # -- reports

    def _keep_report(self, attachment: Attachment) -> None:
        if attachment.session is None:
            return
        now, before = attachment.session.report(), self._reports.get(attachment.name)
        if before is not None and before.kind == "train" and now.kind != "train":
            # A job ends with samples, but its report is about training steps. The peaks are those of all sessions.
            peaks = ("vram_peak_bytes", "pinned_peak_bytes", "ram_peak_bytes")
            peak = {name: max(getattr(before, name), getattr(now, name)) for name in peaks}
            now = dataclasses.replace(before, **peak)
        self._reports[attachment.name] = now

    def progress(self, step: int | None) -> None:
        """Print the line about ``step`` into the job's log, with each model's residency and stall."""
        lines = []
        for attachment in self.attachments:
            self._keep_report(attachment)
            session = attachment.session
            if session is not None:
                report = self._reports[attachment.name]
                lines.append(log_messages.progress(attachment.name, report, parked=session.parked))
        if lines:
            self.told = True
            self.say(f"step {step}: " + "; ".join(lines))

    def write(self, folder: str | os.PathLike[str], job: str, *, pictures: bool) -> Path | None:
        """Write the report, and with ``pictures`` timelines and traces, to the job's output ``folder``.

        Returns the folder of the written files, None if nothing was written. A failure, such as a full disk, is printed
        into the job's log and raises nothing.
        """
        for attachment in self.attachments:
            self._keep_report(attachment)
        if not self._reports:
            return None
        try:
            target = Path(folder) / output_name(job)
            target.mkdir(parents=True, exist_ok=True)
            reports = {name: report.to_dict() for name, report in self._reports.items()}
            policy: dict[str, Any] = {"offload": self.policy.mode}
            policy |= {name: getattr(self.policy, name) for name in ("vram", "ram", "disk")}
            _write(target / "report.json", json.dumps({**policy, "models": reports}, indent=2))
            _write(
                target / "report.txt",
                "\n\n".join(f"{name}\n{r.table()}" for name, r in self._reports.items()) + "\n",
            )
            if pictures:
                for name, report in self._reports.items():
                    stem = name.replace(" ", "-")
                    report.plot(target / f"timeline-{stem}.png")
                    report.trace(target / f"trace-{stem}.json")
        except (OSError, ValueError, ImportError) as error:
            self.say(f"the report could not be written ({error})")
            return None
        return target

    def close(self) -> None:
        """Detach every model after the process ended. The weights are not used again."""
        for attachment in self.attachments:
            with contextlib.suppress(CaromError):
                attachment.detach(discard=True)
        self.attachments.clear()


def engine_device(device: torch.device) -> Any:
    """Return the device for the engine, given ai-toolkit's ``device``. Tests replace this function."""
    return device


def attaches_itself(sd: Any) -> bool:
    """Return whether the class of the model ``sd``, or a base class, calls ai-toolkit's memory manager itself."""
    import sys

    return any(hasattr(sys.modules.get(cls.__module__), "MemoryManager") for cls in type(sd).__mro__)


def rounds_at_random(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is one of ai-toolkit's with stochastic rounding, which refuse weights on the CPU."""
    import sys

    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the optimizer
    return hasattr(sys.modules.get(type(optimizer).__module__), "copy_stochastic")


def output_name(job: str) -> str:
    """Return the name of the folder for the reports, which must not start with the job's name.

    ai-toolkit treats every name that starts with the job's name as a checkpoint.
    """
    return "carom" if not "carom".startswith(job) else f"offload of {job}"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
