"""Modules in memory whose weights stream from disk: from the file that is mapped, or from a spill file."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import carom
import pytest
import tests_models as models
import torch
from carom.core.checkpoint import spill as spilling
from carom.core.checkpoint import spill_file
from carom.core.checkpoint.direct_io import open_raw
from carom.core.checkpoint.mapped_views import FileRange, MappedViews
from carom.core.checkpoint.memory_maps import lists_files
from carom.core.device.simulated import SimulatedEngine
from safetensors.torch import load_file, save_file
from tests_disk_harness import least_on_disk, within_ram
from tests_harness import (
    EVERYWHERE,
    SOME,
    assert_same,
    infer,
    on_some_devices,
    place,
    some_vram,
    train,
)
from tests_inside import inside
from tests_pairwise import each, pairwise
from torch import nn

CASES = models.CASES
MAPS = pytest.mark.skipif(not lists_files(), reason="the system does not tell which files are mapped")
LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="locks, signals and names of files are Linux's"
)
RAM = 8192  # bytes: the least that reading works with


class Wide(nn.Module):
    """Eight blocks of two matrices of 64 KiB; frozen, and with adapters if wanted."""

    def __init__(self, adapters: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(8))
        self.requires_grad_(False)
        self.down = nn.ParameterList(torch.zeros(128, 4) for _ in range(8 * adapters))
        self.up = nn.ParameterList(torch.randn(4, 128) for _ in range(8 * adapters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            low = x @ self.down[index] @ self.up[index] if len(self.down) else 0
            x = block(x) + low
        return x

    @staticmethod
    def inputs(index: int, device: torch.device) -> torch.Tensor:
        return torch.randn(3, 128, generator=torch.Generator().manual_seed(index)).to(device)


def wide(adapters: bool = False) -> Wide:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Wide(adapters)


def mapped(model: nn.Module, folder: Path) -> nn.Module:
    """Return a copy of ``model`` whose tensors are views of a mapped safetensors file."""
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    found = copy.deepcopy(model)
    found.load_state_dict(load_file(path), assign=True)
    return found.requires_grad_(False)


def spill_files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("carom-spill-*")]


def load_range(found: FileRange) -> bytes:
    read = memoryview(bytearray(found.nbytes))
    with contextlib.closing(open_raw(found.file.path, direct=False)) as file:
        assert file.read_into(read, found.offset) == found.nbytes
    return bytes(read)


def on_disk(session: Any) -> bool:
    return inside(session).on_disk


def budget(model: nn.Module, device: Any) -> int:
    return some_vram(model, device, 0.2, slots=2)


# -- exact


@each(name=list(CASES), device=SOME)
def test_every_kind_of_module_streams_from_a_spill_file(tmp_path, name, device):
    case, where = CASES[name], place(device)
    expected = infer(case.build().eval().requires_grad_(False).to(where), case, where)
    model = case.build().eval().requires_grad_(False)
    vram = least_on_disk(model, device, tmp_path, RAM) * max(2, case.slots)
    with carom.stream(model, device=device, vram=vram, ram=RAM, disk=tmp_path):
        assert_same(expected, infer(model, case, where))
    if name != "buffers":  # it remembers its inputs
        assert_same(expected, infer(model.to(where), case, where))


@pairwise(device=EVERYWHERE, disk=["folder", "auto"], share=[0.0, 0.5])
def test_a_module_of_a_mapped_file_is_exact_and_writes_nothing(tmp_path, device, disk, share):
    where = place(device)
    expected = infer(wide().to(where), Wide, where)
    model = mapped(wide(), tmp_path)
    ram = max(RAM, int(share * sum(p.nbytes for p in model.parameters())))
    folder = tmp_path / "spill"
    vram = budget(model, device)
    with carom.stream(
        model, device=device, vram=vram, ram=ram, disk=folder if disk == "folder" else "auto"
    ) as session:
        assert on_disk(session)
        assert_same(expected, infer(model, Wide, where))
        within_ram(session)
        # only the biases are too small for a file of their own
        assert not spill_files(folder)
    assert_same(expected, infer(model.to(where), Wide, where))


test_a_module_of_a_mapped_file_is_exact_and_writes_nothing = MAPS(
    test_a_module_of_a_mapped_file_is_exact_and_writes_nothing
)


@pairwise(device=EVERYWHERE, source=["spilled", "mapped"])
def test_lora_over_weights_on_disk_trains_as_without_offloading(tmp_path, device, source):
    where = place(device)
    expected = train(wide(adapters=True).to(where), Wide, where)
    model = wide(adapters=True)
    if source == "mapped":
        frozen = mapped(wide(), tmp_path)
        model.blocks = frozen.blocks
    vram = budget(model, device)
    with carom.stream(model, device=device, vram=vram, ram=RAM, disk=tmp_path / "spill") as session:
        assert on_disk(session)
        assert_same(expected, train(model, Wide, where))


@MAPS
def test_what_transformers_loads_streams_from_its_own_files(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        vram = least_on_disk(model, "cpu", "auto", RAM)
        with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk="auto") as session:
            assert on_disk(session)
            assert torch.equal(model(input_ids=tokens).logits, expected)
            assert session.report().disk_bytes_per_step > 0


@MAPS
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_checkpoint_that_transformers_loads_streams_from_its_file(tmp_path, bits):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    settings = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    whole = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=settings, device_map="cpu", dtype=torch.bfloat16
    )
    whole.save_pretrained(tmp_path / "packed")
    tokens = torch.arange(12).view(2, 6)

    def load() -> Any:
        folder = tmp_path / "packed"
        return transformers.LlamaForCausalLM.from_pretrained(
            folder, device_map="cpu", dtype=torch.bfloat16
        ).eval()

    with torch.no_grad():
        expected = load()(input_ids=tokens).logits
        model = load()
        vram = least_on_disk(model, "cpu", "auto", RAM)
        with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk="auto") as session:
            assert on_disk(session)
            assert torch.equal(model(input_ids=tokens).logits, expected)
            assert session.report().disk_bytes_per_step > 0


def test_when_ram_suffices_nothing_moves_to_disk_and_a_smaller_ram_moves_it(tmp_path):
    model, where = wide(), torch.device("cpu")
    expected = infer(wide(), Wide, where)
    vram = budget(model, "cpu")
    with carom.stream(model, device="cpu", vram=vram, ram="8MB", disk=tmp_path) as session:
        assert_same(expected, infer(model, Wide, where))
        assert not on_disk(session) and not spill_files(tmp_path)
        session.set_budget(ram=RAM)
        assert on_disk(session) and len(spill_files(tmp_path)) == 1
        assert_same(expected, infer(model, Wide, where))
        session.set_budget(ram="8MB")
        infer(model, Wide, where)
        before = session.report().disk_bytes_per_step
        assert_same(expected, infer(model, Wide, where))
        assert session.report().disk_bytes_per_step <= before


@on_some_devices
def test_values_are_read_and_written_while_they_are_on_disk(tmp_path, device):
    model = mapped(wide(), tmp_path)
    where, vram = place(device), budget(model, device)
    name = "blocks.5.0.weight"
    old, new = model.get_parameter(name).clone(), torch.randn(128, 128)
    with carom.stream(model, device=device, vram=vram, ram=4 * 65536 + RAM, disk="auto") as session:
        assert torch.equal(session.read(name), old)
        session.write(name, new)
        changed = infer(model, Wide, where)
    assert torch.equal(model.get_parameter(name), new)
    assert torch.equal(load_file(tmp_path / "model.safetensors")[name], old), "the file keeps its value"
    assert_same(changed, infer(model.to(where), Wide, where))


@MAPS
def test_pages_that_were_written_are_not_taken_from_the_file(tmp_path):
    model = mapped(wide(), tmp_path)
    with torch.no_grad():
        model.blocks[3][0].weight[5, 7] = 9.0
    where = torch.device("cpu")
    expected = infer(model, Wide, where)
    with carom.stream(model, device="cpu", vram=budget(model, "cpu"), ram=4 * 65536, disk="auto") as session:
        assert on_disk(session)
        assert_same(expected, infer(model, Wide, where))
    assert model.blocks[3][0].weight[5, 7] == 9.0


@MAPS
def test_memory_that_differs_from_the_file_is_not_taken_from_it(tmp_path, monkeypatch):
    """The system's list of mappings is taken as wrong here: the bytes decide."""
    from carom.core.checkpoint import mapped_views

    weight = mapped(wide(), tmp_path).blocks[3][0].weight
    assert mapped_views.MappedViews().find(weight) is not None
    listed = mapped_views.mapped_files()
    moved = [replace(one, start=one.start - 4096, end=one.end - 4096) for one in listed]
    monkeypatch.setattr(mapped_views, "mapped_files", lambda: moved)
    assert mapped_views.MappedViews().find(weight) is None


