"""Carving: every streamable tensor in exactly one unit, blocks found by structure, reasons for what stays."""

from __future__ import annotations

import pytest
import tests_models as models
import torch
from carom.core.common.errors import UnsupportedError
from carom.core.model.units import SMALL_BUFFER, carve, collect, why_not_streamed
from carom.core.plan.region import ALIGN
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_pairwise import pairwise
from torch import nn


def covers_exactly_once(model: nn.Module, **settings) -> None:
    carving = carve(model, **settings)
    placed = [entry for unit in carving.units for entry in unit.entries]
    placed += [entry for entry, _ in carving.resident] + carving.adapters
    every = {id(t) for t in (*model.parameters(), *model.buffers())}
    assert sorted(id(entry.tensor) for entry in placed) == sorted(every)
    for unit in carving.units:
        assert unit.entries and (unit.modules or unit.kind == "loose")
        end = 0
        for entry in unit.entries:
            assert entry.offset % ALIGN == 0 and entry.offset >= end, "entries of a unit overlap"
            end = entry.offset + entry.nbytes
        assert end <= unit.nbytes
        assert unit.raw_bytes == sum(entry.nbytes for entry in unit.entries)
        if unit.modules:  # whoever owns a weight of the unit lies below a module whose run brings it in
            below = {id(m) for module in unit.modules for m in module.modules()}
            assert all(id(site.module) in below for entry in unit.entries for site in entry.sites)
    names = [unit.name for unit in carving.units]
    assert len(set(names)) == len(names)


@pairwise(
    name=list(models.CASES),
    granularity=["auto", "block", "phase", "layer"],
    limit={"None": None, "6000": 6000, "1": 1},
    trainable=["none", "vectors", "all", "all streamed"],
)
def test_every_tensor_is_placed_exactly_once(name, granularity, limit, trainable):
    model = models.CASES[name].build()
    if trainable == "none":
        model.requires_grad_(False)
    elif trainable == "vectors":
        models.freeze(model)
    stream = trainable == "all streamed"
    covers_exactly_once(model, granularity=granularity, limit=limit, stream_trainable=stream)


modules = st.recursive(
    st.builds(
        lambda i, o, bias: nn.Linear(i, o, bias=bias), st.integers(1, 9), st.integers(1, 9), st.booleans()
    )
    | st.builds(nn.LayerNorm, st.integers(1, 9))
    | st.builds(nn.Identity)
    | st.builds(nn.BatchNorm1d, st.integers(1, 5)),
    lambda inner: (
        st.lists(inner, min_size=0, max_size=5).map(lambda found: nn.Sequential(*found))
        | st.lists(inner, min_size=1, max_size=5).map(nn.ModuleList)
        | st.dictionaries(st.sampled_from(["a", "b", "layer1", "layer2", "7"]), inner, max_size=4).map(
            nn.ModuleDict
        )
    ),
    max_leaves=24,
)


@settings(deadline=None, max_examples=80)
@given(
    modules,
    st.sampled_from(["auto", "block", "phase", "layer"]),
    st.integers(1, 2000),
    st.booleans(),
    st.data(),
)
def test_any_tree_is_placed_exactly_once(model, granularity, limit, stream, data):
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.requires_grad_(data.draw(st.booleans()))
    owners = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if len(owners) > 1 and data.draw(st.booleans()):  # tie two weights, wherever they are
        owners[-1].weight = owners[0].weight
    covers_exactly_once(model, granularity=granularity, limit=limit, stream_trainable=stream)


def names_of(model: nn.Module, kind: str, **settings) -> list[str]:
    return [unit.name for unit in carve(model.requires_grad_(False), **settings).units if unit.kind == kind]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("stack", [f"blocks.{i}" for i in range(6)]),
        (
            "heterogeneous",
            [f"double_blocks.{i}" for i in range(3)] + [f"single_blocks.{i}" for i in range(4)],
        ),
        ("attention", [f"layers.{i}" for i in range(4)]),
        (
            "experts",
            [f"routers.{i}" for i in range(3)] + [f"experts.{i}.{j}" for i in range(3) for j in range(3)],
        ),
    ],
)
def test_blocks_are_found_by_structure(name, blocks):
    assert names_of(models.CASES[name].build(), "block") == blocks


def test_numbered_attributes_and_lists_in_dicts_are_blocks():
    found = set(names_of(models.CASES["nested"].build(), "block"))
    assert {"down1", "down2", "down3", "tail.0", "tail.2"} <= found
    assert any(name.startswith("stages.0.b") for name in found)


