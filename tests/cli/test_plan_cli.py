"""`carom plan` and `carom doctor` as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tests_stand_in_machines as stand_in
import torch
from carom.cli import main
from carom.tools.doctor import hardware
from carom.tools.planner import presets
from safetensors.torch import save_file

LLAMA = "plan llama-70b --quant nf4 --gpu rtx4090-note --nvme gen4 --ram 32GiB --mode train"
GLM = "plan glm-4.7 --quant nf4+nf2 --gpu rtx4090-note --nvme gen4 --ram 32GiB --mode train"


def ask(capsys, line, code=0):
    assert main.main(line.split()) == code
    return capsys.readouterr()


def answer(capsys, line, code=0):
    return json.loads(ask(capsys, f"{line} --json", code).out)


def test_llama_70b_on_a_4090_is_the_published_plan(capsys):
    found = answer(capsys, LLAMA)
    assert (found["resident_layers"], found["streamed_layers"]) == (41, 39)
    assert 512 <= found["zero_overhead_tokens"] <= 1024
    assert found["thresholds"]["published_rule"] == found["zero_overhead_tokens"] == pytest.approx(831, abs=2)
    assert found["thresholds"]["two_transfers"] == pytest.approx(1663, abs=4)
    assert found["thresholds"]["by_phase_from_drive"] == pytest.approx(2494, abs=6)
    assert found["zero_overhead_tokens"] < found["zero_overhead_tokens_by_phase"] < 2494


def test_glm_on_a_4090_is_the_published_plan(capsys):
    found = answer(capsys, GLM)
    assert (found["resident_layers"], found["streamed_layers"]) == (14, 78)
    assert found["zero_overhead_tokens"] == pytest.approx(8192, rel=0.06)
    assert found["bound_by"] == "disk"


def test_flux2_is_explained_in_words(capsys):
    text = ask(capsys, "plan flux2-dev --gpu rtx4090 --ram 128GiB").out
    assert "does not fit" in text and "stay on the card" in text and "wait in RAM" in text
    assert "What would change it" in text and "VRAM:" in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_a_model_that_fits_is_told_to_fit(capsys):
    text = ask(capsys, "plan sdxl --gpu rtx4090").out
    assert "It fits" in text and "slots" not in text
    found = answer(capsys, "plan sdxl --gpu rtx4090")
    assert found["overhead"] == 0 and found["zero_overhead_tokens"] == 0 and found["vram"]["slot_bytes"] == 0


def test_the_uses_of_vram_add_up_and_fit_the_card(capsys):
    for line in (LLAMA, GLM, "plan flux2-dev --gpu rtx3060 --ram 128GiB"):
        vram = answer(capsys, line)["vram"]
        uses = ("resident", "slot", "adapter", "gradient", "optimizer", "activation", "context")
        assert sum(vram[f"{use}_bytes"] for use in uses) == vram["total_bytes"] <= vram["capacity_bytes"]


def test_a_vram_budget_bounds_the_weights(capsys):
    found = answer(capsys, "plan flux2-dev --gpu rtx4090 --vram 8GiB")
    assert found["vram"]["weights_bytes"] <= 8 << 30


def test_the_best_batch_is_at_least_as_good_as_one_sample(capsys):
    found = answer(capsys, GLM)
    assert found["best"]["tokens_per_second"] >= found["tokens"] / found["step_seconds"]
    assert found["best"]["resident_layers"] < found["resident_layers"], (
        "evicting layers for a larger batch pays here"
    )


def test_what_if_names_the_options_that_ask_for_it(capsys):
    found = answer(capsys, GLM)
    for change in found["what_if"]:
        again = answer(capsys, f"{GLM} {change['option']}")
        assert again["step_seconds"] == pytest.approx(change["step_seconds"], rel=1e-9), change
        assert found["step_seconds"] / again["step_seconds"] == pytest.approx(change["speedup"])


def test_the_lossless_codec_is_dropped_where_it_would_cost(capsys):
    line = "plan flux2-dev --gpu rtx4090 --link 11GB --ram 128GiB --codec lossless"
    assert answer(capsys, line)["codec"] == "lossless"
    many = answer(capsys, f"{line} --tokens 32768")
    assert many["codec"] == "raw" and many["overhead"] == 0


@pytest.mark.parametrize("line, near", [
    ("plan flux3-dev --gpu rtx4090", "flux2-dev"), ("plan sdxl --gpu rtx4091", "rtx4090"),
    ("plan sdxl --gpu rtx4090 --quant nf5", "nf4"), ("plan sdxl --gpu rtx4090 --nvme gen6", "gen5"),
])  # fmt: skip
def test_an_unknown_name_is_bad_use_and_gives_the_nearest(capsys, line, near):
    assert near in ask(capsys, line, code=2).err
    assert near in answer(capsys, line, code=2)["message"]


@pytest.mark.parametrize("asked", ["nosuch", "flux3-dev"])
def test_a_model_that_is_neither_a_name_nor_a_path_is_told_that_both_are_possible(capsys, asked):
    said = ask(capsys, f"plan {asked} --gpu rtx4090", code=2).err
    assert "flux2-dev" in said
    assert "path to a checkpoint" in said and "folder" in said and f"called '{asked}'" in said


def test_an_encoder_makes_a_forward_pass_and_generates_nothing(capsys, tmp_path):
    tensors = {"embeddings.word_embeddings.weight": torch.zeros(100, 64)}
    for layer in range(2):
        tensors[f"encoder.layer.{layer}.attention.self.query.weight"] = torch.zeros(64, 64)
        tensors[f"encoder.layer.{layer}.output.dense.weight"] = torch.zeros(64, 256)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = ask(capsys, f"plan {tmp_path} --gpu rtx4090").out
    assert "One forward pass over 512 tokens (512-token sequence)" in " ".join(text.split())
    for word in ("sampling", "image", "VAE", "new token", "KV cache"):
        assert word not in text, word


@pytest.mark.parametrize("model, said, unsaid", [
    ("llama3-8b", ("One forward pass over 1,024 tokens", "one new token takes", "KV cache"), ("sampling", "VAE")),
    ("flux1-dev", ("One sampling step over 4,608 tokens", "VAE"), ("forward pass", "new token", "KV cache")),
])  # fmt: skip
def test_each_kind_of_model_is_spoken_of_in_its_own_words(capsys, model, said, unsaid):
    text = " ".join(ask(capsys, f"plan {model} --gpu rtx4090").out.split())
    assert all(words in text for words in said) and not any(words in text for words in unsaid), text


@pytest.mark.parametrize("more", [
    "--tokens 0", "--tokens -5", "--tokens 99999999999", "--rank 0", "--ram lots", "--vram=-1GiB", "--link 3", "--nvme 7XB",
    "--gds", "--compute nvfp4", "--plot picture.txt", "--quant nf4+nf2+nf3",
])  # fmt: skip
def test_a_bad_setting_is_bad_use(capsys, more):
    assert ask(capsys, f"plan flux2-dev --gpu rtx4090 {more}", code=2).err.startswith("carom plan:")


@pytest.mark.parametrize("line, option", [
    ("plan flux2-dev --gpu rtx4090 --ram 16GiB", "--ram"), ("plan flux2-dev --gpu rtx4090 --vram 1GiB", "--vram"),
])  # fmt: skip
def test_an_impossible_budget_says_the_least_that_works(capsys, line, option):
    message = answer(capsys, line, code=1)["message"]
    least = message.split(f"{option} ")[1].split(",")[0].split()[0]
    assert least.endswith("MiB")
    answer(capsys, f"{line.rsplit(maxsplit=2)[0]} {option} {least}")
    answer(capsys, f"{line.rsplit(maxsplit=2)[0]} {option} {int(least[:-3]) - 1}MiB", code=1)


def test_a_card_too_small_says_how_much_it_takes(capsys):
    assert "least that works" in answer(capsys, "plan glm-4.7 --gpu rtx4060 --nvme gen4", code=1)["message"]


def test_a_checkpoint_is_planned_as_it_is_stored(capsys, tmp_path):
    tensors = {f"blocks.{i}.w.weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn) for i in range(4)}
    save_file(tensors, tmp_path / "m.safetensors")
    found = answer(capsys, f"plan {tmp_path / 'm.safetensors'} --gpu rtx4090")
    assert (found["layers"], found["model_bytes"], found["quant"]) == (4, 4 * 64 * 64, "as stored")
    assert (
        answer(capsys, f"plan {tmp_path / 'm.safetensors'} --gpu rtx4090 --quant bf16")["model_bytes"]
        == 8 * 64 * 64
    )


def test_a_bad_checkpoint_fails_with_weights_error(capsys, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(b"\xff" * 64)
    assert (
        answer(capsys, f"plan {tmp_path / 'm.safetensors'} --gpu rtx4090", code=1)["error"] == "WeightsError"
    )
    assert answer(capsys, "plan gone.ckpt --gpu rtx4090", code=1)["error"] == "WeightsError"


def test_every_named_shape_can_be_planned_in_both_modes(capsys):
    from carom.tools.planner import shapes

    for name in shapes.SHAPES:
        quant = "nf4+nf2" if name == "glm-4.7" else "nf4"
        for mode in ("infer", "train"):
            found = answer(
                capsys, f"plan {name} --gpu rtx5090 --nvme gen5 --ram 64GiB --quant {quant} --mode {mode}"
            )
            assert found["step_seconds"] > 0 and found["source"]


def test_the_plot_is_written_whole_and_only_there(capsys, tmp_path):
    path = tmp_path / "p.png"
    ask(capsys, f"{LLAMA} --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.png"]


def test_a_plot_into_a_folder_that_is_not_there_is_bad_use_and_names_it(capsys, tmp_path):
    target = tmp_path / "absent" / "p.png"
    assert f"no folder {target.parent}" in ask(capsys, f"{LLAMA} --plot {target}", code=2).err
    assert answer(capsys, f"{LLAMA} --plot {target}", code=2)["error"] == "ValueError"
    assert not target.parent.exists()


def test_a_plot_that_cannot_be_written_fails_cleanly(capsys, tmp_path):
    (tmp_path / "p.png").mkdir()
    said = ask(capsys, f"{LLAMA} --plot {tmp_path / 'p.png'}", code=1).err
    assert f"--plot '{tmp_path / 'p.png'}' cannot be written: " in said and "Errno" not in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.png"]


def test_what_a_plan_for_a_named_card_takes_for_granted_is_said(capsys):
    text = " ".join(ask(capsys, "plan flux2-dev --gpu rtx4090").out.split())
    assert (
        "Assumed: nothing else uses the RTX 4090; its link copies 25 GB/s (PCIe 4.0 x16; --link sets it); there is RAM for all"
        in text
    )
    given = " ".join(ask(capsys, "plan flux2-dev --gpu rtx4090 --ram 128GiB --link 22GB").out.split())
    assert "Assumed: nothing else uses the RTX 4090; the host needs 0.46 ms of Python for each layer" in given


def test_where_python_binds_it_is_said(capsys):
    """A card that holds the model computes a few tokens in less time than Python takes to issue them."""
    found = answer(capsys, "plan flux2-dev --gpu h200 --tokens 16")
    layers = sum(group["count"] for group in found["groups"])
    assert found["bound_by"] == "host" and found["streamed_layers"] == 0 and found["overhead"] == 0
    assert found["step_seconds"] == pytest.approx(layers * presets.HOST_COST.layer)
    assert found["hardware"]["host_source"] == presets.HOST_COST.source
    record = next(word for word in presets.HOST_COST.source.split() if "records/" in word).rstrip(":")
    cases = json.loads((Path(__file__).parents[2] / record).read_text())["cases"]
    results = {case["key"]: case["result"] for case in cases if "host-infer" in case["key"]}
    plain = sorted(result["plain_us"] for result in results.values())[1]
    assert plain == pytest.approx(1e6 * presets.HOST_COST.layer, rel=0.01), "the figures are the record's"
    added = results["host-infer-streamed"]["added_us"]
    assert added == pytest.approx(1e6 * presets.HOST_COST.use, rel=0.01)
    text = " ".join(ask(capsys, "plan flux2-dev --gpu h200 --tokens 16").out.split())
    assert "Python, which issues the card's work, is the limit" in text
    many = answer(capsys, "plan flux2-dev --gpu h200 --tokens 65536")
    assert many["bound_by"] == "compute" and many["step_seconds"] == many["compute_seconds"]
    streams = answer(capsys, "plan z-image --gpu h200 --vram 2GiB --link 1000GB --tokens 16")
    uses = streams["streamed_layers"] * presets.HOST_COST.use
    assert streams["bound_by"] == "host" and streams["overhead"] > 0
    assert streams["step_seconds"] >= streams["resident_seconds"] + uses > uses


def test_the_weights_format_is_said_in_plain_words(capsys):
    text = " ".join(ask(capsys, GLM).out.split())
    assert "weights in nf4, about 4.4 bits each; routed experts in nf2, about 2.2 bits each" in text
    text = " ".join(ask(capsys, "plan llama-70b --quant nf4+nf2 --gpu rtx4090").out.split())
    assert "has no routed experts, so --quant nf4+nf2 is nf4 for all of it" in text
    assert "experts in nf2" not in text


def test_blocks_that_are_numbered_without_a_name_are_layers(capsys, tmp_path):
    tensors = {f"{i}.mlp.weight": torch.zeros(64, 64) for i in range(5)} | {"head.weight": torch.zeros(8, 64)}
    save_file(tensors, tmp_path / "m.safetensors")
    found = answer(capsys, f"plan {tmp_path / 'm.safetensors'} --gpu rtx4090")
    assert found["layers"] == 5
    assert [(g["name"], g["count"], g["is_layer"]) for g in found["groups"]] == [
        ("layers", 5, True), ("outside the layers", 1, False),
    ]  # fmt: skip


def test_the_plot_has_a_line_for_each_configuration_that_differs(capsys):
    from carom.cli import plan_plot
    from carom.tools.planner import model_plan, shapes
    from carom.tools.planner.estimate import Job, Machine

    asked = model_plan.plan(
        shapes.find_shape("flux2-dev"), Machine(presets.CARDS["rtx4090"], ram=128 << 30), Job()
    )
    lines = plan_plot.lines_of(asked)
    assert len(lines) == 1 + len(asked.what_if)
    assert all(overhead >= 0 for _, points in lines for _, overhead in points)


def test_probe_without_a_gpu_plans_for_the_reference_card_in_this_machine(capsys, monkeypatch):
    probed = stand_in.whole(memory=stand_in.memory_of())
    monkeypatch.setattr(hardware, "probe", lambda *_, **__: probed)
    found = answer(capsys, "plan sdxl --gpu probe")
    assert found["hardware"]["gpu"] == "RTX 4090" and "rtx4090" in found["remarks"][0]
    assert "No GPU to probe here" in found["remarks"][0]


def test_no_card_named_and_none_there_still_plans_and_says_for_what(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda *_, **__: stand_in.whole())
    found = answer(capsys, "plan sdxl")
    assert found["hardware"]["gpu"] == "RTX 4090" and "No GPU found" in found["remarks"][0]
    assert (
        "assumed to be an RTX 4090" in found["remarks"][0]
        and "whatever this machine has" in found["remarks"][1]
    )


def test_probe_plans_with_the_measured_figures(capsys, monkeypatch):
    gpu = stand_in.gpu_of(free=10 << 30)
    monkeypatch.setattr(hardware, "probe", lambda *_, **__: stand_in.whole(gpu, memory=stand_in.memory_of()))
    found = answer(capsys, "plan flux1-dev --gpu probe")
    assert found["hardware"]["link_bytes_per_second"] == 24e9 and found["hardware"]["flops"] == 155e12
    assert found["vram"]["total_bytes"] <= (10 << 30) + presets.CONTEXT_BYTES
    assert found["streamed_layers"] > 0 and found["host"]["drive_bytes"] == 0
    assert not any("Assumed" in remark for remark in found["remarks"]), "all of it was measured"
    assert found["hardware"]["host_seconds_per_layer"] == presets.HOST_COST.layer, (
        "but for what an older probe lacks"
    )
    gpu = stand_in.gpu_of(free=10 << 30, layer_seconds=2 * presets.HOST_COST.layer)
    found = answer(capsys, "plan flux1-dev --gpu probe")["hardware"]
    assert found["host_seconds_per_layer"] == 2 * presets.HOST_COST.layer
    assert found["host_seconds_per_streamed_layer"] == 2 * presets.HOST_COST.use
    assert found["host_source"] == "measured on this machine"


def test_the_commands_run_as_a_program_and_doctor_always_ends_well(carom_cli):
    done = carom_cli("doctor", "--json", "--no-disk")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"torch", "GPU", "RAM", "drive", "comfy-aimdo"} <= {
        finding["topic"] for finding in found["findings"]
    }
    assert all(finding["verdict"] and finding["remedy"] for finding in found["findings"])
    done = carom_cli("plan", "flux2-dev", "--gpu", "rtx4090", "--ram", "128GiB", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["layers"] == 56


def test_doctor_in_words_shows_each_finding_and_its_remedy(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda *_, **__: stand_in.whole(stand_in.gpu_of(free=4 << 30)))
    text = ask(capsys, "doctor").out
    assert "RTX 4090" in text and "-> models larger than this stream" in text
    monkeypatch.setattr(hardware, "probe", lambda *_, **__: stand_in.whole())
    assert "Missing: GPU; the arrows say what to do." in ask(capsys, "doctor").out


def test_planning_for_a_named_card_needs_no_torch(root, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('torch is broken')")
    (tmp_path / "carom").symlink_to(root, target_is_directory=True)
    path = os.pathsep.join([str(tmp_path / "broken"), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-m", "carom", "plan", "sdxl", "--gpu", "rtx4090"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "It fits" in done.stdout