# -- files


def test_the_spill_file_is_deleted_with_its_last_use(tmp_path):
    model = wide()
    with carom.stream(model, device="cpu", vram=budget(model, "cpu"), ram=RAM, disk=tmp_path):
        assert len(spill_files(tmp_path)) == 1
    assert len(spill_files(tmp_path)) == 1, "the module's tensors are views of it"
    del model
    gc.collect()
    assert not spill_files(tmp_path)


def test_the_same_bytes_are_written_once(tmp_path):
    first, second = wide(), wide()
    vram = budget(first, "cpu")
    with carom.stream(first, device="cpu", vram=vram, ram=RAM, disk=tmp_path):
        pass
    with (
        carom.stream(first, device="cpu", vram=vram, ram=RAM, disk=tmp_path),
        carom.stream(second, device="cpu", vram=vram, ram=RAM, disk=tmp_path),
    ):
        assert len(spill_files(tmp_path)) == 1
        assert_same(infer(first, Wide, torch.device("cpu")), infer(second, Wide, torch.device("cpu")))


def test_a_weight_written_after_close_does_not_change_another_model(tmp_path):
    """The two models have equal bytes, so they stream from one file."""
    first, second, third = wide(), wide(), wide()
    vram = budget(first, "cpu")
    for model in (first, second):
        with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path):
            pass
    with torch.no_grad():
        for weight in first.parameters():
            weight.add_(1)  # as a LoRA that is merged
    with carom.stream(third, device="cpu", vram=vram, ram=RAM, disk=tmp_path):
        assert len(spill_files(tmp_path)) == 1
    for name, expected in wide().named_parameters():
        assert torch.equal(first.get_parameter(name), expected + 1), name
        assert torch.equal(second.get_parameter(name), expected), name
        assert torch.equal(third.get_parameter(name), expected), name


