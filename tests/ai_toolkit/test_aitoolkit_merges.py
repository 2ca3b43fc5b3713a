"""What a sample costs: a merge reads, packs and writes each streamed weight once, and a model that stays on the device
runs as without Carom."""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tests_aitoolkit_stand_in as standin
import torch
from carom.core import codec as codec_package
from carom.core.host.arena import HostArena
from carom.core.placement import packed_writes
from carom.core.placement.packed_home import PackedHome
from carom.core.placement.packed_tensor import PackedTensor
from carom.core.streaming import pass_retry
from carom.toolkit_ext import toolkit_patches
from carom.toolkit_ext.job import JobOffload
from carom.toolkit_ext.options import Policy
from tests_harness import SIMULATED
from tests_inside import inside
from tests_limits import pack_small_weights

CPU = torch.device("cpu")
CORE = str(Path(codec_package.__file__).parent.parent)


@pytest.fixture(autouse=True)
def toolkit(monkeypatch) -> Iterator[None]:
    pack_small_weights(monkeypatch, 1024, ratio=None)  # the stand-in's weights are small
    with standin.installed():
        yield
    gc.collect()


@pytest.fixture
def counts(monkeypatch) -> Counter[str]:
    """Counts of what writes to packed weights do."""
    found: Counter[str] = Counter()

    def count(owner: Any, name: str, add: Any) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            found.update(add(args, result))
            return result

        monkeypatch.setattr(owner, name, counted)

    count(HostArena, "allocate", lambda args, block: {"blocks": 1})
    count(HostArena, "pin", lambda args, pinned: {"pinned": 1})
    count(PackedTensor, "value", lambda args, value: {"read": 1})
    count(packed_writes, "pack", lambda args, result: {"packed": 1})
    count(packed_writes, "_copy_to", lambda args, result: {"written": 1, "bytes": args[2].blob.numel()})
    return found


class Model:
    """A streamed transformer in bf16 with a network of adapters, and the same without Carom."""

    def __init__(self, vram: int | str, codec: str) -> None:
        policy = Policy("bouncing", vram, codec=codec)
        self.job = toolkit_patches._current = JobOffload(policy, "cpu", standin.SAID.append)
        torch.manual_seed(1)
        self.model = standin.Transformer().bfloat16().requires_grad_(False)
        self.plain = copy.deepcopy(self.model)
        standin.MemoryManager.attach(self.model, CPU)
        for attachment in self.job.attachments:
            attachment.trains = True  # as the loader of ai-toolkit's models notes
        self.networks = []
        for model in (self.model, self.plain):
            network = standin.Network(model)
            network.apply_to()
            torch.manual_seed(2)
            for parameter in network.parameters():
                parameter.data = torch.randn(parameter.shape).mul(0.05).bfloat16()
            self.networks.append(network)

    @property
    def session(self) -> Any:
        return self.model._memory_manager.session  # type: ignore[union-attr]

    def merge(self, way: str) -> None:
        for network in self.networks:
            getattr(network, way)()

    def is_exact(self) -> bool:
        x, text = (tensor.bfloat16() for tensor in (standin._noise(0), standin._noise(50)))
        with torch.no_grad():
            return torch.equal(self.model(x, text), self.plain(x, text))

    def packed_homes(self) -> list[PackedHome]:
        tables = [lora.org_module[0]._parameters["weight"] for lora in self.networks[0].loras]
        homes = [getattr(weight, "_carom", None) for weight in tables]
        return [home for home in homes if isinstance(home, PackedHome)]


@pytest.fixture
def model(monkeypatch, request) -> Iterator[Model]:
    device, vram = request.param
    device = dataclasses.replace(SIMULATED[device], unpacks=True)
    monkeypatch.setattr("carom.toolkit_ext.devices.engine_device", lambda _: device)
    made = Model(vram, "lossless")
    yield made
    made.job.close()
    toolkit_patches._current = None


def calls(run: Any) -> int:
    """Return the number of Python calls of ``run`` into the engine, without those of the simulated device."""
    found = 0

    def hook(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        name = frame.f_code.co_filename
        found += event == "call" and CORE in name and "/device/" not in name

    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


half = pytest.mark.parametrize(
    "model", [(device, 200_000) for device in SIMULATED], ids=SIMULATED, indirect=True
)


@half
def test_a_merge_packs_each_weight_once_and_writes_it_where_it_was(model, counts):
    assert model.is_exact()
    homes = model.packed_homes()
    session = model.session
    assert len(homes) > 5 and session.report().packed_units > 3
    wire = 0
    for way in ("merge_in", "merge_out", "merge_in"):
        counts.clear()
        model.merge(way)
        packed = sum(home.packed.blob.numel() for home in homes)
        each = len(homes)
        assert counts == {"read": each, "packed": each, "written": each, "bytes": packed}
        counts.clear()
        before = inside(session).engine.bytes_in
        assert model.is_exact()
        assert not counts
        wire = wire or inside(session).engine.bytes_in - before
        assert inside(session).engine.bytes_in - before == wire, "a sample crosses the same bytes each time"


whole = pytest.mark.parametrize("model", [("simulated-late", "auto")], ids=["auto"], indirect=True)


@whole
def test_a_model_that_stays_on_the_device_costs_a_few_calls(model, monkeypatch, tmp_path):
    x, text = (tensor.bfloat16() for tensor in (standin._noise(0), standin._noise(50)))

    def step() -> None:
        model.model(x, text).float().sum().backward()

    def sample() -> None:
        with torch.no_grad():
            model.model(x, text)

    for _ in range(6):
        step()
        sample()
    session = model.session
    assert session.plan.all_resident and inside(session).governor is not None
    found: Counter[str] = Counter()
    engine = inside(session).engine
    for owner, name, what in (
        (engine, "synchronize", "waits"),
        (engine, "memory", "memory"),
        (pass_retry.ModuleState, "__init__", "states"),
        (pass_retry.PassSnapshot, "__init__", "snapshots"),
    ):
        real = getattr(owner, name)

        def counted(*args: Any, what: str = what, real: Any = real, **kwargs: Any) -> Any:
            found[what] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    assert calls(step) < 300 and found == {"memory": 1}
    found.clear()
    assert calls(sample) < 300 and found == {"memory": 1, "snapshots": 1}
    found.clear()
    assert calls(model.networks[0].merge_in) < 50 and not found
    # What Carom does at the begin of a sample.
    process = SimpleNamespace(
        _carom_job=model.job, network=model.networks[0], save_root=tmp_path, job=SimpleNamespace(name="job")
    )
    toolkit_patches._sample(lambda process, step: None, process, 6)
    assert found == {"waits": 1}, "one report of each model"
    assert (tmp_path / "carom" / "report.json").is_file()
