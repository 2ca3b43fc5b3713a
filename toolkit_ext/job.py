"""`JobOffload`: manages all models of one process of an ai-toolkit job, from before they load until the process ends."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..core.common.errors import CaromError, UnsupportedError
from ..core.placement.disk_binding import AUTO
from ..core.session.settings import ram_budget
from .attachment import Attachment, tensors
from .choose_mode import choose
from .freed_memory import return_freed_tensors
from .job_reports import JobReports
from .job_sessions import JobSessions
from .loading import building_on_the_host, models_stay_on_the_host
from .options import Policy
from .spilled_loading import SpilledLoading

DEVICES = ("device_torch", "te_device_torch", "quantize_device")


class JobOffload:
    """The models of one process of a job that Carom manages. The argument ``say`` prints a line into the job's log.

    ``policy``: the settings from the YAML; ``device``: the device that computes; ``attachments``: one for each managed
    model; ``sessions``: opens their sessions within the budgets; ``reports``: writes their reports; ``choice``: how the
    policy's mode runs on the device. If ``choice.pool`` is "", Carom does not work on the device, and the caller leaves
    the job to ai-toolkit.
    """

    def __init__(self, policy: Policy, device: torch.device | str, say: Callable[[str], None]) -> None:
        self.policy, self.device = policy, torch.device(device)
        self.attachments: list[Attachment] = []
        self._say = say
        self.choice = choose(policy, self.device)
        self.sessions = JobSessions(policy, self.choice, self.device, self.attachments, self.say)
        self.reports = JobReports(policy, self.attachments, self.say)
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
        attachment = Attachment(
            module, self.device, self.sessions.open, name=name, percent=percent, ignored=ignored
        )
        self.attachments.append(attachment)

    def load(self, sd: Any, original: Callable[[], Any]) -> Any:
        """Run the loader ``original`` of the model ``sd`` with whole models kept on the host; attach the models.

        Without this, the loader would fill the device before the models stream. Returns the loader's result.
        """
        with self._spilling() as arrived:
            result, kept = self._load_on_the_host(sd, original, arrived)
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

    @contextlib.contextmanager
    def _spilling(self) -> Iterator[Callable[[nn.Module], None]]:
        """Spill the weights that loading makes inside this context, if the policy names a folder.

        Yields the function to call with each module whose weights loading brought to the host.
        """
        disk = self.policy.disk
        if disk is not None:
            return_freed_tensors()
        if disk is None or disk == AUTO:
            yield lambda module: None
            return
        spilled = SpilledLoading(disk, ram_budget(self.policy.ram))
        with spilled.noting_quantised():
            yield spilled.note

    def _load_on_the_host(
        self, sd: Any, original: Callable[[], Any], arrived: Callable[[nn.Module], None]
    ) -> tuple[Any, list[weakref.ref[nn.Module]]]:
        """Run the loader ``original`` of ``sd``. Return its result, and the models that were kept on the host."""
        if attaches_itself(sd):
            with building_on_the_host(sd), models_stay_on_the_host(self.device, arrived) as kept:
                return original(), kept
        # Such classes use these device attributes only for loading.
        before = {name: getattr(sd, name) for name in DEVICES if hasattr(sd, name)}
        for name in before:
            setattr(sd, name, torch.device("cpu"))
        try:
            with models_stay_on_the_host(torch.device("cpu"), arrived):
                return original(), []
        finally:
            for name, value in before.items():
                setattr(sd, name, value)

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
        self.reports.keep(attachment)
        attachment.detach(discard=discard)
        self.attachments.remove(attachment)
        # In the middle of a step budgets cannot change. They change with the next model that comes or goes.
        with contextlib.suppress(UnsupportedError):
            self.sessions.rebalance()

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
        may_stream_from_disk = self.policy.disk is not None and getattr(network, "can_merge_in", False)
        if may_stream_from_disk and any(a.trains and a.on_disk for a in self.attachments):
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
        self.sessions.require_least()
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

    def close(self) -> None:
        """Detach every model after the process ended. The weights are not used again."""
        for attachment in self.attachments:
            with contextlib.suppress(CaromError):
                attachment.detach(discard=True)
        self.attachments.clear()


def attaches_itself(sd: Any) -> bool:
    """Return whether the class of the model ``sd``, or a base class, calls ai-toolkit's memory manager itself."""
    return any(hasattr(sys.modules.get(cls.__module__), "MemoryManager") for cls in type(sd).__mro__)


def rounds_at_random(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is one of ai-toolkit's with stochastic rounding, which refuse weights on the CPU."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the optimizer
    return hasattr(sys.modules.get(type(optimizer).__module__), "copy_stochastic")
