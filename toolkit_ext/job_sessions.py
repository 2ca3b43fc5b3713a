"""`JobSessions`: opens the sessions of a job's models, and divides the job's budgets of VRAM and RAM among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from ..core.budget.shared_budget import SharedBudget
from ..core.common.errors import BudgetError
from ..core.common.sizes import parse_size
from ..core.device.make_engine import make_engine
from ..core.host.probe import host_memory
from ..core.model.quantized import FlattenedWeights
from ..core.session.session import Session
from ..core.session.settings import vram_budget, within_dedicated
from ..core.session.stream_settings import StreamSettings
from . import devices, log_messages
from .attachment import Attachment, weight_bytes
from .budget_shares import require
from .choose_mode import Choice
from .options import Policy

ROOM = 32 << 20  # additional bytes in the budget of a model that stays on the device as a whole
SLOTS = 3  # slots of the least budget's size that a model with a percentage gets for its streamed part


class JobSessions:
    """The sessions of a job's models.

    ``policy``: the settings from the YAML; ``choice``: how the policy's mode runs on ``device``; ``attachments``: the
    job's models, a list that the job changes; ``say``: prints a line into the job's log.
    """

    def __init__(
        self, policy: Policy, choice: Choice, device: torch.device, attachments: Sequence[Attachment],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._policy, self._choice, self._device = policy, choice, device
        self._attachments, self._say = attachments, say
        self._shared: SharedBudget | None = None
        self._bytes: int | None = None  # the budget of the job's models together

    def require_least(self) -> None:
        """Raise BudgetError if the models that have no session yet do not fit the job's budget together."""
        waiting = [a for a in self._sharing() if a.session is None]
        if waiting and not self._choice.alone:
            total = self._total() if self._bytes is None else self._bytes
            require(total, {a.name: self._least(a) for a in waiting})

    def open(self, attachment: Attachment) -> Session:
        """Return a new session for ``attachment`` with its part of the job's budget; print a line into the log."""
        self._least(attachment)
        if self._bytes is None and attachment.percent is None and not self._choice.alone:
            self._bytes = self._total()  # from the memory that is free before the first session
        self.rebalance()
        session = self._stream(attachment, self._share(attachment, opening=True))
        if attachment.trains:
            self._rank(session)
        self._say(log_messages.start(attachment.name, session.report()))
        if attachment.trains_whole and self._policy.disk is not None:
            self._say(
                f"{attachment.name}: disk has no effect, because weights that train cannot stream from disk"
            )
        return session

    def _stream(
        self, attachment: Attachment, vram: int | str | SharedBudget, granularity: str | None = None
    ) -> Session:
        policy = self._policy
        disk = None if attachment.trains_whole else policy.disk  # weights on disk cannot be trained
        asked = StreamSettings(
            device=devices.engine_device(self._device), vram=vram, ram=self._ram(attachment),
            granularity=granularity or policy.granularity, codec=policy.codec, pool=self._choice.pool, disk=disk,
            backward=attachment.trains, rewritten=attachment.trains,
        )  # fmt: skip
        return Session(attachment.module, asked)

    def _rank(self, session: Session) -> None:
        """Rank the session of a model that trains among the job's sessions, by the policy's ``priority``."""
        if self._policy.priority == "high":
            session.prioritize()
        elif self._policy.priority == "low":
            session.deprioritize()

    def _sharing(self) -> list[Attachment]:
        return [a for a in self._attachments if a.percent is None]

    def _share(self, attachment: Attachment, opening: bool = False) -> int | str | SharedBudget:
        """Return the budget of ``attachment``: bytes, the YAML's ``vram`` for a single model, or a shared budget.

        ``opening``: whether the session of ``attachment`` is about to open. Raises BudgetError if the models cannot
        share the job's budget.
        """
        if self._choice.alone:
            return 2 * weight_bytes(attachment.module) + ROOM
        if attachment.percent is not None:
            least = self._least(attachment, "block")
            return int(weight_bytes(attachment.module) * (1 - attachment.percent)) + SLOTS * least
        sharing = self._sharing()
        if len(sharing) == 1:
            return self._policy.vram
        if self._shared is None:
            total = self._total() if self._bytes is None else self._bytes
            self._shared = SharedBudget(total, by_size=True, grows=self._policy.vram == "auto")
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
        engine = make_engine(devices.engine_device(self._device))
        return within_dedicated(vram_budget(self._policy.vram, engine), engine)[0]

    def _ram(self, attachment: Attachment) -> int | str:
        if self._policy.ram == "auto" or len(self._attachments) == 1:
            return self._policy.ram
        total = parse_size(self._policy.ram, whole=host_memory().free, setting="ram")
        everything = sum(weight_bytes(a.module) for a in self._attachments) or 1
        return total * weight_bytes(attachment.module) // everything

    def rebalance(self) -> None:
        """Set the budgets of open sessions anew, because models began or ceased to share the job's budget."""
        for attachment in self._sharing():
            share = self._share(attachment)
            if attachment.session is not None and share != attachment.given:
                attachment.session.set_budget(vram=share)
            attachment.given = share
