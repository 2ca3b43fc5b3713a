"""A change of layout that fails, wherever it does: the session is attached or parked, `close` gives the module back, and no
other session counts one that is closed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import carom
import pytest
import torch
from carom.core.budget import optimizer_reserve
from carom.core.checkpoint.disk_reader import DiskReader
from carom.core.device.simulated import SimulatedEngine
from carom.core.host.arena import HostArena
from carom.core.session.phase import Phase
from carom.core.session.policies import host_memory as follow_ram
from safetensors.torch import save_file
from tests_inside import inside
from tests_limits import pack_small_weights
from tests_pairwise import pairwise
from torch import nn

pytestmark = pytest.mark.timeout(60)
WIDTH = 64
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


class Net(nn.Module):
    def __init__(self, depth: int = 6, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def run(net):
    with torch.no_grad():
        return net(X)


def size(net):
    return sum(p.nbytes for p in net.parameters())


def identities(net):
    return [(name, id(p), type(p), p.device, p.shape) for name, p in net.named_parameters()]


class Boom(Exception):
    pass


OOM = torch.OutOfMemoryError
ALL = ["attached", "parked", "aside", "auto", "shared", "file", "file over a loaded module"]
# (class, method, what it raises, from which states)
FAULTS = {
    "device memory": (SimulatedEngine, "allocate", OOM, ALL),
    "device": (SimulatedEngine, "allocate", Boom, [*ALL, "packed"]),
    "pinning": (HostArena, "pin", Boom, ["attached", "shared", "file"]),
    "host memory": (HostArena, "allocate", MemoryError, ["parked", "auto", "file", "packed"]),
    "waiting": (SimulatedEngine, "synchronize", Boom, ["attached", "shared", "file over a loaded module"]),
    "reading": (DiskReader, "submit_reads", carom.WeightsError, ALL[-2:]),
}


@contextlib.contextmanager
def failing(owner, name, call, kind):
    """``owner.name`` raises a ``kind`` at its ``call``-th call (from 0); yields how many there were."""
    original, count = getattr(owner, name), [0]

    def wrapper(*args, **kwargs):
        count[0] += 1
        if count[0] == call + 1:
            raise kind("injected")
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, wrapper):
        yield count


class Case:
    """A session in one of `STATES`, a mate where there is one, and the same model without a session."""

    def __init__(self, state, device, folder):
        self.net, self.twin, self.mate_net = Net(), Net(), Net(seed=1)
        if state == "packed":
            for one in (self.net, self.twin):
                for p in one.parameters():
                    p.data = p.data.bfloat16().float()  # packs to half
        self.state, self.mate, self.shared = state, None, None
        self.budget = int(0.6 * size(self.net))
        options = {"vram": self.budget, "granularity": "layer"}
        if state.startswith("file"):
            path = folder / "net.safetensors"
            if not path.exists():
                save_file(self.twin.state_dict(), path)
            if state == "file":
                self.net.to("meta")
            options |= {"weights": path, "ram": 3 * size(self.twin)}
        if state == "auto":
            options["vram"] = "auto"
        if state == "packed":
            options["codec"] = "lossless"
        if state == "shared":
            self.shared = options["vram"] = carom.SharedBudget(int(1.2 * size(self.net)))
        self.originals = identities(self.net)
        self.session = carom.stream(self.net, device=device, **options)
        if state in ("auto", "shared"):
            self.mate = carom.stream(self.mate_net, device=device, vram=options["vram"], granularity="layer")
            self.others = run(self.mate_net)
        run(self.net)
        assert state != "packed" or any(unit.packed for unit in inside(self.session).streamed)
        if state in ("parked", "aside"):
            self.session.park(keep=state == "aside")

    def act(self, action):
        """What lays the weights out anew, at once or at the forward that follows."""
        if action == "budget":
            if self.state == "shared":
                self.session.set_budget(ram="1GiB")
            else:
                self.session.set_budget(vram=int(1.2 * self.budget))
        elif action in ("park", "aside"):
            self.session.park(keep=action == "aside")
        elif action == "close":
            self.session.close()
            return
        else:
            with torch.no_grad():
                for net in (self.net, self.twin):
                    torch.manual_seed(5)
                    net.blocks[2] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            now = identities(self.net)
            self.originals[4:6] = now[4:6]
        run(self.net)

    def ask_mates(self):
        """No closed session among those that give way, and those that are counted."""
        assert not any(ledger.closed for ledger in optimizer_reserve._members)
        for one in (self.session, self.mate):
            if one is not None and inside(one).mates is not None:
                assert not any(ledger.closed for ledger in inside(one).mates.members.values())
        if self.mate is not None:
            assert torch.equal(run(self.mate_net), self.others)

    def end(self):
        self.session.close()
        self.ask_mates()
        assert inside(self.session).mates is None and self.session not in optimizer_reserve._members
        assert identities(self.net) == self.originals
        if self.state != "file":
            assert not any(p.is_meta for p in self.net.parameters())
            assert torch.equal(run(self.net), run(self.twin))
        assert inside(self.session).pinned_bytes == 0
        assert "forward" not in vars(self.net) and "_apply" not in vars(self.net)
        if self.shared is not None:
            assert self.shared.free_bytes + inside(self.mate).promised_bytes == self.shared.nbytes
        if self.mate is not None:
            self.mate.close()


@pairwise(
    fault=list(FAULTS),
    state=[*ALL, "packed"],
    action=["budget", "park", "aside", "weights", "close"],
    but=lambda fault, state, action: state not in FAULTS[fault][3],
)
def test_a_layout_that_fails_anywhere_leaves_a_session_that_goes_on(
    tmp_path, monkeypatch, fault, state, action
):
    pack_small_weights(monkeypatch, 256, ratio=None)
    owner, name, kind, _ = FAULTS[fault]
    for call in range(200):
        case = Case(state, carom.SimulatedDevice(memory_bytes=4 * size(Net())), tmp_path)
        with failing(owner, name, call, kind) as count, contextlib.suppress(kind):
            case.act(action)
        phase = inside(case.session).manager.phase
        assert phase in (Phase.ATTACHED, Phase.PARKED, Phase.ASIDE, Phase.CLOSED)
        case.ask_mates()
        if action == "close":
            case.end()
            if count[0] <= call:
                return
            continue
        assert torch.equal(case.session.read("blocks.0.weight"), case.twin.blocks[0].weight)
        if (call + len(action)) % 2:  # else it is closed as it is
            assert not case.session.closed
            assert torch.equal(run(case.net), run(case.twin))
            assert inside(case.session).held_bytes <= inside(case.session).capacity
        case.end()
        if count[0] <= call:
            return
    pytest.fail("it never ended")


# -- host memory that runs short


@pytest.fixture
def host_memory(monkeypatch):
    found = SimpleNamespace(
        free=1 << 40, keep=0, usable=1 << 40, limit=1 << 40, total=1 << 40, cgroup_limit=None, swap_total=0, swap_used=0
    )  # fmt: skip
    monkeypatch.setattr(follow_ram, "_SECONDS", 0.0)
    monkeypatch.setattr("carom.core.session.policies.host_memory._STEPS", 0)
    monkeypatch.setattr(follow_ram.probe, "host_memory", lambda: found)
    pack_small_weights(monkeypatch, 256, ratio=None)
    return found


@pytest.mark.parametrize("kind", [OOM, Boom])
@pytest.mark.parametrize("waits", ["file", "file over a loaded module", "packed beside plain"])
def test_a_layout_because_of_host_memory_that_fails_leaves_a_session_that_goes_on(
    tmp_path, monkeypatch, host_memory, waits, kind
):
    net, twin = Net(), Net()
    options = {"ram": "auto", "vram": size(net) * 4 // 5}
    if waits.startswith("file"):
        save_file(twin.state_dict(), tmp_path / "net.safetensors")
        options["weights"] = tmp_path / "net.safetensors"
        if waits == "file":
            net.to("meta")
    else:
        options |= {"codec": "lossless", "host": "raw"}
    ram = 2 * size(twin)
    monkeypatch.setattr("carom.core.session.settings.ram_budget", lambda value, *_: ram)
    originals = identities(net)
    with torch.no_grad():
        expected = twin(X)
        for call in range(10):
            host_memory.keep, host_memory.free = ram, 2 * ram
            device = carom.SimulatedDevice()
            session = carom.stream(net, device=device, granularity="layer", **options)
            for _ in range(3):
                assert torch.equal(net(X), expected)
            arrangement = inside(session).arrangement
            host_memory.free = ram // 4  # another program
            with failing(SimulatedEngine, "allocate", call, kind) as count, contextlib.suppress(kind):
                assert torch.equal(net(X), expected)
            if count[0] > call:
                assert session.parked
            else:
                assert inside(session).arrangement is not arrangement, (
                    "nothing was laid out anew: the test would show nothing"
                )
            if call % 2:
                for _ in range(2):
                    assert torch.equal(net(X), expected)
            session.close()
            assert identities(net) == originals
            if waits != "file":
                assert not any(p.is_meta for p in net.parameters()) and torch.equal(net(X), expected)
            if count[0] <= call:
                assert call > 0
                return
    pytest.fail("it never ended")