def test_spilled_weights_that_changed_are_written_again(tmp_path):
    model, where = wide(), torch.device("cpu")
    vram = budget(model, "cpu")
    with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path):
        pass
    with torch.no_grad():
        model.blocks[2][1].weight.mul_(3)
    expected = infer(copy.deepcopy(model), Wide, where)
    with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path):
        assert_same(expected, infer(model, Wide, where))


@pytest.mark.parametrize("changed", ["the tensor that was spilled", "another tensor"])
def test_bytes_that_differ_only_between_the_samples_are_written_again(tmp_path, changed):
    first = torch.arange(16384.0)  # 64 KiB; 4 KiB at both ends and in the middle are sampled
    (kept,) = spilling.spill([first], tmp_path)
    spilling.allow_writes([kept.view])
    other = kept.view if changed == "the tensor that was spilled" else first.clone()
    other[4000] = -1
    (again,) = spilling.spill([other], tmp_path)
    assert torch.equal(again.view, other) and len(spill_files(tmp_path)) == 2
    assert load_range(again.range) == other.numpy().tobytes()
    assert load_range(kept.range) == first.numpy().tobytes()


def test_a_full_disk_is_an_error_that_leaves_the_module_and_no_file(tmp_path, monkeypatch):
    model, where = wide(), torch.device("cpu")
    expected, vram = infer(model, Wide, where), budget(model, "cpu")
    written = []

    def write(handle: int, data: memoryview) -> int:
        written.append(len(data))
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    monkeypatch.setattr(spilling.os, "write", write)
    with pytest.raises(carom.BudgetError, match=r"has .* free; make room, name a folder on another drive"):
        carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    assert_same(expected, infer(model, Wide, where))