def test_a_root_that_is_a_list_of_blocks_and_one_that_is_a_single_layer():
    assert names_of(nn.Sequential(models.Block(), models.Block()), "block") == ["0", "1"]
    assert [unit.kind for unit in carve(nn.Linear(3, 3).requires_grad_(False)).units] == ["stem"]


def test_a_list_has_no_run_of_its_own_so_its_parts_bring_the_unit_in():
    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            self.refiner = nn.ModuleList([models.Block()])
            self.out = nn.ModuleList([nn.Linear(8, 8), nn.Dropout(0.0)])
            self.named = nn.ModuleDict({"only": nn.ModuleList([nn.Linear(8, 8)])})

    model = Projection().requires_grad_(False)
    entered = {unit.name: unit.modules for unit in carve(model).units}
    assert entered == {
        "refiner": [model.refiner[0]], "out": [model.out[0]], "named": [model.named["only"][0]],
    }  # fmt: skip


def test_what_is_too_large_is_split_until_it_fits():
    model = models.CASES["stack"].build().requires_grad_(False)
    whole = carve(model, limit=None).largest
    phases, layers = carve(model, limit=whole - 1), carve(model, granularity="layer")
    assert phases.largest < whole and layers.largest <= phases.largest
    assert {unit.kind for unit in phases.units} >= {"phase"}
    assert carve(model, granularity="block", limit=1).largest == whole, "blocks were asked for"


def test_weights_of_a_module_that_stands_in_two_places_are_one_unit():
    layer = nn.Linear(8, 8)
    model = nn.ModuleDict(
        {"a": nn.Sequential(layer, nn.Linear(8, 8)), "b": nn.Sequential(layer, nn.Linear(8, 8))}
    )
    units = carve(model.requires_grad_(False), granularity="layer").units
    assert ["a.0.weight", "a.0.bias"] in [[entry.name for entry in unit.entries] for unit in units]
    assert [unit.modules for unit in units].count([layer]) == 1


def test_tied_weights_are_one_unit_entered_by_both_owners():
    model = models.CASES["tied"].build().requires_grad_(False)
    (unit,) = [u for u in carve(model).units if any(e.tensor is model.embed.weight for e in u.entries)]
    assert set(map(id, unit.modules)) == {id(model.embed), id(model.head)}


def test_units_come_in_registration_order():
    model = models.CASES["heterogeneous"].build().requires_grad_(False)
    order = {id(entry.tensor): i for i, entry in enumerate(collect(model))}
    firsts = [order[id(unit.entries[0].tensor)] for unit in carve(model).units]
    assert firsts == sorted(firsts)


def reason_of(tensor: torch.Tensor, buffer: bool = False) -> str | None:
    module = nn.Module()
    if buffer:
        module.register_buffer("t", tensor)
    else:
        module.register_parameter("t", nn.Parameter(tensor, requires_grad=False))
    return why_not_streamed(collect(module)[0])


def test_what_cannot_be_streamed_says_why():
    from torch.testing._internal.two_tensor import TwoTensor

    assert "TwoTensor" in (reason_of(TwoTensor(torch.ones(3), torch.ones(3))) or "")
    assert reason_of(torch.zeros(0)) == "empty"
    assert "overlap" in (reason_of(torch.zeros(4, 1).expand(4, 4)) or "")
    assert "gaps" in (reason_of(torch.zeros(4, 8)[:, ::2]) or "")
    assert "layout" in (reason_of(torch.eye(3).to_sparse()) or "")
    assert "small buffer" in (reason_of(torch.zeros(3), buffer=True) or "")
    assert "small buffer" in (reason_of(torch.zeros(SMALL_BUFFER // 4 - 1), buffer=True) or "")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 8),
        torch.zeros(4, 8).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, 3, dtype=torch.complex64),
        torch.zeros(7, dtype=torch.int8),
        torch.zeros(10)[2:6],
        torch.zeros(()),
        torch.zeros(4, 1, 3),
        torch.zeros(4, 8).permute(1, 0).unsqueeze(0),
    ],
)
def test_dense_tensors_of_any_layout_stream(tensor):
    assert reason_of(tensor) is None


def test_meta_and_inference_tensors_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="weight is on the meta device"):
        carve(nn.Linear(2, 2, device="meta"))
    with torch.inference_mode():
        made = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="weight was made under"):
        carve(made)
