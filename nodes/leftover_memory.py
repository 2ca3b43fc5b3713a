"""`TakesRoom`, a mixin of `Streaming`: adds the memory that a model's passes leave free to ComfyUI's budget offer.

ComfyUI offers a budget for weights before a pass has run: it estimates the memory that passes need and adds reserves.
After passes have run, the memory that they left free is known, and the session takes it as soon as readings of it agree
(`core/session/policies/raise_budget.py`). This class remembers that memory as additional bytes, together with the bytes that
ComfyUI kept for the passes. The kept bytes grow with the passes' size. The next layout of this model gets the additional
bytes from the beginning, also after other models used the device. Where ComfyUI asks for that memory, or the memory turns
out to be missing, ComfyUI's own budget applies again. The rules are in `node_settings.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from ..core.session.session import Session
from . import comfyui_api
from .node_settings import Beyond, beyond_now, remember, rounded, tolerance, worth
from .prepared_patches import PreparedPatches

FALL = 4  # a pass that ran out of memory with patches runs again with at most 3/4 of ComfyUI's offer


class TakesRoom:
    """The part of a `Streaming` that computes its budget. `Streaming` describes the other attributes.

    ``offer``: bytes that ComfyUI last offered for weights; ``kept``: bytes that ComfyUI kept then for everything else;
    ``for_passes``: bytes that it kept beside an offer that may have exceeded the model's size;
    ``beyond``: the remembered additional bytes, one entry for each amount that ComfyUI kept, the smallest amount first;
    ``needs``: bytes that casts and patches need in passes (see `memory_needed`), prepared patches included; ``short``:
    bytes of these for which ComfyUI's offer did not suffice; ``lacked``: bytes that were missing beside ``needs`` when
    a pass with patches ran out of memory.
    """

    session: Session | None
    suspended: bool
    budget: int | None
    held: int
    streamed: int
    expected: tuple
    patches: PreparedPatches
    offer = kept = for_passes = needs = short = lacked = 0
    beyond: tuple[Beyond, ...] = ()
    # The budget after ComfyUI last asked for a part of the model's memory; None if it has offered a budget since.
    left: int | None = None
    _met = 0  # the value of `needs` for which the present budget was set

    @property
    def model(self) -> nn.Module | None:
        raise NotImplementedError

    @property
    def streams(self) -> bool:
        raise NotImplementedError

    @property
    def total_aligned(self) -> int:
        raise NotImplementedError

    def _measure(self) -> None:
        raise NotImplementedError

    def _came_back(self) -> None:
        raise NotImplementedError

    @property
    def loaded(self) -> int:
        """Bytes that the model takes of the device in passes and between them: weights, slots and prepared patches."""
        return self.held + self.patches.nbytes

    def count_loaded(self) -> None:
        """Let ComfyUI count what the model takes of the device."""
        model = self.model
        if model is not None:
            model.model_loaded_weight_memory = self.loaded  # type: ignore[assignment]
            self.expected = (getattr(model, "current_weight_patches_uuid", None), self.loaded)

    def prepare_patches(self, bound: int, limit: float) -> None:
        """Copy to the device what patches need, as far as there is memory beside the weights.

        ``bound``: the budget for weights that leaves room for all patches; ``limit``: the user's own limit.
        Weights may hold more than ``bound``: they may need more, and a budget stays where ComfyUI's offer changes by
        little. Patches that are on the device stay there in the second case.
        """
        room = max(self.patches.nbytes, bound + self.patches.wanted - self.short - self.held)
        self.patches.prepare(min(room, limit - self.held))

    @property
    def needs_more(self) -> bool:
        """Whether casts and patches need more memory than those for which the present budget was set."""
        return self.needs > self._met

    def for_weights(self, offered: float) -> int:
        """Return the part of the ``offered`` bytes that weights may take: what casts and patches need comes off."""
        needs = self.needs + (self.lacked if self.needs else 0)
        offer = int(min(offered, self.total_aligned + needs)) - needs
        self.short = max(0, -offer)
        return max(0, offer)

    def bound(self, offer: int, device: torch.device, limit: float) -> int:
        """Return the budget in bytes for an ``offer`` of ComfyUI, at most ``limit``.

        The budget includes the memory that earlier passes of this size left free.
        """
        self.follow()
        self.offer, self.kept = offer, comfyui_api.free_bytes(device) + self.loaded - offer
        more = beyond_now(self.beyond, self.kept, self.needs)
        if self.session is not None:
            more = min(more, self.session.beyond)
        offer += int(more)
        return int(min(offer if offer >= self.total_aligned else rounded(offer), limit))

    def follow_room(self, limit: float) -> None:
        """Let the session raise its budget up to ``limit`` by memory that passes leave free.

        Called after every change of the budget. If a pass with casts or patches runs out of memory with ComfyUI's own
        offer, it runs again with less: the memory that they need beside prepared patches is an estimate.
        """
        assert self.session is not None and self.budget is not None
        offer = min(rounded(self.offer), self.budget)
        # Where `next_budget` tolerates the difference, a pass that cannot run again keeps the layout. One that can goes
        # back to the offer if it runs out of memory.
        base = self.budget if self.budget - offer <= tolerance(self.budget) else offer
        estimate = self.needs - self.patches.nbytes
        least = max(0, offer - max(estimate, offer // FALL)) if self.needs else offer
        if self.needs_more:
            self.session.expect_anew(more=True)
        self._met = self.needs
        self.session.follow_room(base, comfyui_api.kept_free(), limit, inputs, least)

    def follow(self) -> None:
        """Record a budget that the session changed itself since the last call.

        The session raises its budget by memory that passes left free, and lowers it again. Called between passes.
        """
        session, model = self.session, self.model
        if model is None or session is None or self.budget is None:
            return
        if self.suspended and not session.parked:
            self._came_back()
            model.model_loaded_weight_memory = self.loaded  # type: ignore[assignment]
            self.expected = (*self.expected[:1], self.loaded)
        if session.vram != self.budget and not self.suspended:
            if session.vram < min(self.budget, self.offer):
                self.lacked = max(self.lacked, self.offer - session.vram)
            self.budget = session.vram
            self._left_free(self.budget - self.offer)
            self._measure()
            model.model_loaded_weight_memory = self.loaded  # type: ignore[assignment]
            self.expected = (*self.expected[:1], self.loaded)

    def remember_room(self) -> None:
        """Remember the memory that the passes of a run left free, for the next layout of this model."""
        self.follow()
        session = self.session
        if session is not None and self.budget is not None and session.spare:
            self._left_free(self.budget + session.spare - self.offer)

    def _left_free(self, beyond: int) -> None:
        self.beyond = remember(self.beyond, Beyond(max(0, beyond), self.kept, self.needs))

    @property
    def taken(self) -> int:
        """Bytes held beyond ComfyUI's offer. A pass that needs them gets them back."""
        return max(0, self.held - self.offer) if self.streams else 0

    def asked_back(self, nbytes: int) -> None:
        """Stop exceeding ComfyUI's offer if ComfyUI requests ``nbytes`` of the device because of the additional bytes.

        This is the case where ComfyUI would not have made the request without the additional bytes, or would have
        requested so little that the budget would not rise again. Otherwise each such request would cost two layouts.
        """
        left = self.offer if self.left is None else min(self.offer, self.left)
        taken = 0 if self.budget is None else self.budget - left
        if taken > 0 and 0 < nbytes < taken + worth(self.streamed + taken):
            self.forget_room()

    def forget_room(self) -> None:
        """Forget all additional bytes, here and in the session, so that ComfyUI's own offer applies."""
        self.beyond = ()
        if self.session is not None:
            self.session.forget_room()


def inputs(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a diffusion model's forward without the entries that the forward does not read.

    Callbacks, ids and wrappers of other calls in ``transformer_options`` act outside the forward. All other entries
    stay, because other node packs may keep state in them.
    """
    options = kwargs.get("transformer_options")
    if not isinstance(options, dict):
        return args, kwargs
    read = {key: value for key, value in options.items() if key not in ("callbacks", "uuids", "wrappers")}
    read["wrappers"] = options.get("wrappers", {}).get("diffusion_model", {})
    return args, {**kwargs, "transformer_options": read}
