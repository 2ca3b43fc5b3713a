"""`carom.stream` that fails leaves the module as it was, and nobody counts the session that never was."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.budget import ledger, optimizer_reserve
from carom.core.model.quantized import FlattenedWeights
from carom.core.placement import bound_checkpoint
from carom.core.placement.placement import Placement
from carom.core.session import registry
from carom.core.session.policies import device_memory
from safetensors.torch import save_file
from tests_inside import inside
from torch import nn

pytestmark = pytest.mark.timeout(60)


class Boom(Exception):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def state(net):
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return [(name, id(t), type(t), t.device, t.requires_grad) for name, t in tensors]


# (class or module, what of it, the calls that fail), with weights from a file, of the module, or both.
FILE = {
    "placeholders of the file's tensors": (bound_checkpoint, "replace_in_modules", (1, 2)),
    "notes on the file": (bound_checkpoint.Checkpoint, "note", (1,)),
    "packed tensors": (bound_checkpoint.Checkpoint, "stay_packed", (1,)),
}
MODULE = {"quantised weights": (FlattenedWeights, "renew", (1,))}
BOTH = {
    "budgets that follow": (device_memory.DeviceMemory, "begin", (1,)),
    "room": (ledger.BudgetLedger, "make_room", (1,)),
    "layout": (Placement, "settled", (1,)),
    "whose the module is": (registry, "enter", (1,)),
}
FAULTS = {**FILE, **MODULE, **BOTH}
CASES = [
    (fault, call, where)
    for places, faults in ((("meta", "file"), {**FILE, **BOTH}), (("module",), {**MODULE, **BOTH}))
    for fault, (_, _, calls) in faults.items()
    for call in calls
    for where in places
]


@pytest.mark.parametrize("vram", ["auto", "shared"])
@pytest.mark.parametrize(("fault", "call", "where"), CASES)
def test_a_session_that_fails_to_begin_leaves_no_trace(tmp_path, monkeypatch, fault, call, where, vram):
    """``where``: weights of a file for a module on meta, of a file for a loaded module, or the module's own."""
    owner, name, _ = FAULTS[fault]
    net, path = Net(), tmp_path / "net.safetensors"
    values = {key: value.clone() for key, value in net.state_dict().items()}
    save_file(values, path)
    if where == "meta":
        net.to("meta")
    before, modules = state(net), [dict(vars(m)) for m in net.modules()]
    budget = carom.SharedBudget("1MiB") if vram == "shared" else "auto"
    device = carom.SimulatedDevice(unpacks=True)
    options = {"weights": path, "ram": "1MiB"} if where != "module" else {}
    original, count = getattr(owner, name), [0]

    def failing(*args, **kwargs):
        count[0] += 1
        if count[0] == call:
            raise Boom("injected")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(Boom) as raised:  # which has the session in its frames
            carom.stream(net, device=device, vram=budget, **options)
    assert state(net) == before and [dict(vars(m)) for m in net.modules()] == modules
    if where != "meta":
        assert all(torch.equal(value, values[key]) for key, value in net.state_dict().items())
    assert not optimizer_reserve._members
    if vram == "shared":
        assert not budget.mates.members and budget.free_bytes == budget.nbytes
    with carom.stream(net, device=device, vram=budget, **options) as live:
        assert len(inside(live).mates.members) == 1, "the one before is asked for nothing"
        with torch.no_grad():
            net(torch.ones(1, 32))
    assert state(net) == before and raised.traceback
