"""Room: what a model's passes leave of the memory that ComfyUI kept for them. A mixin of `Streaming`.

ComfyUI offers a budget for weights before it has seen a pass: it estimates what passes need, and adds reserves. Once passes
have run, what they left free is known (`core/session/policies/leftover.py` sees it). It is remembered by how much ComfyUI kept, which
grows with the passes' size, and goes to the next layout of this model, also after others had the device meanwhile. Where
room is asked back, or turns out not to be there, ComfyUI's own budget holds again. The rules are in `policy.py`.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ..core.session.session import Session
from . import comfyui_api
from .node_settings import Beyond, beyond_now, remember, rounded, worth


class TakesRoom:
    """The budget of a `Streaming` (which see for the other fields)."""

    session: Session | None
    suspended: bool
    budget: int | None
    held: int
    streamed: int
    expected: tuple
    _model: weakref.ref[nn.Module]
    offer = kept = 0  # bytes that ComfyUI last offered, and kept for all else
    beyond: tuple[Beyond, ...] = ()  # by what ComfyUI kept

    @property
    def streams(self) -> bool:
        raise NotImplementedError

    def _measure(self) -> None:
        raise NotImplementedError

    def bound(self, offer: int, device: torch.device, limit: float) -> int:
        """The budget for an ``offer`` of ComfyUI: with what earlier passes of this size left free, within ``limit``."""
        self.follow()
        self.offer, self.kept = offer, comfyui_api.free_bytes(device) + self.held - offer
        more = beyond_now(self.beyond, self.kept)
        if self.session is not None:
            more = min(more, self.session.beyond)
        return int(min(rounded(offer + int(more)), limit))

    def follow_room(self, limit: float) -> None:
        """After every change of the budget: let the session see what passes leave."""
        assert self.session is not None
        self.session.follow_room(rounded(self.offer), comfyui_api.kept_free(), limit, inputs)

    def follow(self) -> None:
        """Between passes: the session may have taken room that they left, or given it up."""
        session, model = self.session, self._model()
        if model is None or session is None or self.budget is None:
            return
        if session.vram != self.budget and not self.suspended:
            self.budget = session.vram
            self._left_free(self.budget - self.offer)
            self._measure()
            model.model_loaded_weight_memory = self.held  # type: ignore[assignment]
            self.expected = (*self.expected[:1], self.held)

    def remember_room(self) -> None:
        """After a run: what its passes left free is there for the next layout of this model."""
        self.follow()
        session = self.session
        if session is not None and self.budget is not None and session.spare:
            self._left_free(self.budget + session.spare - self.offer)

    def _left_free(self, beyond: int) -> None:
        self.beyond = remember(self.beyond, Beyond(max(0, beyond), self.kept))

    @property
    def taken(self) -> int:
        """Bytes held beyond ComfyUI's offer, to be given back where a pass needs them."""
        return max(0, self.held - self.offer) if self.streams else 0

    def asked_back(self, nbytes: int) -> None:
        """ComfyUI wants ``nbytes`` of the device. If without what was taken beyond its offer it would not have, or so
        little that the budget would not rise again, that costs a layout each way every time: no more of it."""
        taken = 0 if self.budget is None else self.budget - self.offer
        if taken > 0 and 0 < nbytes < taken + worth(self.streamed + taken):
            self.forget_room()

    def forget_room(self) -> None:
        """There is none, whatever passes seemed to leave."""
        self.beyond = ()
        if self.session is not None:
            self.session.forget_room()


def inputs(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """What the forward of a diffusion model reads of its arguments: callbacks, and wrappers around calls of others, run
    outside of it; what others put into ``transformer_options`` beside those may have a state of its own."""
    options = kwargs.get("transformer_options")
    if not isinstance(options, dict):
        return args, kwargs
    read = {key: value for key, value in options.items() if key not in ("callbacks", "uuids", "wrappers")}
    read["wrappers"] = options.get("wrappers", {}).get("diffusion_model", {})
    return args, {**kwargs, "transformer_options": read}