@pytest.mark.parametrize("vram", [150_000, "auto"])
def test_a_full_drive_names_no_least_budget(tmp_path, monkeypatch, vram):
    """With the drive's bytes as ``least_bytes``, callers would try again with that budget."""
    monkeypatch.setattr(spill_file.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    device = carom.SimulatedDevice()
    monkeypatch.setattr(
        SimulatedEngine, "free_bytes", lambda engine: (1 << 30) + 400_000
    )  # "auto" leaves 1 GiB
    with pytest.raises(carom.BudgetError, match=r"the drive has 0 B free; make room") as raised:
        carom.stream(wide(), device=device, vram=vram, ram=RAM, disk=tmp_path)
    assert raised.value.least_bytes is None


@pytest.mark.parametrize("error", [carom.BudgetError, KeyboardInterrupt])
def test_a_smaller_ram_that_cannot_spill_leaves_a_working_session(tmp_path, monkeypatch, error):
    model, where = wide(), torch.device("cpu")
    expected, vram = infer(model, Wide, where), budget(model, "cpu")

    def fails(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left") if error is carom.BudgetError else error

    with carom.stream(model, device="cpu", vram=vram, ram="8MB", disk=tmp_path) as session:
        monkeypatch.setattr(spill_file.SpillFile, "flush", fails)
        with pytest.raises(error):
            session.set_budget(ram=RAM)
        if error is carom.BudgetError:  # the previous budget is in effect
            assert inside(session).ram == 8_000_000 and not session.parked
            assert_same(expected, infer(model, Wide, where))
        assert not spill_files(tmp_path)
        monkeypatch.undo()
        session.set_budget(ram=RAM)
        assert_same(expected, infer(model, Wide, where))
        assert on_disk(session)
    assert_same(expected, infer(model, Wide, where))


def test_an_interrupt_while_spilling_leaves_the_module_and_no_file(tmp_path, monkeypatch):
    model, where = wide(), torch.device("cpu")
    expected, vram = infer(model, Wide, where), budget(model, "cpu")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spill_file.SpillFile, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    assert_same(expected, infer(model, Wide, where))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    model = wide()
    with pytest.raises(carom.WeightsError, match="no file can be written there"):
        carom.stream(
            model, device="cpu", vram=budget(model, "cpu"), ram=RAM, disk=tmp_path / "file" / "folder"
        )


@pytest.mark.parametrize("disk", ["", 3, True])
def test_what_names_no_folder_is_refused(disk):
    with pytest.raises(carom.UnsupportedError, match="name a folder, or choose 'auto' or None"):
        carom.stream(wide(), device="cpu", disk=disk)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"], ids=["too long", "null character"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, name):
    model = wide()
    with pytest.raises(carom.WeightsError, match="no file can be written there .*name a folder"):
        carom.stream(model, device="cpu", vram=budget(model, "cpu"), ram=RAM, disk=tmp_path / name)


@LINUX
def test_files_of_another_process_with_the_same_number_do_not_matter(tmp_path):
    # A container numbers its processes alike each time it starts. What a killed one left is deleted.
    number = next(spill_file._number)
    left = [tmp_path / f"carom-spill-{os.getpid()}-{number + more}.bin" for more in range(1, 4)]
    for path in left:
        path.write_bytes(b"left")
    kept = spilling.spill([torch.randn(5000)], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [Path(kept[0].range.file.path).name]
    assert Path(kept[0].range.file.path).stat().st_size == 20480


@LINUX
def test_a_file_in_use_by_a_process_with_the_same_number_is_left_alone(tmp_path):
    import fcntl

    number = next(spill_file._number)
    path = tmp_path / f"carom-spill-{os.getpid()}-{number + 1}.bin"
    path.write_bytes(b"in use")
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        kept = spilling.spill([torch.randn(5000)], tmp_path)
        assert path.read_bytes() == b"in use" and kept[0].range.file.path != str(path)
        second = spilling.spill([torch.randn(6000)], tmp_path)
        assert len(spill_files(tmp_path)) == 3, "this process's first file is in use too"
    assert len(second) == 1


@LINUX
@pytest.mark.parametrize(
    "name", ["a b", "x (deleted)", "new\nline", "form\fa b c d e /feed", "\x1c1-2 r 0 0 7 /x"], ids=ascii
)
def test_a_mapped_file_of_any_name_is_found_or_passed_over(tmp_path, name):
    path = tmp_path / name / "model.safetensors"
    path.parent.mkdir(parents=True)
    save_file({"weight": torch.randn(5000)}, path)
    tensor = load_file(path)["weight"]
    found = MappedViews().find(tensor)
    if "\n" in name:  # the system writes it as four characters, which may also be a name
        assert found is None
    else:
        assert found is not None and found.file.path == str(path)
        assert load_range(found) == tensor.numpy().tobytes()


@LINUX
def test_a_killed_process_leaves_a_file_that_the_next_one_deletes(tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal, torch
        from carom.core.checkpoint.spill import spill
        kept = spill([torch.randn(5000)], {str(tmp_path)!r})
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    left = spill_files(tmp_path)
    assert len(left) == 1
    kept = spilling.spill([torch.randn(6000)], tmp_path)
    assert len(spill_files(tmp_path)) == 1 and spill_files(tmp_path) != left
    assert len(kept) == 1


@MAPS
def test_two_processes_with_one_folder_leave_each_other_alone(tmp_path):
    kept = spilling.spill([torch.randn(5000)], tmp_path)
    script = textwrap.dedent(
        f"""
        import torch
        from carom.core.checkpoint.spill import spill
        kept = spill([torch.randn(5000)], {str(tmp_path)!r})
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert len(spill_files(tmp_path)) == 1, "this process's file is left; the other one's is gone"
    assert len(kept) == 1


# -- what is left alone


def test_trainable_weights_do_not_move_to_disk(tmp_path):
    model = wide().requires_grad_(True)
    vram = some_vram(model, "cpu", 0.4, slots=2, training="stream")
    with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path, training="stream") as session:
        assert not on_disk(session)
    assert not spill_files(tmp_path)


def test_a_frozen_weight_on_disk_refuses_gradients_and_changes_in_place(tmp_path):
    model = wide()
    with carom.stream(model, device="cpu", vram=budget(model, "cpu"), ram=RAM, disk=tmp_path) as session:
        name = inside(session).streamed[0].weights[0]
        weight = model.get_parameter(name)
        with pytest.raises(carom.UnsupportedError, match="cannot be trained"):
            weight.requires_grad_(True)
        with torch.no_grad(), pytest.raises(carom.UnsupportedError, match=r"session\.write"):
            weight.mul_(2)


def test_a_write_that_would_be_lost_is_refused(tmp_path):
    model, one = wide(), torch.ones(128, 128)
    with carom.stream(model, device="cpu", vram=budget(model, "cpu"), ram=RAM, disk=tmp_path) as session:
        name = inside(session).streamed[0].weights[0]
        weight = model.get_parameter(name)
        value = session.read(name)
        for write in (
            lambda: torch.add(one, one, out=weight),
            lambda: torch.add(one, one, out=weight.data),
            lambda: torch._foreach_mul_([weight], 2.0),
            lambda: torch._foreach_copy_([weight.data], [one]),
        ):
            with torch.no_grad(), pytest.raises(carom.UnsupportedError, match="would be lost"):
                write()
        # reading the weight into another tensor is no write to it
        with torch.no_grad():
            assert torch.equal(torch.add(weight, one, out=torch.empty(128, 128)), value + one)
        assert torch.equal(session.read(name), value)


def test_a_weight_whose_dtype_no_file_has_stays_on_the_device(tmp_path):
    model, where = wide(), torch.device("cpu")
    model.register_parameter(
        "wave", nn.Parameter(torch.ones(512, dtype=torch.complex128), requires_grad=False)
    )
    expected, vram = infer(model, Wide, where), budget(model, "cpu") + 8192
    with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path) as session:
        assert on_disk(session)
        assert_same(expected, infer(model, Wide, where))
        assert "wave" in [kept.name for kept in session.report().resident_by_need]


def test_with_auto_and_no_mapped_file_weights_stay_in_memory(tmp_path):
    model = wide()
    with carom.stream(model, device="cpu", vram=budget(model, "cpu"), ram=RAM, disk="auto") as session:
        assert not on_disk(session)
