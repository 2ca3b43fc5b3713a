"""Under ComfyUI: the memory that LoRA and casts take comes off the budget, and no patch is left out where memory is short."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any

import pytest
import tests_comfy_stand_in as stand_in
import torch
from carom.core.streaming.pass_retry import OutOfMemory
from carom.nodes import patcher
from carom.nodes.node_settings import Beyond, Settings, beyond_now, remember
from carom.nodes.patch_memory import memory_needed
from carom.nodes.patcher import wear
from carom.nodes.streaming import streaming_of
from carom.nodes.watched_patches import watch, watching
from tests_comfy_layers import BLOCKS, LAYER, WIDTH, Model
from tests_comfy_stand_in import installed
from torch.overrides import wrap_torch_function

CPU = torch.device("cpu")
WEIGHT = WIDTH * WIDTH * 4
RANK = 2
FACTORS = 2 * RANK * WIDTH * 4  # bytes of one adapter
PREPARED = BLOCKS * 2 * 512  # bytes of all adapters on the device, in the allocator's grains


cards: list[Card] = []  # of the running test


class Adapter:
    """An adapter as ComfyUI's: it catches every exception, and leaves the weight as it is then."""

    def __init__(self, card: Card, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = (
            torch.randn(WIDTH, RANK, generator=generator),
            torch.randn(RANK, WIDTH, generator=generator),
        )
        self.card = card

    def calculate_weight(self, weight: torch.Tensor) -> torch.Tensor:
        up, down = self.weights
        try:
            weight += allocated(up @ down, self.card)
        except Exception as error:
            logging.getLogger().error("ERROR lora %s", error)
        return weight


class Card:
    """An imagined card. ``most``: the bytes of weights beside which there is memory for a patch; ``holds_all``: whether
    there is memory for it beside a whole model.
    """

    def __init__(self, most: float = float("inf"), **settings: Any) -> None:
        self.most, self.failed, self.holds_all = most, 0, True
        patcher_class = sys.modules["comfy.model_patcher"].ModelPatcher
        self.patcher = wear(
            patcher_class(Model(), CPU, CPU), Settings(**{"mode": "stream", "codec": "raw", **settings})
        )
        self.carom = streaming_of(self.patcher.model)
        cards.append(self)

    def with_lora(self) -> Any:
        patched = self.patcher.clone()
        names = [f"diffusion_model.{number}.weight" for number in range(BLOCKS)]
        patched.add_patches({name: Adapter(self, seed) for seed, name in enumerate(names)})
        return patched

    def run(self, patcher: Any, offer: float) -> torch.Tensor:
        """Run a prompt of three passes, with an ``offer`` of ComfyUI for weights."""
        x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
        with torch.inference_mode():
            patcher.partially_load(CPU, offer - patcher.loaded_size())
            patcher.pre_run()
            for _ in range(3):
                y = patcher.model.diffusion_model(x)
            patcher.cleanup()
        return y.clone()


@wrap_torch_function(lambda tensor, card: (tensor,))
def allocated(tensor: torch.Tensor, card: Card) -> torch.Tensor:
    """Stands for an operator that allocates device memory."""
    session = card.carom.session
    if not card.holds_all if session is None else session.vram > card.most:
        card.failed += 1
        raise OutOfMemory("as if")
    return tensor


@pytest.fixture(autouse=True)
def comfy(tmp_path, monkeypatch):
    def patched(patches: list, weight: torch.Tensor) -> torch.Tensor:
        for _, adapter, *_ in patches:
            weight = adapter.calculate_weight(weight)
        return weight

    monkeypatch.setattr(stand_in, "_patched", patched)
    with installed(tmp_path) as state:
        yield state.management
        while cards:
            cards.pop().carom.close()


def expected() -> torch.Tensor:
    """Return the result of ComfyUI alone with the LoRA."""
    card = Card()
    patched = card.with_lora()
    patched.__class__ = type(patched).__mro__[2]
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    with torch.inference_mode():
        patched.partially_load(CPU, 1)
        return patched.model.diffusion_model(x).clone()


def test_an_out_of_memory_that_an_adapter_catches_leads_to_a_pass_with_less():
    card = Card(most=6 * LAYER)
    plain = card.run(card.patcher, 9 * LAYER)
    assert card.carom.held > 7 * LAYER
    patched = card.with_lora()
    card.patcher.detach(unpatch_all=False)
    needs = memory_of(card)
    found = card.run(patched, 9 * LAYER + needs)  # the estimate is too small
    assert card.failed == 1 and torch.equal(found, expected()) and not torch.equal(found, plain)
    assert card.carom.held <= card.most
    for _ in range(2):  # the next prompts know
        assert torch.equal(card.run(patched, 9 * LAYER + needs), expected())
    assert card.failed == 1


def memory_of(card: Card) -> int:
    return WEIGHT + 2 * WEIGHT + FACTORS + PREPARED


def test_an_out_of_memory_that_less_does_not_help_is_raised():
    card = Card(most=0)
    patched = card.with_lora()
    with pytest.raises(OutOfMemory):
        card.run(patched, 9 * LAYER)
    assert card.failed == 2
    card.most = float("inf")
    assert torch.equal(card.run(patched, 9 * LAYER), expected())


def test_a_model_whose_lora_cannot_be_merged_beside_it_streams():
    card = Card(mode="auto")
    plain = card.run(card.patcher, 1e32)
    assert card.carom.session is None
    card.holds_all = False
    patched = card.with_lora()
    card.patcher.detach(unpatch_all=False)
    assert torch.equal(card.run(patched, 1e32), expected()) and card.carom.streams
    patched.detach(unpatch_all=False)
    assert torch.equal(card.run(card.patcher, 1e32), plain) and card.carom.session is None


def test_what_a_lora_needs_comes_off_the_offer():
    card = Card()
    card.run(card.patcher, 8 * LAYER)
    assert card.carom.needs == 0 and 7 * LAYER < card.carom.held <= 8 * LAYER
    patched = card.with_lora()
    card.patcher.detach(unpatch_all=False)
    card.run(patched, 8 * LAYER)
    assert card.carom.needs == memory_of(card) and card.carom.held <= 8 * LAYER - card.carom.needs
    held = card.carom.held
    patched.detach(unpatch_all=False)
    card.run(card.patcher, 8 * LAYER)  # no layout for less than what is worth one
    assert card.carom.needs == 0 and card.carom.held == held


def test_a_need_within_what_offers_may_differ_by_comes_off_too(monkeypatch):
    monkeypatch.setattr(patcher, "memory_needed", lambda one: LAYER // 2 if one.patches else 0)
    card = Card()
    card.run(card.patcher, 9 * LAYER)
    held = card.carom.held
    card.run(card.patcher, held - LAYER // 2)
    assert card.carom.held == held
    patched = card.with_lora()
    card.patcher.detach(unpatch_all=False)
    card.run(patched, held)
    assert card.carom.held <= held - LAYER // 2


def test_a_limit_of_the_user_below_the_offer_stays_the_budget():
    card = Card(vram=str(5 * LAYER))
    card.run(card.with_lora(), 10 * LAYER)
    assert card.carom.needs and 4 * LAYER < card.carom.held <= 5 * LAYER


def test_comfyuis_own_reserve_counts_where_weights_are_patched():
    card = Card()
    card.patcher.model.model_offload_buffer_memory = 7 * WEIGHT
    card.patcher.model.model_loaded_weight_memory = WEIGHT // 2  # patches that ComfyUI moved to the device
    assert memory_needed(card.patcher) == 0
    assert memory_needed(card.with_lora()) == 7 * WEIGHT + WEIGHT // 2


def test_a_cast_needs_its_result_and_a_patch_of_a_cast_weight_more():
    card = Card()
    card.patcher.model.manual_cast_dtype = torch.float64
    assert memory_needed(card.patcher) == 2 * LAYER
    factors = 2 * RANK * WIDTH * 8
    assert memory_needed(card.with_lora()) == WEIGHT + 3 * 2 * WEIGHT + factors + 2 * WIDTH * 4


def test_room_that_passes_without_a_lora_left_is_not_for_passes_with_one():
    seen = remember(remember((), Beyond(300, 1000)), Beyond(100, 1010, 50))
    assert len(seen) == 2
    assert [beyond_now(seen, 1010, needs) for needs in (0, 50, 51)] == [300, 100, 0]
    card = Card()
    card.run(card.patcher, 6 * LAYER)
    session = card.carom.session
    told: list[bool] = []
    own = session.expect_anew
    session.expect_anew = lambda more=False: (told.append(more), own(more))[1]
    card.carom._left_free(5 * LAYER)
    patched = card.with_lora()
    card.patcher.detach(unpatch_all=False)
    card.run(patched, 6 * LAYER)
    assert card.carom.held <= 6 * LAYER and True in told
    told.clear()
    card.run(patched, 6 * LAYER)
    assert True not in told


def test_an_out_of_memory_is_raised_only_where_a_watched_object_caught_it():
    class Merge:
        def __init__(self, error: type) -> None:
            self.error = error

        def run(self) -> str:
            try:
                raise self.error("as if")
            except Exception as error:
                logging.error("ERROR lora %s", error)
            return "caught"

    short, other = Merge(OutOfMemory), Merge(ValueError)
    with watching(short), watching(other):
        with pytest.raises(OutOfMemory):
            short.run()
        assert other.run() == Merge(OutOfMemory).run() == "caught"
    assert short.run() == "caught"


def test_no_filter_of_the_log_stays_after_the_last_watched_object():
    class Patch:
        pass

    def filters() -> list:
        return [found for found in logging.getLogger().filters if "carom" in found.__module__]

    gc.collect()  # models of other tests
    assert not filters()
    unwatched, freed = Patch(), Patch()
    undo = watch(unwatched)
    watch(freed)
    with watching(Patch()):
        assert len(filters()) == 1
    undo()
    assert len(filters()) == 1
    del freed
    assert not filters()
