"""The disk tier's benchmark in miniature: what the GPU run measures is measured, exact, and on record whenever it ends."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from carom.benchmarks.results.render import read
from safetensors.torch import load_file, save_file

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads and writes as Linux does")
SMALL = {
    "width": 128, "inner": 256, "heads": 4, "vocab": 512, "layers": 6, "lora-layers": 4, "rate-layers": 3, "packed-layers": 4, "tokens": 16,
    "swept": 1 << 20, "lora-vram": "1MiB", "lora-ram": "512KiB", "rate-vram": "1MiB", "rate-ram": "256KiB",
}  # fmt: skip


def bench(
    root: Path, folder: Path, seconds: int, timeout: int, *more: str
) -> tuple[subprocess.CompletedProcess, dict]:
    record = folder / "record.json"
    sizes = [item for name, value in SMALL.items() for item in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "tiers" / "disk_gpu.py"), "--device", "cpu", "--seconds", str(seconds),
         "--folder", str(folder), "--record", str(record), *sizes, *more],
        capture_output=True, text=True, check=False, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done, json.loads(record.read_text("utf-8"))


@linux
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_run_measures_everything_and_is_exact(root, tmp_path):
    pytest.importorskip("transformers"), pytest.importorskip("peft")
    done, record = bench(root, tmp_path, 300, 350)
    assert done.returncode == 0, done.stderr + done.stdout
    result = record["result"]
    assert json.loads(done.stdout.splitlines()[-1]) == result and not record["interrupted"]
    first, lora, rate = result["first_output"], result["lora"], result["rate"]
    assert result["make"]["layers"] == 6 and len(result["raw"]["sweep"]) == 12
    assert first["bit_exact"] and first["second_bit_exact"]
    assert 0 < first["ready_seconds"] < first["first_output_seconds"] and first["first_output_of_raw"] > 0
    assert first["ram_peak_bytes"] <= first["ram_budget_bytes"] == first["weights_bytes"] // 8
    assert 0 < first["anonymous_over_ram_and_process"] <= first["rss_over_ram_and_process"] < 300_000_000
    assert lora["adapters_bit_identical_to_plain"] and lora["adapters_bit_identical_to_in_backward"]
    assert (
        lora["adapters"] == 4 * 7 * 2 and lora["compared"]["losses"] == result["resident"]["plain"]["losses"]
    )
    assert len(lora["timed"]["seconds"]) == 3 and lora["of_binding_stage"] > 0
    assert result["packed"]["bit_exact"]
    assert lora["disk_bytes_per_step"] > 0 and rate["disk_bytes_per_step"] > 0 and rate["of_raw"] > 0
    assert [p for p in tmp_path.iterdir() if p.name != "record.json"] == []


@linux
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_packed_file_is_measured_alone_beside_the_raw_one(root, tmp_path):
    pytest.importorskip("transformers")
    done, record = bench(root, tmp_path, 150, 180, "--parts", "packed")
    assert done.returncode == 0, done.stderr + done.stdout
    result = record["result"]
    assert set(result) == {"seconds", "packed"} and not record["interrupted"]
    found = result["packed"]
    raw, packed = found["raw"], found["packed"]
    assert found["bit_exact"] and raw["bit_exact"] and packed["bit_exact"]
    assert raw["vram_budget_bytes"] == packed["vram_budget_bytes"] == found["weights_bytes"] // 4
    assert raw["ram_budget_bytes"] == packed["ram_budget_bytes"] == found["weights_bytes"] // 8
    assert found["pack"]["codecs"]["lossless"] > 0 and packed["file_bytes"] < 0.8 * raw["file_bytes"]
    assert 0 < packed["disk_bytes_per_step"] < 0.8 * raw["disk_bytes_per_step"]
    for run in (raw, packed):
        assert run["first_output_seconds"] > run["ready_seconds"] > 0 and len(run["passes_seconds"]) >= 2
        assert run["pass_seconds"] > 0 and run["wire_bytes_per_step"] > 0 and run["of_plain"] > 0
    # On the CPU nothing is unpacked on the device: the record says so.
    assert raw["decoded_bytes"] == {"device": 0, "host": 0}
    assert (
        packed["decoded_bytes"]["device"] == 0
        and packed["decoded_bytes"]["host"] > 0.9 * found["weights_bytes"]
    )
    assert (
        found["of_raw"]["disk_bytes_per_step"] == packed["disk_bytes_per_step"] / raw["disk_bytes_per_step"]
    )
    assert [p for p in tmp_path.iterdir() if p.name != "record.json"] == []


NF4 = {
    "tokens": 16, "nf4-width": 256, "nf4-inner": 896, "nf4-heads": 4, "nf4-kv-heads": 1, "nf4-vocab": 512, "nf4-layers": 6,
    "nf4-compared-layers": 3, "nf4-vram": "4MB", "nf4-ram": "2MB",
}  # fmt: skip


def nf4_bench(root: Path, folder: Path, **more: object) -> tuple[subprocess.CompletedProcess, dict]:
    wanted = {**NF4, "parts": "nf4", **more}
    options = [item for name, value in wanted.items() for item in (f"--{name}", str(value))]
    return bench(root, folder, 150, 180, *options)


@linux
@pytest.mark.timeout(200)
def test_lora_over_nf4_codes_is_measured_and_exact(root, tmp_path):
    pytest.importorskip("transformers"), pytest.importorskip("peft")
    done, record = nf4_bench(root, tmp_path, device="simulated")
    assert done.returncode == 0, done.stderr + done.stdout
    found = record["result"]["nf4"]
    compared = found["compared"]
    assert not record["interrupted"] and found["layers"] == found["layers_wanted"] == 6
    # 4 bits and a scale of 32 bits for 64 weights: 4.5 bits a weight instead of 16.
    quantised = found["weights_bytes"] - found["unquantised_bytes"]
    assert found["quantised_bytes"] == quantised * 4.5 / 16
    assert compared["layers"] == 3 and compared["adapters"] == 3 * 7 * 2
    assert compared["adapters_bit_identical"] and compared["losses_identical"]
    assert compared["packed_units"] > 0 and compared["wire_bytes_per_step"] > 0
    assert found["packed_units"] > 0 and 0 < found["wire_of_file_bytes"] < 1.2
    assert 0 < found["wire_bytes_per_step"] < 0.4 * found["raw_bytes_per_step"]
    assert found["disk_bytes_per_step"] > 0  # `ram` does not hold the units that cross the link
    assert found["vram_peak_bytes"] <= found["vram_budget_bytes"] == 4_000_000
    assert found["ram_peak_bytes"] <= found["ram_budget_bytes"] == 2_000_000
    assert len(set(found["timed"]["losses"])) == len(found["timed"]["seconds"]) >= 1
    assert found["of_roofline"] > 0 and found["anon_rss_over_ram_and_process"] < 300_000_000
    assert [p for p in tmp_path.iterdir() if p.name != "record.json"] == []
    rows = read(tmp_path / "record.json").rows
    assert [row.metric for row in rows] == [
        "step", "bytes of the link in a step", "bytes of the drive in a step"
    ]  # fmt: skip
    assert rows[0].same_bits and rows[0].floor == found["roofline_seconds"]
    assert "6 layers" in rows[0].group and "0.004 GB of vram" in rows[0].case
    assert rows[1].value == found["wire_bytes_per_step"] / 1e9


def test_a_drive_without_room_for_the_nf4_file_is_an_error_that_names_the_setting(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    nf4 = importlib.import_module("carom.benchmarks.tiers.disk_nf4")
    llama = importlib.import_module("carom.benchmarks.tiers.disk_llama")
    shape = llama.Shape(128, 256, 4, 512, 2)
    part = SimpleNamespace(
        args=SimpleNamespace(nf4_layers=2),
        folder=tmp_path,
        meta=lambda layers: llama.build(shape, layers, "meta"),
    )
    monkeypatch.setattr(nf4.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(OSError, match="free; set a smaller --nf4-layers"):
        nf4.make(part, lambda *_: pytest.fail("wrote a file"))
    assert list(tmp_path.iterdir()) == []


@linux
def test_the_nf4_file_is_one_that_carom_pack_could_have_written(tmp_path):
    pytest.importorskip("transformers")
    nf4 = importlib.import_module("carom.benchmarks.tiers.disk_nf4")
    llama = importlib.import_module("carom.benchmarks.tiers.disk_llama")
    verify_packed = importlib.import_module("carom.tools.pack.verify").verify_packed
    pack = importlib.import_module("carom.tools.pack.writer").pack
    carom = importlib.import_module("carom")
    model = llama.build(llama.Shape(128, 256, 4, 512, 2), 2, "meta")
    names = llama.in_order_of_use(model)
    torch.manual_seed(0)
    written = (nf4._draw(name, tensor, 0.02, torch.device("cpu")) for name, tensor in names)
    llama.write_stored(str(tmp_path / "drawn.safetensors"), written, nf4.SCHEME)
    assert verify_packed(tmp_path / "drawn.safetensors")[0] == len(names)
    values = carom.load_file(tmp_path / "drawn.safetensors")
    save_file(values, tmp_path / "raw.safetensors")
    pack(tmp_path / "raw.safetensors", tmp_path / "packed.safetensors", quant="nf4", device="cpu")
    codec_name = importlib.import_module("carom.core.checkpoint.packed_source").codec_name
    open_index = importlib.import_module("carom.core.checkpoint.index").open_index
    drawn, packed = (open_index(tmp_path / f"{name}.safetensors") for name in ("drawn", "packed"))
    assert {n: codec_name(drawn[n]) for n in drawn} == {n: codec_name(packed[n]) for n in packed}
    weight = values["model.layers.1.mlp.up_proj.weight"].float()
    assert weight.shape == (256, 128) and 0.018 < weight.std() < 0.024


def test_bytes_that_the_device_unpacks_are_told_from_those_that_the_host_does(tmp_path):
    carom = importlib.import_module("carom")
    decoded = importlib.import_module("carom.benchmarks.tiers.disk_packed").decoded
    pack = importlib.import_module("carom.tools.pack.writer").pack
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(6))).to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "raw.safetensors")
    pack(tmp_path / "raw.safetensors", tmp_path / "packed.safetensors", codec="lossless", device="cpu")
    for device, there in ((carom.SimulatedDevice(seed=0), True), ("cpu", False)):
        with torch.device("meta"):
            empty = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(6)))
        empty = empty.to(torch.bfloat16).requires_grad_(False)
        with carom.stream(
            empty, device=device, vram="2560KiB", ram="4MiB", weights=tmp_path / "packed.safetensors"
        ) as session:
            found, report = decoded(session), session.report().to_dict()
            assert sum(found.values()) == 6 * 512 * 512 * 2
            assert (found["device"] >= report["streamed_bytes"] > 0) == there and (
                found["device"] > 0
            ) == there


@linux
def test_an_unknown_part_is_bad_use(root, tmp_path):
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "tiers" / "disk_gpu.py"), "--parts", "packed,all", "--folder", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "--parts: 'all'" in done.stderr and list(tmp_path.iterdir()) == []


@linux
def test_a_run_without_time_ends_in_time_and_says_what_is_missing(root, tmp_path):
    done, record = bench(root, tmp_path, 6, 60)
    assert done.returncode == 1 and "make_failed" in done.stderr
    assert record["interrupted"] and record["result"]["make_failed"] == {"killed": "the time was over"}


@linux
def test_the_made_file_is_a_packed_checkpoint(tmp_path):
    llama = importlib.import_module("carom.benchmarks.tiers.disk_llama")
    verify_packed = importlib.import_module("carom.tools.pack.verify").verify_packed
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(3, 700), "a": torch.randn(2048), "model.c": torch.randn(2048, 2050), "last": torch.randn(1),
    }  # fmt: skip
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    path = tmp_path / "model.safetensors"
    assert llama.write_packed(str(path), tensors.items()) == path.stat().st_size
    found = load_file(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    index = importlib.import_module("carom.core.checkpoint.index").open_index(path)
    assert list(index) == list(tensors) and all(entry.offset % 4096 == 0 for entry in index.entries.values())
    assert index.packed and verify_packed(path) == (4, sum(tensor.nbytes for tensor in tensors.values()))


@linux
def test_the_check_of_a_checkpoint_larger_than_ram_runs_to_its_end(root, tmp_path):
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "tiers" / "disk_stream.py"), "--size", "24MiB", "--width", "256", "--ram", "4MiB",
         "--vram", "4MiB", "--folder", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bit_exact"] and found["packed"] and found["ram_peak_bytes"] <= 4 << 20
    assert found["raw_bytes_per_second"] > 0 and found["first_output_seconds"] > found["ready_seconds"] > 0


@pytest.mark.parametrize("name", ["disk_stream", "disk_read", "disk_gpu"])
@pytest.mark.parametrize("option, path", [("--folder", "none"), ("--record", "none/record.json")])
def test_a_folder_that_is_not_there_is_bad_use_before_anything_is_run(root, tmp_path, name, option, path):
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "tiers" / f"{name}.py"), option, str(tmp_path / path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (
        done.returncode == 2
        and f"{option} {tmp_path / path}" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert list(tmp_path.iterdir()) == []
