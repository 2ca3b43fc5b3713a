"""`carom plan job.yaml`: jobs of ai-toolkit planned on named cards."""

from __future__ import annotations

import json

import pytest
import torch
from carom.cli import main
from safetensors.torch import save_file

yaml = pytest.importorskip("yaml")

ON = "--gpu rtx4070 --ram 128GiB"
CARDS = {8: "rtx4060", 12: "rtx4070", 16: "rtx5060ti-16gb", 24: "rtx4090"}


def ask(capsys, line, code=0):
    assert main.main(line.split()) == code
    return capsys.readouterr()


def answer(capsys, line, code=0):
    return json.loads(ask(capsys, f"{line} --json", code).out)


@pytest.fixture
def job(tmp_path, root):
    """Writes a job like the example for Flux.2-dev on 12 GB without its offload lines, changed as the test says."""

    def write(model=None, name="job.yaml", **changes):
        example = root / "docs" / "ai-toolkit-examples" / "flux2-dev-12gb.yaml"
        data = yaml.safe_load(example.read_text("utf-8"))
        (process,) = data["config"]["process"]
        del process["model"]["offload"], process["model"]["offload_kwargs"]
        process["model"].update(model or {})
        for section, values in changes.items():
            if isinstance(values, dict):
                process[section] = {**process.get(section, {}), **values}
            else:
                process[section] = values
        path = tmp_path / name
        path.write_text(yaml.safe_dump(data), "utf-8")
        return path

    return write


