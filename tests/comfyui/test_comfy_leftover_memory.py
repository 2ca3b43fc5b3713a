"""Under ComfyUI: what passes left free is there for the next layout, within what the user and ComfyUI allow."""

from __future__ import annotations

import sys
import time
from typing import Any

import carom
import pytest
import torch
from carom.core.budget import budget_raise as core_room
from carom.core.budget.budget_raise import READINGS
from carom.core.budget.device_governor import Left
from carom.core.host.arena import HostArena
from carom.core.session import carving_cache
from carom.core.session.policies import raise_budget
from carom.core.streaming.pass_retry import OutOfMemory, repeats
from carom.nodes import leftover_memory, node_settings, opening
from carom.nodes.node_settings import Beyond, Settings, beyond_now, remember
from carom.nodes.patcher import wear
from carom.nodes.streaming import streaming_of
from tests_comfy_stand_in import installed
from tests_inside import inside
from tests_limits import units_apart_from
from tests_uneven import Block
from tests_watch import watch_changes
from torch import nn

CPU = torch.device("cpu")
WIDTH, DEPTH = 48, 12
LAYER = 14 * WIDTH * WIDTH * 4
NEEDED = LAYER  # by a pass
LEFT = LAYER // 2  # free for others


class Blocks(nn.Sequential):
    def forward(self, x, transformer_options=None):
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.diffusion_model = Blocks(*(Block(WIDTH) for _ in range(DEPTH))).requires_grad_(False)


class Card:
    """An imagined card that ComfyUI sees as Carom does: it offers four layers, passes leave three more.

    After `READINGS` passes it is known what they leave, and the pass after them takes it.
    """

    def __init__(
        self, monkeypatch: Any, management: Any, vram: str = "auto", granularity: str = "block"
    ) -> None:
        self.device = carom.SimulatedDevice(
            memory_bytes=LEFT + NEEDED + 7 * LAYER, activation_bytes=NEEDED, timing="early"
        )
        monkeypatch.setattr(
            core_room, "LEAVES", Left(0.03, LEFT, LEFT)
        )  # as large beside the model as a real card's
        make = opening.stream
        monkeypatch.setattr(
            opening,
            "stream",
            lambda *a, **k: make(*a, **{**k, "device": self.device, "granularity": granularity}),
        )
        monkeypatch.setattr(node_settings, "GROW_LEAST", LAYER)
        self.kept = self.free - 4 * LAYER
        monkeypatch.setattr(management, "get_free_memory", lambda device: self.free)
        patcher_class = sys.modules["comfy.model_patcher"].ModelPatcher
        self.patcher = wear(patcher_class(Model(), CPU, CPU), Settings(mode="stream", vram=vram, codec="raw"))
        self.carom = streaming_of(self.patcher.model)

    @property
    def free(self) -> int:
        ledger = self.device.ledger
        return self.device.memory_bytes - ledger.allocated - ledger.others

    def run(self, passes: int = 6, kept: int | None = None, **given: Any) -> torch.Tensor:
        """A prompt; every pass is ``given`` more."""
        patcher, x = self.patcher, torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
        with torch.inference_mode():
            patcher.partially_load(CPU, self.free - (self.kept if kept is None else kept))
            patcher.pre_run()
            for _ in range(passes):
                y = patcher.model.diffusion_model(x, **given)
            patcher.cleanup()
        return y.clone()


@pytest.fixture
def comfy(tmp_path, monkeypatch):
    # What ComfyUI keeps free on Windows is more than the imagined card has.
    monkeypatch.setattr("carom.nodes.comfyui_api.on_windows", lambda: False)
    with installed(tmp_path) as state:
        yield state.management


def with_room_taken(monkeypatch: Any, management: Any) -> tuple[Card, int]:
    """A card whose second layout took what passes had left, and the budget before."""
    card = Card(monkeypatch, management)
    card.run(READINGS)
    first = card.carom.budget
    card.patcher.partially_unload(CPU, 3 * LAYER)
    card.run()
    assert card.carom.budget > first
    return card, first


