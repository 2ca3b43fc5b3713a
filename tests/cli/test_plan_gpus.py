"""`carom plan --gpus N`: its JSON and text, its help, and what it refuses."""

from __future__ import annotations

import json

import pytest
from carom.cli import main

GLM = "plan glm-4.7 --quant nf4+nf2 --gpu rtx4090-note --nvme gen4 --mode train"


def ask(capsys, line, code=0):
    assert main.main(line.split()) == code
    return capsys.readouterr()


def answer(capsys, line):
    return json.loads(ask(capsys, f"{line} --json").out)


def test_the_published_pipelines_are_in_the_json(capsys):
    found = answer(capsys, f"{GLM} --gpus 4 --split pipeline")
    assert (found["split"], found["gpus"], found["microbatches"], found["step_tokens"]) == (
        "pipeline",
        4,
        8,
        8192,
    )
    rows = {row["gpus"]: row["pipeline"] for row in found["by_gpus"]}
    published = {1: (14, 78, 8192), 2: (15, 31, 8192), 4: (15, 8, 4096)}
    assert rows.keys() == published.keys()
    for gpus, (resident, streamed, tokens) in published.items():
        stage = rows[gpus]["stages"][0]
        assert abs(stage["resident_layers"] - resident) <= 1 and abs(stage["streamed_layers"] - streamed) <= 1
        assert tokens / 2 <= rows[gpus]["zero_overhead_tokens"] <= tokens * 2
    assert found["min_gpus"] == {"without_streaming": 6, "with_streaming": 1}
    assert len(found["stages"]) == 4 and sum(stage["layers"] for stage in found["stages"]) == 92


def test_one_gpu_is_the_plan_without_the_option(capsys):
    assert answer(capsys, f"{GLM} --gpus 1") == answer(capsys, GLM)
    assert answer(capsys, f"{GLM} --gpus 2")["one_gpu"] == {
        key: value for key, value in answer(capsys, GLM).items() if key not in ("remarks", "plot")
    }


@pytest.mark.parametrize(
    "options, kind, gathers", [("", "nvlink", True), ("--nvlink", "nvlink", True), ("--p2p", "p2p", False), ("--no-p2p", "none", False)]
)  # fmt: skip
def test_the_connections_decide_the_rate_of_weights(capsys, options, kind, gathers):
    found = answer(capsys, f"plan flux2-dev --gpu h200 --vram 8GiB --gpus 2 --split data {options}")
    assert found["interconnect"]["kind"] == kind and found["gathers"] is gathers
    assert found["weight_bytes_per_second"] == pytest.approx((2 if gathers else 1) * 55.5e9)
    assert found["speedup"] >= 1.9


def test_host_memory_bounds_data_parallel_without_p2p(capsys):
    line = "plan flux2-dev --gpu rtx5090 --vram 8GiB --gpus 4 --split data"
    assert answer(capsys, f"{line} --host-memory 100GB")["weight_bytes_per_second"] == pytest.approx(25e9)
    assert answer(capsys, f"{line} --host-memory 100GB --p2p")["weight_bytes_per_second"] == pytest.approx(
        55.5e9
    )


def test_the_plan_is_explained_in_words(capsys):
    text = ask(capsys, f"{GLM} --gpus 4").out
    for words in (
        "Data parallel",
        "Pipeline",
        "Fewest GPUs",
        "6 without streaming",
        "docs/multi-gpu.md",
        "3,188",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 110
    text = " ".join(ask(capsys, "plan llama3-70b --quant nf4 --gpu rtx4090 --ram 16GiB --gpus 2").out.split())
    assert "Data parallel does not work here" in text and "does not fit" in text


def test_the_options_are_in_the_help(capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["plan", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "--gpus N",
        "--nvlink",
        "--p2p",
        "--no-p2p",
        "--split",
        "--microbatches M",
        "--host-memory RATE",
    ):
        assert option in text


@pytest.mark.parametrize(
    "options, words",
    [
        ("--gpus 0", "give 1 or more"),
        ("--gpus 5000", "between 1 and 1024"),
        ("--gpus many", "invalid int"),
        ("--no-p2p", "--no-p2p is for several GPUs"),
        ("--split data", "--split is for several GPUs"),
        ("--microbatches 4", "--microbatches is for several GPUs"),
        ("--host-memory 80GB", "--host-memory is for several GPUs"),
        ("--gpus 2 --nvlink", "RTX 4090 is not known to have NVLink"),
        ("--gpus 2 --nvlink --p2p", "not allowed with"),
        ("--gpus 2 --split tensor", "invalid choice"),
        ("--gpus 2 --plot x.png", "--plot draws the plan of one GPU"),
        ("--gpus 2 --split data --microbatches 4", "is for a pipeline"),
        ("--gpus 2 --microbatches 0", "between 1 and"),
        ("--gpus 100 --split pipeline", "at most 80 stages"),
        ("--gpus 2 --host-memory 5GB", "slower than one link"),
        ("--gpus 2 --host-memory much", "--host-memory"),
    ],
)
def test_bad_use_is_refused(capsys, options, words):
    line = f"plan llama-70b --quant nf4 --gpu rtx4090 {options}".split()
    try:
        code = main.main(line)
    except SystemExit as left:
        code = left.code
    assert code == 2 and words in capsys.readouterr().err


def test_nvlink_of_the_rtx_3090_connects_two(capsys):
    assert answer(capsys, "plan flux2-dev --gpu rtx3090 --gpus 2")["interconnect"]["kind"] == "nvlink"
    assert answer(capsys, "plan flux2-dev --gpu rtx3090 --gpus 4")["interconnect"]["kind"] == "none"
    assert main.main(["plan", "flux2-dev", "--gpu", "rtx3090", "--gpus", "4", "--nvlink"]) == 2
    assert "at most 2 cards" in capsys.readouterr().err
