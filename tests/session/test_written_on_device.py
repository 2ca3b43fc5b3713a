"""Weights that stream, given values made on the device between steps (a merge, a state dict that lies there): kept, not lost."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.model import managed_tensor
from tests_inside import inside
from tests_limits import pack_small_weights
from torch import nn

THERE = torch.device("cuda", 0)
X = torch.linspace(-1, 1, 256).reshape(2, 128)


class Elsewhere:
    """A value on the device, as far as anybody asks it."""

    def __init__(self, value):
        self._value = value
        self.device, self.shape, self.dtype, self.is_meta = THERE, value.shape, value.dtype, False

    def cpu(self):
        return self._value

    def __getattr__(self, name):
        return getattr(self._value, name)


@pytest.fixture(params=["raw", "lossless"])
def streamed(request, monkeypatch):
    """A model that streams, its session, and a way to take every operator's other arguments for the device's."""
    pack_small_weights(monkeypatch, 1024, ratio=None)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))).requires_grad_(False)
    with carom.stream(model, device="cpu", vram=250_000, granularity="layer", codec=request.param) as session:
        model(X)
        assert session.report().streamed_bytes and bool(session.report().packed_units) == (
            request.param == "lossless"
        )
        yield model, session


def last(session):
    """An owner whose weight streams, and is in a slot now."""
    there = {slot.unit for slot in inside(session).slots}
    unit = next(unit for unit in reversed(inside(session).streamer.units) if unit.name in there)
    return next(owner for owner in unit.homes if owner.entry.name.endswith("weight"))


def test_operators_that_write_between_steps_write_where_the_weight_lives(streamed, monkeypatch):
    model, session = streamed
    owner = last(session)
    before = session.read(owner.entry.name).clone()
    monkeypatch.setattr(managed_tensor, "on_device", lambda streamer, leaves: True)
    owner.tensor.add_(torch.ones(128))
    session.refresh()
    assert torch.equal(session.read(owner.entry.name), before + 1)
    owner.tensor.copy_(before * 2)
    session.refresh()
    assert torch.equal(session.read(owner.entry.name), before * 2)


def test_a_state_dict_that_lies_on_the_device_is_loaded(streamed, monkeypatch):
    model, session = streamed
    new = {name: value.clone() + 0.5 for name, value in model.state_dict().items()}
    monkeypatch.setattr(managed_tensor, "on_device", lambda streamer, leaves: True)
    model.load_state_dict(new)
    session.refresh()
    monkeypatch.undo()
    plain = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))).requires_grad_(False)
    plain.load_state_dict(new)
    assert torch.equal(model(X), plain(X))


def test_data_made_on_the_device_is_the_weights_value_from_then_on(streamed, monkeypatch):
    _, session = streamed
    owner = last(session)
    before = session.read(owner.entry.name).clone()
    value = before - 0.25
    replaced = []
    with monkeypatch.context() as patch:
        patch.setattr(inside(session).engine, "device", THERE)
        if owner.host.is_meta:
            patch.setattr(type(owner), "replace", lambda _, new: replaced.append(new))
            owner.set_data(Elsewhere(before.clone()))
            assert not replaced, (
                "what a submodule's .to moved there has the same value: nothing is packed anew"
            )
        owner.set_data(Elsewhere(torch.zeros(3)))  # of another shape: not for this weight
        owner.set_data(Elsewhere(value))
    if owner.host.is_meta:
        assert [torch.equal(new, value) for new in replaced] == [True]
    else:
        assert torch.equal(session.read(owner.entry.name), value)
