"""The benchmark of whole prompts in ComfyUI: its graphs, its clock, and what it counts as wrong."""

from __future__ import annotations

import signal
import time

import pytest
from carom.benchmarks.hosts import prompt_clock, prompt_table
from carom.benchmarks.hosts.prompt_cases import TINY, Way, cases, graph

CASES = cases(4)
STOCK, CAROM = Way(carom=False), Way(carom=True)
PLACES = {"load", "offload", "clip"}  # nodes that may differ between stock and Carom


def _differing(case, number):
    ours, stocks = graph(case, number, TINY, CAROM), graph(case, number, TINY, STOCK)
    return {name.partition("_")[0] for name in ours | stocks if ours.get(name) != stocks.get(name)}


@pytest.mark.parametrize("name", CASES)
def test_graphs_of_stock_and_carom_differ_in_their_loaders_only(name):
    case = CASES[name]
    for number in range(len(case.prompts)):
        assert (
            _differing(case, number) - {"sample", "lora"} <= PLACES
        )  # a node behind a loader has another source
        for way in (STOCK, CAROM):
            nodes = graph(case, number, TINY, way)
            sources = [
                value[0]
                for node in nodes.values()
                for value in node["inputs"].values()
                if isinstance(value, list)
            ]
            assert set(sources) <= set(nodes) and "tell" in nodes


def test_two_models_share_the_steps_and_the_second_goes_on_where_the_first_ended():
    nodes = graph(CASES["two-models"], 1, TINY, STOCK)
    first, second = nodes["sample_0"]["inputs"], nodes["sample_1"]["inputs"]
    assert (first["start_at_step"], first["end_at_step"], second["end_at_step"]) == (0, 2, 4)
    assert second["latent_image"] == ["sample_0", 0] and second["start_at_step"] == 2
    assert (first["return_with_leftover_noise"], second["add_noise"]) == ("enable", "disable")


def test_a_prompt_two_prompts_later_uses_the_same_model_again():
    models = [prompt.models for prompt in CASES["switch-back"].prompts]
    assert models[0] == models[2] != models[1]


def test_parts_of_a_prompt_add_up_and_the_benchmarks_own_time_is_in_none():
    clock = prompt_clock.Clock()
    clock.start()
    clock.enter("encode")
    time.sleep(0.02)
    clock.enter(prompt_clock.MEASURE)
    time.sleep(0.05)
    seconds = clock.seconds()
    assert 0.02 <= seconds["encode"] <= sum(seconds.values()) < 0.045


def _run(loader, *latents, **more):
    prompts = [
        {
            "prompt": number, "wall_s": 1.0, "errors": [],
            "results": {"latent_0": {"hash": digest, "finite": True}, "image": {"hash": loader, "finite": True}},
        }
        for number, digest in enumerate(latents)
    ]  # fmt: skip
    shared = {
        "case": "one-model",
        "limit": 6 << 30,
        "cache": "cold",
        "round": 0,
        "link": False,
        "status": "ok",
    }
    return {**shared, "loader": loader, "prompts": prompts, **more}


def test_a_latent_that_differs_from_stocks_is_a_fault_and_an_image_is_not():
    assert prompt_table.faults({"runs": [_run("stock", "aa", "bb"), _run("carom", "aa", "bb")]}) == []
    assert prompt_table.faults({"runs": [_run("stock", "aa", "bb"), _run("carom", "aa", "cc")]}) == [
        "one-model, prompt 2: latent_0 differs from stock's"
    ]


def test_a_failed_run_a_lost_lora_and_values_that_are_not_finite_are_faults():
    ours = _run("carom", "aa")
    ours["prompts"][0]["errors"] = ["ERROR lora diffusion_model.x"]
    ours["prompts"][0]["results"]["latent_0"]["finite"] = False
    record = {"runs": [_run("stock", "aa", status="failed", reason="exit status 1"), ours]}
    assert len(prompt_table.faults(record)) == 3


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timer signals")
def test_the_sampler_names_the_place_where_a_part_spent_its_time():
    clock = prompt_clock.Clock()
    sampler = prompt_clock.StackSampler(clock, every_s=0.001)
    clock.enter("switch")
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        sum(range(100))
    sampler.stop()
    text = sampler.text()
    assert "== switch" in text and "test_the_sampler_names_the_place" in text
