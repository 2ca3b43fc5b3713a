"""Units of a packed file that stay on the device packed: read once, decoded at each use, and every bit as it was."""

# mypy: disable-error-code="union-attr,arg-type,index,operator,call-overload"

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import carom
import pytest
import tests_models as models
import torch
from carom.core.checkpoint.disk_reader import DiskReader
from carom.core.checkpoint.index import open_index
from carom.core.checkpoint.packed_source import stored_entry
from carom.core.common.errors import WeightsError
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine
from carom.core.placement import packed_residents
from carom.tools.pack.writer import pack
from safetensors.torch import save_file
from tests_disk_harness import within_ram
from tests_harness import SIMULATED, assert_same, infer, train
from tests_inside import inside
from tests_pairwise import each
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

WIDE = 256
DEPTH = 10
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def also_small_units(monkeypatch):
    monkeypatch.setattr(packed_residents, "LEAST_UNIT", 1)


def stack(checkpoint: str = "none", meta: bool = False, depth: int = DEPTH) -> models.Stack:
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = models.Stack(depth, d=WIDE)
        for parameter in () if meta else model.parameters():
            nn.init.normal_(parameter, std=0.05)
    model.checkpoint = checkpoint
    return model.bfloat16()


class Case:
    """What `infer` and `train` feed a model with."""

    @staticmethod
    def inputs(index: int, device: torch.device) -> torch.Tensor:
        return torch.randn(2, 3, WIDE, generator=torch.Generator().manual_seed(index)).bfloat16()


PACKINGS = {
    "nf4": {"quant": "nf4"},
    "nf3": {"quant": "nf3", "codec": "lossless"},
    "lossless": {"codec": "lossless"},
}


def packed_file(model: nn.Module, folder: Path, **packing: str) -> Path:
    """Pack the model's weights, and give the model the values that the file stands for."""
    path = folder / "packed.safetensors"
    save_file({n: t.detach().clone() for n, t in model.state_dict().items()}, folder / "m.safetensors")
    pack(folder / "m.safetensors", path, **{"codec": "raw", **packing})
    model.load_state_dict(carom.load_file(path))
    return path


def file_bytes(path: Path, units: Any) -> int:
    """The bytes that the weights of ``units`` take in the file."""
    index = open_index(path)
    return sum(stored_entry(index[home.file_tensor.name]).nbytes for unit in units for home in unit.homes)


def divided(session: Any) -> tuple[list[Any], list[Any]]:
    """The units that stay on the device packed, and those that cross."""
    units = inside(session).placement.streamed
    return [u for u in units if u.on_device], [u for u in units if not u.on_device]


BLOCK = sum(p.nbytes for p in stack(meta=True, depth=1).parameters())
ALL = DEPTH * BLOCK