def test_the_next_layout_takes_what_passes_left_free(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    expected = card.run(READINGS)
    first = card.carom.budget
    spare = card.carom.session.spare
    assert first <= 4 * LAYER and 2 * LAYER <= spare <= 3 * LAYER
    card.patcher.partially_unload(CPU, 3 * LAYER)  # for a VAE, say
    assert torch.equal(card.run(), expected)
    assert first + spare // 2 < card.carom.budget <= first + spare
    assert card.patcher.loaded_size() == card.carom.held <= card.carom.budget
    assert card.device.memory_bytes - card.device.ledger.allocated - NEEDED >= LEFT


@pytest.mark.parametrize(("name", "taken"), [("callbacks", True), ("patches", False)])
def test_room_is_taken_where_what_comfyui_hands_to_passes_has_no_state_that_they_read(
    comfy, monkeypatch, name, taken
):
    card = Card(monkeypatch, comfy)
    options = {name: {"attn1_patch": object()}}
    card.run(READINGS, transformer_options=options)
    first = card.carom.budget
    card.patcher.partially_unload(CPU, 3 * LAYER)
    card.run(transformer_options=options)
    assert (card.carom.budget > first) == taken


def test_a_prompt_takes_what_its_first_passes_left_free(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    expected = card.run(READINGS)
    first, spare = card.carom.budget, card.carom.session.spare
    assert torch.equal(card.run(1), expected)
    assert first + spare // 2 < card.carom.budget <= first + spare
    assert card.patcher.loaded_size() == card.carom.held <= card.carom.budget


def test_passes_that_comfyui_expects_more_of_get_what_it_keeps(comfy, monkeypatch):
    card, first = with_room_taken(monkeypatch, comfy)
    card.run(1, kept=int(1.5 * card.kept))
    assert card.carom.budget <= first


def test_the_users_limit_holds(comfy, monkeypatch):
    card = Card(monkeypatch, comfy, vram=str(3 * LAYER))
    for _ in range(3):
        card.run()
        assert card.carom.budget <= 3 * LAYER
        card.patcher.partially_unload(CPU, LAYER)


def test_what_the_user_told_comfyui_to_leave_free_is_left(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    monkeypatch.setattr(comfy.args, "reserve_vram", 0.4)
    card.run()
    assert inside(card.carom.session).raise_budget.room.keep == 400 << 20 and not card.carom.session.spare


def test_what_is_asked_back_because_it_was_taken_is_not_taken_again(comfy, monkeypatch):
    card, first = with_room_taken(monkeypatch, comfy)
    card.patcher.partially_unload(CPU, LAYER // 2)  # which would have been free without
    for _ in range(3):
        card.run()
        assert card.carom.budget <= max(first, card.carom.held)
        card.patcher.partially_unload(CPU, 3 * LAYER)
    assert not card.carom.beyond


def test_room_that_is_not_there_after_all_is_done_without(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    expected = card.run()
    first = card.carom.budget
    card.patcher.partially_unload(CPU, 3 * LAYER)
    change = carom.Session.set_budget

    def fails_with_more(self, vram=None, ram=None):
        if vram > first:
            raise OutOfMemory("as if")
        change(self, vram, ram)

    monkeypatch.setattr(carom.Session, "set_budget", fails_with_more)
    assert torch.equal(card.run(), expected)
    assert card.carom.budget <= first and not card.carom.beyond


def test_a_budget_that_a_session_raised_itself_is_known_to_comfyui(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    card.run(READINGS)
    first, session = card.carom.budget, card.carom.session
    grown = first + session.spare
    with torch.inference_mode(False):
        session.set_budget(vram=grown)
    card.run(passes=2)
    assert card.carom.budget == grown and card.patcher.loaded_size() == card.carom.held > first - LAYER
    assert card.carom.beyond[-1].nbytes >= grown - first
    card.patcher.detach()
    card.run()
    assert card.carom.budget > first, "it is remembered while others have the device"


def test_beyond_is_for_passes_of_the_sizes_seen():
    seen = remember(remember((), Beyond(300, 1000)), Beyond(150, 2000))
    assert [beyond_now(seen, kept) for kept in (1000, 1040, 2000, 2200)] == [300, 300, 150, 0]
    assert beyond_now(remember(seen, Beyond(70, 1020)), 1020) == 70, "the latest of a size"
    assert beyond_now((), 0) == 0
    assert beyond_now(seen, 900) == 200 and beyond_now(seen, 1900) == 50, (
        "the same budget: more of it is offered"
    )
    assert not beyond_now(seen, 500) and not beyond_now(seen, 1100), "the offer is more than that"
    for kept in range(3000, 30000, 1000):
        seen = remember(seen, Beyond(1, kept))
    assert len(seen) == node_settings.SIZES_SEEN


def test_what_runs_outside_of_a_models_forward_is_none_of_its_inputs():
    def patch():
        pass

    x = torch.ones(1)
    options = {
        "sigmas": x,
        "uuids": [object()],
        "callbacks": {"on_load_after": {None: [patch]}},
        "cond_or_uncond": [0, 1],
    }
    outside = {**options, "wrappers": {"outer_sample": {None: [patch]}}, "patches": {}}
    assert repeats(leftover_memory.inputs((x,), {"context": x, "transformer_options": outside}))
    for given in ({"wrappers": {"diffusion_model": {None: [patch]}}}, {"patches": {"attn1_patch": [patch]}}):
        assert not repeats(leftover_memory.inputs((x,), {"transformer_options": {**options, **given}}))
    assert repeats(leftover_memory.inputs((x, None), {"control": {"output": [x]}, "y": None}))


def test_comfyui_batches_passes_as_if_no_room_were_taken(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    card.run(READINGS)
    before = card.patcher.get_free_memory(CPU)
    assert before == card.free
    card.patcher.partially_unload(CPU, 3 * LAYER)
    card.run()
    assert card.free < before - LAYER, "more is taken"
    assert before - LAYER // 2 <= card.patcher.get_free_memory(CPU) <= before + LAYER


def test_room_is_counted_from_what_comfyui_offers_not_from_a_budget_below_it(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    monkeypatch.setattr(node_settings, "GROW_LEAST", 1 << 40)  # no offer is worth a layout
    card.run(READINGS)
    left = card.carom.budget + card.carom.session.spare
    card.run(kept=card.kept - LAYER)
    assert card.carom.offer + beyond_now(card.carom.beyond, card.carom.kept) <= left + LAYER // 4


def test_an_offer_below_what_works_is_no_budget_to_go_back_to(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    expected = card.run()
    card.patcher.detach()
    monkeypatch.setattr(leftover_memory, "inputs", lambda args, kwargs: ((*args, object()), kwargs))
    for _ in range(3):
        assert torch.equal(card.run(kept=card.free - LAYER // 4), expected)
        card.patcher.partially_unload(CPU, LAYER // 4)
        assert torch.equal(
            card.patcher.model.diffusion_model(torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)), expected
        )


def test_what_a_partial_unload_left_is_what_a_pass_goes_back_to(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    card.run(READINGS)
    card.patcher.partially_unload(CPU, LAYER)
    assert inside(card.carom.session).raise_budget.base == card.carom.session.vram


def test_an_image_made_twice_the_second_time_larger_costs_no_layout_each_time(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    laid_out = watch_changes(monkeypatch)
    for turn in range(8):
        if turn == 4:
            laid_out.clear()
        for kept, needed in ((card.kept, NEEDED), (card.kept + LAYER // 2, int(1.3 * NEEDED))):
            if card.carom.session is not None:
                inside(card.carom.session).engine.activations = needed
            card.run(kept=kept)
    assert card.carom.budget > card.free - card.kept + card.carom.held and not laid_out


def test_what_is_asked_back_because_it_was_taken_and_a_little_more_is_not_taken_again(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    card.run()
    wanted = card.free + LAYER // 2  # by a VAE, say: the budget would not rise again after that
    laid_out = watch_changes(monkeypatch)
    for turn in range(8):
        if turn == 4:
            laid_out.clear()
        card.run()
        if wanted > card.free:
            card.patcher.partially_unload(CPU, wanted - card.free)
    assert not laid_out


def test_a_little_that_is_asked_back_after_each_prompt_is_not_taken_for_ever(comfy, monkeypatch):
    """Where the budget is below ComfyUI's offer, what the session takes is counted from there."""
    card = Card(monkeypatch, comfy, granularity="layer")
    card.device.ledger.others += 3 * LAYER  # passes leave nothing beyond ComfyUI's offer
    card.kept -= 3 * LAYER
    laid_out = watch_changes(monkeypatch)
    counts = []
    for _ in range(6):
        laid_out.clear()
        card.run(8)
        card.patcher.partially_unload(CPU, int(0.3 * LAYER))  # by a VAE, say
        counts.append(len(laid_out))
    assert sum(counts[3:]) <= 4, "one for each request, and not one more each time to take it again"


def residents(card: Card) -> frozenset[str]:
    return inside(card.carom.session).resident_names


@pytest.mark.parametrize("difference", [-0.4, 0.4])
def test_a_suspended_model_returns_to_the_layout_that_it_had_where_the_offer_differs_by_little(
    comfy, monkeypatch, difference
):
    card = Card(monkeypatch, comfy)
    expected = card.run(READINGS)
    budget, before = card.carom.budget, residents(card)
    card.carom.forget_room()
    divided: list[object] = []
    carve = carving_cache.carve
    monkeypatch.setattr(carving_cache, "carve", lambda *a, **k: (divided.append(1), carve(*a, **k))[1])
    for _ in range(3):
        divided.clear()
        card.patcher.detach()
        assert torch.equal(card.run(kept=card.kept - int(difference * LAYER)), expected)
        card.carom.forget_room()
        assert card.carom.budget == budget and residents(card) == before
    assert not divided


def test_a_pass_that_cannot_run_again_leaves_a_layout_whose_offer_fell_by_little(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    expected = card.run(READINGS)
    card.carom.forget_room()
    budget, before = card.carom.budget, residents(card)
    monkeypatch.setattr(raise_budget, "repeats", lambda *_: False)
    card.patcher.detach()
    assert torch.equal(card.run(kept=card.kept + int(0.4 * LAYER)), expected)
    assert card.carom.budget == budget and residents(card) == before


def test_a_suspended_model_whose_budget_grows_keeps_all_residents_that_it_had(comfy, monkeypatch):
    card = Card(monkeypatch, comfy)
    expected = card.run(READINGS)
    budget, before = card.carom.budget, residents(card)
    for _ in range(2):
        card.patcher.detach()
        assert torch.equal(card.run(), expected)
        assert residents(card) >= before
    assert card.carom.budget >= budget + LAYER and len(residents(card)) > len(before)


def test_the_memory_into_which_a_model_makes_way_is_pinned_while_it_samples(comfy, monkeypatch):
    units_apart_from(monkeypatch)
    card = Card(monkeypatch, comfy)
    expected = card.run(READINGS)
    spares = inside(card.carom.session).manager.host.spares
    while spares.busy:
        time.sleep(0.001)
    pinned: list[object] = []
    pin = HostArena.pin
    monkeypatch.setattr(HostArena, "pin", lambda *a: (pinned.append(1), pin(*a))[1])
    card.patcher.detach()
    assert card.carom.suspended and not pinned
    assert torch.equal(card.run(), expected)