def checkpoint(folder, layers=8, width=512):
    """Write a small diffusion transformer as a .safetensors file into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"blocks.{i}.{name}.weight": torch.zeros(width, width, dtype=torch.bfloat16)
        for i in range(layers)
        for name in ("a", "b")
    }
    save_file(tensors, folder / "model.safetensors")


def test_every_example_job_of_the_docs_is_planned_as_its_header_says(capsys, root):
    paths = sorted((root / "docs" / "ai-toolkit-examples").glob("*.yaml"))
    assert len(paths) == 20
    for path in paths:
        card = CARDS[int(path.stem.rpartition("-")[2].removesuffix("gb"))]
        found = answer(capsys, f"plan {path} --gpu {card} --ram 128GiB")
        (process,) = found["processes"]
        transformer = process["models"][0]
        header = next(
            line for line in path.read_text("utf-8").splitlines() if line.startswith("# carom plan")
        )
        alone = answer(capsys, header.removeprefix("# carom "))
        assert transformer["role"] == "transformer" and transformer["plan"]["tokens"] == alone["tokens"], path
        assert transformer["plan"]["model_bytes"] == alone["model_bytes"], path
        assert transformer["steps"][0]["step_seconds"] == pytest.approx(alone["step_seconds"], rel=0.05), path
        assert process["lines"] == [] and any("already" in remark for remark in process["remarks"]), path


def test_the_text_says_what_streams_and_prints_the_line_to_add(capsys, job):
    text = ask(capsys, f"plan {job()} {ON}").out
    flat = " ".join(text.split())
    assert "Transformer Flux.2-dev: 33.0 GB of weights in convrot8" in flat and "wait in RAM" in flat
    assert "768 x 768 pixels" in flat and "2,816 tokens" in flat and "a step" in flat
    assert "Text encoder Mistral Small 24B" in flat and "before the training" in flat
    assert text.rstrip().endswith("Add under `model:`:\n\n        offload: bouncing")


def test_the_printed_lines_make_a_job_that_carom_takes(capsys, job):
    from carom.toolkit_ext import options

    lines = answer(capsys, f"plan {job()} {ON} --vram 6GiB")["processes"][0]["lines"]
    policy = options.read(yaml.safe_load("\n".join(lines)))
    assert policy is not None and policy.mode == "bouncing" and policy.vram == "6144MiB"


def test_a_limit_bounds_the_weights_of_every_model(capsys, job):
    models = answer(capsys, f"plan {job()} {ON} --vram 6GiB")["processes"][0]["models"]
    assert [model["role"] for model in models] == ["transformer", "text encoder"]
    assert all(model["plan"]["vram"]["weights_bytes"] <= 6 << 30 for model in models)


def test_a_job_that_fits_needs_no_line(capsys, job):
    (process,) = answer(capsys, f"plan {job()} --gpu h200")["processes"]
    assert process["lines"] == [] and not any(model["streams"] for model in process["models"])
    assert any("needs no offload line" in remark for remark in process["remarks"])


def test_models_of_the_same_step_share_the_card(capsys, job):
    cached = answer(capsys, f"plan {job()} {ON}")["processes"][0]["models"]
    shared = answer(capsys, f"plan {job(train={'cache_text_embeddings': False})} {ON}")["processes"][0][
        "models"
    ]
    assert not cached[1]["every_step"] and all(model["every_step"] for model in shared)
    assert shared[0]["plan"]["vram"]["weights_bytes"] < cached[0]["plan"]["vram"]["weights_bytes"]
    held = sum(model["plan"]["vram"]["weights_bytes"] for model in shared)
    assert held + shared[0]["plan"]["vram"]["activation_bytes"] <= 12e9


def test_two_transformers_share_the_card_unless_one_is_not_trained(capsys, job):
    wan = {"name_or_path": "x/Wan2.2", "arch": "wan22_14b", "qtype": "qfloat8"}
    both = answer(capsys, f"plan {job(wan)} {ON}")["processes"][0]["models"][0]
    one = {**wan, "model_kwargs": {"train_high_noise": False}}
    alone = answer(capsys, f"plan {job(one, name='one.yaml')} {ON}")["processes"][0]["models"][0]
    assert both["copies"] == 2 and alone["copies"] == 1
    assert 2 * both["plan"]["vram"]["weights_bytes"] <= 12e9 < both["plan"]["model_bytes"]
    assert alone["plan"]["resident_layers"] > both["plan"]["resident_layers"]


def test_each_resolution_has_its_tokens_and_its_time_and_the_largest_decides_the_layout(capsys, job):
    path = job(datasets=[{"resolution": [512, 1024]}], train={"batch_size": 2})
    model = answer(capsys, f"plan {path} --gpu rtx4090 --ram 128GiB")["processes"][0]["models"][0]
    assert [(step["pixels"], step["tokens"]) for step in model["steps"]] == [
        (1024, 2 * 4608),
        (512, 2 * 1536),
    ]
    assert model["plan"]["tokens"] == 2 * 4608
    assert model["steps"][0]["step_seconds"] > model["steps"][1]["step_seconds"] > 0


def test_clips_and_control_images_are_tokens_too(capsys, job):
    clip = job(
        {"name_or_path": "x/Wan2.1-14B", "arch": "wan21"}, datasets=[{"resolution": 512, "num_frames": 41}]
    )
    steps = answer(capsys, f"plan {clip} --gpu h200")["processes"][0]["models"][0]["steps"]
    assert steps[0]["tokens"] == 32 * 32 * 11
    edit = {"name_or_path": "x/Edit", "arch": "qwen_image_edit"}
    path = job(edit, datasets=[{"resolution": 512, "control_path": ["/a", "/b"]}])
    steps = answer(capsys, f"plan {path} --gpu h200")["processes"][0]["models"][0]["steps"]
    assert steps[0]["tokens"] == 3 * 32 * 32 + 256


def test_local_files_are_read(capsys, job, tmp_path):
    checkpoint(tmp_path / "model" / "transformer", layers=8)
    checkpoint(tmp_path / "model" / "text_encoder", layers=2)
    path = job({"name_or_path": str(tmp_path / "model"), "arch": "chroma", "quantize": False})
    (process,) = answer(capsys, f"plan {path} {ON}")["processes"]
    transformer, encoder = process["models"]
    assert transformer["plan"]["layers"] == 8 and encoder["plan"]["layers"] == 2
    assert transformer["plan"]["model_bytes"] == 8 * 2 * 512 * 512 * 2
    assert any("arch chroma is not known" in remark for remark in process["remarks"])


@pytest.mark.parametrize("model, said", [
    ({"name_or_path": "x/y", "arch": "hidream"}, "arch hidream has no known shape"),
    ({"name_or_path": "ostris/Flex.1-alpha", "arch": "flux"}, "flex has another shape"),
])  # fmt: skip
def test_a_model_that_is_not_known_fails_and_says_what_to_do(capsys, job, model, said):
    found = answer(capsys, f"plan {job(model)} {ON}", code=1)
    problem = found["processes"][0]["models"][-1]["problem"]
    assert said in problem and "download it" in problem and not found["complete"]
    assert found["processes"][0]["lines"] == []
    assert "not planned" in ask(capsys, f"plan {job(model)} {ON}", code=1).out


def test_a_job_that_trains_the_weights_themselves_is_not_planned_as_a_lora(capsys, job):
    found = answer(capsys, f"plan {job(network=None)} {ON}", code=1)
    assert "no `network`" in found["processes"][0]["models"][-1]["problem"]


def test_a_job_that_does_not_fit_says_the_least_that_works(capsys, job):
    found = answer(capsys, f"plan {job()} --gpu rtx4070 --ram 16GiB", code=1)
    assert "least that works is --ram" in found["processes"][0]["models"][0]["problem"]


def test_models_of_a_step_must_wait_in_ram_together(capsys, job):
    wan = {"name_or_path": "x/Wan2.2", "arch": "wan22_14b", "quantize": False}
    assert answer(capsys, f"plan {job(wan)} --gpu rtx4070 --ram 96GiB")["complete"]
    found = answer(capsys, f"plan {job(wan)} --gpu rtx4070 --ram 48GiB", code=1)
    assert "together" in found["processes"][0]["models"][0]["problem"]


@pytest.mark.parametrize("change, said", [
    ({"train": {"gradient_checkpointing": False}}, "gradient_checkpointing is false"),
    ({"model": {"layer_offloading": True}}, "layer_offloading is not needed"),
    ({"model": {"qtype": "mystery"}}, "qtype mystery is not known"),
    ({"network": {"type": "lokr"}}, "network.type lokr is counted as a LoRA"),
])  # fmt: skip
def test_what_a_plan_does_not_count_is_said(capsys, job, change, said):
    (process,) = answer(capsys, f"plan {job(**change)} --gpu h200")["processes"]
    assert any(said in remark for remark in process["remarks"])


def test_packing_is_offered_where_16_bit_weights_stream(capsys, job):
    plain, slow = job({"quantize": False}), f"{ON} --link 2GB"  # packing pays where copies are late
    said = "--codec lossless shows the step times"
    (process,) = answer(capsys, f"plan {plain} {slow}")["processes"]
    (packed,) = answer(capsys, f"plan {plain} {slow} --codec lossless")["processes"]
    assert any(said in remark for remark in process["remarks"])
    assert not any(said in remark for remark in packed["remarks"])
    waits = [found["models"][0]["plan"]["host"]["streamed_bytes"] for found in (process, packed)]
    assert waits[1] < waits[0]
    (quantised,) = answer(capsys, f"plan {job({'quantize_te': True})} {ON}")["processes"]
    assert not any(said in remark for remark in quantised["remarks"])


@pytest.mark.parametrize("option", ["--tokens 4", "--quant nf4", "--plot x.png"])
def test_options_that_the_job_decides_are_bad_use(capsys, job, option):
    assert option.split()[0] in ask(capsys, f"plan {job()} {ON} {option}", code=2).err


def test_a_job_beyond_ram_streams_from_a_drive(capsys, job):
    small = "--gpu rtx4070 --ram 8GiB"
    (without,) = answer(capsys, f"plan {job()} {small}", code=1)["processes"]
    assert "`disk` in" in without["models"][0]["problem"]
    (found,) = answer(capsys, f"plan {job()} {small} --nvme gen4")["processes"]
    assert any("disk: auto" in line for line in found["lines"])
    assert found["models"][0]["plan"]["host"]["drive_bytes"] > 0
    own = {"offload": "bouncing", "offload_kwargs": {"disk": "auto"}}
    (own_disk,) = answer(capsys, f"plan {job(own)} {small} --nvme gen4")["processes"]
    assert own_disk["models"][0]["plan"]["host"]["drive_bytes"] > 0
    answer(capsys, f"plan {job({'offload': 'bouncing'})} {small} --nvme gen4", code=1)


def test_a_file_that_is_no_job_is_bad_use(capsys, tmp_path):
    (tmp_path / "x.yaml").write_text("a: 1")
    assert "no ai-toolkit job" in answer(capsys, f"plan {tmp_path / 'x.yaml'} {ON}", code=2)["message"]
    assert "not there" in ask(capsys, f"plan {tmp_path / 'gone.yml'} {ON}", code=2).err