@each(device=SIMULATED, packing=PACKINGS, ram={"all": ALL, "some": ALL // 12, "two pages": 8192})
def test_what_stays_packed_is_read_once_and_crosses_no_more(tmp_path, monkeypatch, device, packing, ram):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = packed_file(model, tmp_path, **packing)
    expected = infer(model, Case, CPU, passes=5)
    monkeypatch.setattr(DiskReader, "_get_decoding_reader", lambda *_: pytest.fail("decoded on the host"))
    settings: Any = {"vram": 6 * BLOCK, "ram": ram, "granularity": "block"}
    with carom.stream(empty, device=device, weights=path, **settings) as session:
        stay, cross = divided(session)
        assert len(stay) >= 2
        assert_same(expected, infer(empty, Case, CPU, passes=5))
        report = session.report()
        assert report.resident_packed_units == len(stay) and report.packed_units == len(cross)
        assert report.resident_packed_raw_bytes == sum(unit.nbytes for unit in stay)
        # Each tensor of a unit begins at a page, as in the file.
        assert report.wire_bytes_per_step <= file_bytes(path, cross) + 5 * 4096 * len(cross)
        assert inside(session).placement.tier.residents.total_read() >= file_bytes(path, stay)
        read = inside(session).placement.tier.reads.total_read()
        infer(empty, Case, CPU, passes=1)
        again = inside(session).placement.tier.reads.total_read() - read
        assert again <= 2 * (file_bytes(path, cross) + 5 * 4096 * len(cross))
        assert report.vram_peak_bytes <= settings["vram"]
        within_ram(session)
        if ram == ALL:
            assert report.disk_bytes_per_step == 0
    assert all(p.is_meta for p in empty.parameters())


@each(device=SIMULATED, ram={"some": ALL // 12, "two pages": 8192})
def test_a_model_that_fits_packed_crosses_no_link_and_reads_no_drive(tmp_path, device, ram):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = packed_file(model, tmp_path, quant="nf4")
    with carom.stream(
        empty, device=device, weights=path, vram=7 * BLOCK, ram=ram, granularity="block"
    ) as session:
        assert_same(infer(model, Case, CPU, passes=4), infer(empty, Case, CPU, passes=4))
        report = session.report()
        assert report.resident_packed_units + len(session.plan.resident) == report.units
        assert report.wire_bytes_per_step == report.disk_bytes_per_step == report.packed_units == 0
        assert report.staging_bytes == 0, "what is decoded in place needs no staging memory"


def test_more_weights_stay_on_the_device_than_unpacked(tmp_path, monkeypatch):
    model = stack().eval()
    path = packed_file(model, tmp_path, quant="nf4")
    settings: Any = {"device": SimulatedDevice(), "weights": path, "vram": 5 * BLOCK, "ram": ALL}
    kept = []
    for least in (1, ALL):
        monkeypatch.setattr(packed_residents, "LEAST_UNIT", least)
        empty = stack(meta=True).eval()
        with carom.stream(empty, granularity="block", **settings) as session:
            assert_same(infer(model, Case, CPU), infer(empty, Case, CPU))
            kept.append(len(session.plan.resident) + len(session.plan.packed))
    assert kept[0] > 2 * kept[1]


# -- training


@each(device=SIMULATED, checkpoint=["none", "non-reentrant", "reentrant"])
def test_lora_trains_as_on_the_resident_model_of_the_same_file(tmp_path, device, checkpoint):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)

    def run(model: nn.Module) -> list:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            wrapped = peft.get_peft_model(model, config)
        model(Case.inputs(0, CPU))
        return train(wrapped, Case, CPU, steps=3)

    model = stack(checkpoint)
    path = packed_file(model, tmp_path, quant="nf4")
    expected = run(copy.deepcopy(model))
    empty = stack(checkpoint, meta=True)
    with carom.stream(
        empty, device=device, weights=path, vram=7 * BLOCK, ram=64 << 10, granularity="block"
    ) as session:
        assert_same(expected, run(empty))
        stay, cross = divided(session)
        assert len(stay) >= 2
        report = session.report()
        once = file_bytes(path, cross) + 5 * 4096 * len(cross)
        assert report.wire_bytes_per_step <= 2 * once, "what stays must not cross"
        assert report.vram_peak_bytes <= 7 * BLOCK


@pytest.mark.parametrize("share", [0.4, 0.6])
@pytest.mark.parametrize("device", SIMULATED.values(), ids=SIMULATED)
def test_qlora_of_a_llama_of_the_70b_shape_crosses_the_bytes_of_streamed_layers(tmp_path, device, share):
    """The ratios of widths and heads are those of Llama 70B; width and depth are less."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1792, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=1,
        vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)

    class Tokens:
        @staticmethod
        def inputs(index: int, device: torch.device) -> torch.Tensor:
            return torch.randint(64, (1, 5), generator=torch.Generator().manual_seed(index))

    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, use_cache=False).logits

    def run(model: nn.Module) -> list:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            adapted = peft.get_peft_model(model, lora)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return train(Logits(adapted), Tokens, CPU, steps=3)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config).bfloat16()
    path = packed_file(model, tmp_path, quant="nf4")
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).bfloat16()
    expected = run(model)
    nbytes = sum(p.nbytes for p in empty.parameters())
    settings: Any = {"vram": int(share * nbytes), "ram": nbytes // 3, "granularity": "block"}
    with carom.stream(empty, device=device, weights=path, **settings) as session:
        assert_same(expected, run(empty))
        report, (stay, cross) = session.report(), divided(session)  # of the layout with the adapters
        assert stay and all(unit.packed for unit in cross)
        assert report.disk_bytes_per_step == 0, "the codes fit `ram`"
        assert report.wire_bytes_per_step <= 1.02 * report.transfers_per_weight * file_bytes(path, cross)
        assert report.transfers_per_weight <= 2
        assert report.vram_peak_bytes <= settings["vram"]


# -- values, budgets and damage


def adapt(session: Any) -> None:
    """Add adapters to frozen blocks, and train them. The first pass makes a layout for training."""
    for block in session.module.blocks:
        block.adapter = nn.Linear(WIDE, WIDE, bias=False, dtype=torch.bfloat16)
        block.forward = lambda x, inner=block.forward, block=block: inner(x) + block.adapter(x)
    session.module(Case.inputs(0, CPU)).float().sum().backward()


CHANGES = {
    "budget": lambda session: session.set_budget(vram=5 * BLOCK),
    "park": lambda session: session.park(),
    "close": lambda session: session.close(),
    "adapters": adapt,
}
# The layout for training differs from that for inference if no unit stays packed.
LEAST_UNITS = {"adapters": 1 << 30}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_layout_frees_the_device_memory_of_packed_bytes_at_once(tmp_path, monkeypatch, change):
    """Without the garbage collector, too: until it runs, the old layout's memory would be beyond the budget."""
    monkeypatch.setattr(packed_residents, "LEAST_UNIT", LEAST_UNITS.get(change, 1))
    allocated: list[tuple[int, StorageWeakRef]] = []
    allocate = SimulatedEngine.allocate

    def recorded(engine, nbytes):
        memory = allocate(engine, nbytes)
        allocated.append((nbytes, StorageWeakRef(memory.untyped_storage())))
        return memory

    monkeypatch.setattr(SimulatedEngine, "allocate", recorded)
    model, empty = stack(), stack(meta=True).eval().requires_grad_(False)
    path = packed_file(model, tmp_path, quant="nf4")
    gc.collect()
    gc.disable()
    try:
        with carom.stream(
            empty, device=SimulatedDevice(seed=1), weights=path, vram=6 * BLOCK, ram=ALL
        ) as session:
            infer(empty, Case, CPU, passes=2)
            region = session.plan.region_bytes
            before = list(allocated)
            assert session.plan.staging_bytes and (session.plan.packed or change == "adapters")
            CHANGES[change](session)
            assert len(allocated) > len(before) or change in ("park", "close")
            # The simulated device itself keeps the last region for its checks.
            kept = [nbytes for nbytes, storage in before if not storage.expired() and nbytes != region]
            assert not kept
    finally:
        gc.enable()


@pytest.mark.parametrize("written", [("up.weight",), ("norm.weight",), None])
def test_written_values_are_those_of_the_next_pass(tmp_path, written):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = packed_file(model, tmp_path, quant="nf4")
    settings: Any = {"vram": 6 * BLOCK, "ram": ALL, "granularity": "block"}
    with carom.stream(empty, device=SIMULATED["simulated-early"], weights=path, **settings) as session:
        stay, _ = divided(session)
        infer(empty, Case, CPU, passes=2)
        names = [home.entry.name for home in stay[0].homes]
        for name in names if written is None else [n for n in names if n.endswith(written)]:
            value = torch.randn(model.get_parameter(name).shape).bfloat16()
            session.write(name, value)
            with torch.no_grad():
                model.get_parameter(name).copy_(value)
            assert torch.equal(session.read(name), value)
        expected = infer(model, Case, CPU, passes=3)
        assert_same(expected, infer(empty, Case, CPU, passes=3))
        for vram in (8 * BLOCK, 4 * BLOCK):
            session.set_budget(vram=vram)
            assert_same(expected, infer(empty, Case, CPU, passes=3))
            assert session.report().vram_peak_bytes <= max(vram, settings["vram"], 8 * BLOCK)


@pytest.mark.parametrize("ram", [ALL, 8192], ids=["all of it", "two pages"])
def test_a_damaged_unit_is_named_by_each_pass_and_the_others_are_usable(tmp_path, ram):
    model = stack().eval()
    path = packed_file(model, tmp_path, quant="nf4")
    settings: Any = {
        "device": SimulatedDevice(),
        "weights": path,
        "vram": 6 * BLOCK,
        "ram": ram,
        "granularity": "block",
    }
    with carom.stream(stack(meta=True), **settings) as session:
        name = next(h.entry.name for h in divided(session)[0][-1].homes if h.entry.name.endswith("up.weight"))
    stored = stored_entry(open_index(path)[name])
    with open(path, "r+b") as file:
        file.seek(stored.offset + stored.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    empty = stack(meta=True).eval()
    with carom.stream(empty, **settings) as session:
        for _ in range(2):
            with torch.no_grad(), pytest.raises(WeightsError, match=f"{name}.*checksum"):
                empty(Case.inputs(0, CPU))
        other = name.replace("up.weight", "down.weight")
        assert torch.equal(session.read(other), model.get_parameter(other))
    assert all(p.is_meta for p in empty.parameters())


# -- weights that stay unpacked are decoded on the device, whatever the staging memory holds


@each(device=SIMULATED, packing=PACKINGS, spare=[BLOCK // 8, 2 * BLOCK])
def test_a_model_that_fits_unpacked_is_decoded_on_the_device_in_parts(
    tmp_path, monkeypatch, device, packing, spare
):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = packed_file(model, tmp_path, **packing)
    expected = infer(model, Case, CPU, passes=2)
    if spare > BLOCK:  # the largest tensor fits in a part
        monkeypatch.setattr(DiskReader, "_get_decoding_reader", lambda *_: pytest.fail("decoded on the host"))
    vram = ALL + ALL // 20 + spare
    with carom.stream(empty, device=device, weights=path, vram=vram, ram=64 << 10) as session:
        assert session.plan.all_resident
        assert_same(expected, infer(empty, Case, CPU, passes=2))
        report = session.report()
        assert report.staging_bytes == report.wire_bytes_per_step == 0
        assert inside(session).placement.tier.device_bytes == 0, "staging memory was temporary"
        assert report.vram_peak_bytes <= vram
