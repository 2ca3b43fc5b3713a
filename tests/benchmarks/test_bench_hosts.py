"""The benchmarks in the real hosts: what their figures are made of, and, where a host is named, a tiny run on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from carom.benchmarks.hosts import aitoolkit_cases as cases
from carom.benchmarks.hosts import aitoolkit_gpu as aitoolkit
from carom.benchmarks.hosts import aitoolkit_parts as parts_of_jobs
from carom.benchmarks.hosts import aitoolkit_ready as ready
from carom.benchmarks.hosts import comfy_table, device_time, process, rounds
from carom.core.common import sizes

ROOT = Path(__file__).resolve().parents[2]


def _load(name: str):
    spec = importlib.util.spec_from_file_location(
        f"bench_{name}", ROOT / "benchmarks" / "hosts" / f"{name}.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


comfy = _load("comfy_gpu")


def sampled(seconds: float, digest: str = "aa", **more):
    one = {
        "hash": digest,
        "finite": True,
        "wall_s": 3.0,
        "read_bytes": {"storage": 0, "calls": 9},
        "report": None,
    }
    return {
        "status": "ok", "limit": None, "loader": "stock", "s_per_iteration": seconds, "samples_s": [seconds] * 4,
        "first": one, "second": one, "profile": {"kernel_ms": 40.0},
        "host": {"before": {"anonymous_bytes": 1 << 30}, "peak": {"anonymous_bytes": 3 << 30}}, **more,
    }  # fmt: skip


def comfy_record(*runs):
    record = {"file_bytes": 2 << 30, "runs": list(runs)}
    return record | {"pooled": rounds.pooled(comfy_table.samples(record))}


def test_comfy_table_pools_processes_and_compares_with_stock_of_the_same_limit():
    small: dict = {"limit": 4 << 30}
    lines = comfy_table.table(comfy_record(
        sampled(0.1), sampled(0.2, **small), sampled(0.15, loader="auto", **small), sampled(0.4, **small),
        sampled(0.17, loader="auto", **small),
        {"status": "skipped", "reason": "no time left", "limit": None, "loader": "auto"},
    )).splitlines()  # fmt: skip
    assert lines[2].split()[:8] == ["4", "GiB,", "stock", "2", "0.3000", "0.2000", "to", "0.4000"]
    assert lines[3].split()[:9] == ["4", "GiB,", "auto", "2", "0.1600", "0.1500", "to", "0.1700", "0.533"]
    assert "40.0" in lines[3]
    assert lines[4] == "no limit, auto: skipped: no time left" and lines[-1] == "latents: equal, bit for bit"


def test_comfy_table_keeps_the_settled_layout_apart_from_the_first_one():
    carom = sampled(0.2, loader="auto", samples_settled_s=[0.1] * 4, s_per_iteration_settled=0.1)
    carom["settled"] = carom["second"]
    first, settled = comfy_table.table(comfy_record(sampled(0.4), carom)).splitlines()[2:4]
    assert "0.2000 to 0.2000" in first and "0.500" in first
    assert settled.startswith("no limit, auto, settled layout") and "0.250" in settled


def test_comfy_cases_of_a_comparison_take_turns():
    assert rounds.interleaved([["a", "b"], ["c"]], 2) == ["a", "b", "a", "b", "c", "c"]


def test_a_run_ends_within_its_limit():
    now = [100.0]
    limit = rounds.TimeLimit(60, clock=lambda: now[0])
    assert limit.fits("stock")  # nothing ran yet: nothing says that it would not fit
    now[0] += 20
    limit.took("stock", 20)
    assert limit.fits("stock") and limit.left_s() == 40 and limit.left_s(7) == 7
    now[0] += 20
    assert not limit.fits("stock") and not limit.fits("auto")  # another kind may take as long
    limit.took("auto", 8)
    assert limit.fits("auto")
    now[0] += 99
    assert limit.left_s() == 1 and not limit.fits("auto")


def test_samples_of_all_processes_are_pooled_with_quartiles():
    one, other = rounds.pooled([("a", [1.0, 2.0, 3.0]), ("b", [9.0]), ("a", [4.0, 5.0])])
    assert (one["processes"], one["process_medians_s"], one["median_s"]) == (2, [2.0, 4.5], 3.0)
    assert one["quartiles_s"] == [2.0, 4.0] and one["samples_s"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert other["quartiles_s"] == [9.0, 9.0] and rounds.spread([]) == {}


def test_a_copied_checkout_names_its_commit_in_a_file(tmp_path):
    assert process.checkout_commit(tmp_path) == "unknown"
    (tmp_path / "COMMIT").write_text("783545f\n")
    assert process.checkout_commit(tmp_path) == "783545f"


def test_time_in_which_a_kernel_ran_counts_kernels_side_by_side_once():
    assert device_time.covered([(10, 20), (0, 5), (12, 15), (18, 25)]) == 20


@pytest.mark.parametrize("ended", [0, 1])
def test_comfy_latents_are_not_called_equal_where_nothing_was_compared(ended):
    failed = {"status": "failed", "reason": "no module", "limit": None, "loader": "raw"}
    assert (
        comfy_table.table(comfy_record(*[sampled(0.1)] * ended, failed))
        .splitlines()[-1]
        .startswith("latents: not compared")
    )


@pytest.mark.parametrize("change", [{"hash": "bb"}, {"finite": False}])
def test_comfy_latents_that_differ_or_are_not_finite_are_named(change):
    other = sampled(0.1)
    other["second"] = {**other["second"], **change}
    assert comfy_table.table(comfy_record(sampled(0.1), other)).endswith("latents: DIFFERENT")


def test_comfy_loader_words():
    config = comfy.Config(None, "lossless@4.6GiB")
    assert (config.codec, config.vram) == ("lossless", "4.6GiB")
    assert comfy.Config(None, "raw").vram == "auto"


def test_aitoolkit_figures_are_of_warm_steps_from_end_to_end():
    ends = [0.0, 9.0, 10.0, 11.0, 12.0, 13.0, 13.5, 14.0, 14.5]
    told = {"steps": [[end - 0.2, end, 1.0] for end in ends], "memory": {"end": {"rss_bytes": 5}}}
    found = cases.figures(told)
    assert found["s_per_step"] == pytest.approx(0.5) and found["s_in_step"] == pytest.approx(0.2)
    assert found["samples_ms"] == [500.0] * 3 and found["quartiles_ms"] == [500.0] * 2


def test_aitoolkit_profiled_steps_are_not_among_the_samples():
    ends = [float(end) for end in (*range(9), 20, 40)]
    told = {"steps": [[end, end, 1.0] for end in ends], "memory": {"end": {"rss_bytes": 5}}, "counted_steps": 9,
            "profile": {"kernel_ms": 700.0}}  # fmt: skip
    found = cases.figures(told)
    assert found["samples_ms"] == [1000.0] * 3 and found["kernel_ms"] == {"step": 700.0}
    assert len(found["losses"]) == 11


def test_aitoolkit_table_pools_the_processes_of_a_configuration():
    def run(word, milliseconds, **more):
        return {"config": word, "status": "ok", "samples_ms": milliseconds, "peak_reserved_bytes": 2e9, "rss_bytes": 1e9,
                "anonymous_bytes": None, "torch_pinned_bytes": None, "report": None, "oom_skipped": 0, **more}  # fmt: skip

    model = {"kind": "train", "step_seconds": 0.2, "stall_seconds": 0.01, "host_late_seconds": 0.02}
    carom = {"report": {"models": {"m": model}}, "profile": {"kernel_ms": 150.0}}
    lines = cases.table({"runs": [
        run("plain", [100.0, 200.0]), run("half/auto", [300.0] * 2, **carom), run("plain", [300.0, 400.0]),
        {"config": "stock", "status": "skipped", "reason": "no time left"},
    ]}).splitlines()  # fmt: skip
    assert lines[1].split()[:7] == ["plain", "2", "0.2500", "0.1750", "to", "0.3250", "1.000"]
    assert lines[2].split()[2] == "0.3000" and "150.0 ms" in lines[2] and "5.0%  10.0%" in lines[2]
    assert lines[3].split() == ["stock", "skipped:", "no", "time", "left"]


def test_aitoolkit_losses_are_compared_step_by_step():
    assert cases.against([1.0, 2.2, None], [1.0, 2.0, 3.0]) == {
        "compared": 2, "equal": 1, "largest_relative": pytest.approx(0.1), "mean_relative": pytest.approx(0.05),
    }  # fmt: skip


def test_aitoolkit_words_name_budget_codec_and_the_run_to_compare_with():
    config = aitoolkit.Config("float8-half/lossless")
    assert (config.budget, config.codec, config.plain, config.bounces) == (
        "half",
        "lossless",
        "float8-plain",
        True,
    )
    assert not aitoolkit.Config("float8-stock").bounces
    assert [aitoolkit.Config(word).percent for word in ("stock", "stock50", "float8-stock25@8")] == [
        100,
        50,
        25,
    ]
    long = aitoolkit.Config("half/auto@128#300")
    assert (long.budget, long.codec, long.rank, long.steps, long.plain) == (
        "half",
        "auto",
        128,
        300,
        "plain@128#300",
    )
    for word in ("plan", "half", "half/raw@", "plain#x", ""):
        with pytest.raises(ValueError, match="is no configuration"):
            aitoolkit.Config(word)


def test_aitoolkit_jobs_are_of_the_words_rank_device_and_budget(tmp_path):
    shape = cases.Shape(512, 16, device="cuda:1", mode="auto", granularity="block")
    file = cases.job("x", cases.Config("float8-half/raw@32"), shape, tmp_path, 5, 7)
    (process,) = file["config"]["process"]
    assert (
        process["device"] == "cuda:1"
        and process["network"]["linear"] == 32
        and process["train"]["steps"] == 7
    )
    assert process["model"]["offload"] == "auto" and process["model"]["quantize"]
    assert process["model"]["offload_kwargs"] == {"vram": 5, "codec": "raw", "granularity": "block"}
    file = cases.job("x", cases.Config("stock50"), shape, tmp_path, None, 7)
    model = file["config"]["process"][0]["model"]
    assert model["layer_offloading"] and model["layer_offloading_transformer_percent"] == 0.5


def test_aitoolkit_a_card_that_just_fits_holds_weights_adapters_gradients_and_moments():
    shapes = {"a.weight": (3, 5), "a.bias": (3,), "b.weight": (4, 4)}
    assert cases.fits(shapes, 1000, 2) == 1000 + 4 * (4 * 2 * (8 + 8)) + cases.CONTEXT


def test_aitoolkit_a_long_job_says_what_grew_and_a_second_plain_is_compared_with_the_first():
    noted = {"50": {"reserved_bytes": 5_000_000, "rss_bytes": 9_000_000}, "before": {}, "end": {}}
    assert cases.grown({"memory": noted}) == ""
    noted["300"] = {"reserved_bytes": 5_000_000, "rss_bytes": 12_000_000}
    assert cases.grown({"memory": noted}) == "  from step 50 to 300: VRAM +0 MB, RSS +3 MB"
    bench = object.__new__(aitoolkit.Bench)
    runs = iter([1.0, 1.5])

    def one(*_):
        return {"status": "ok", "losses": [next(runs)], "log": ""}

    bench.done, bench._job, bench._card = {}, one, lambda _: None
    assert "against_plain" not in bench.run(aitoolkit.Config("plain"))
    assert bench.run(aitoolkit.Config("plain"))["against_plain"]["largest_relative"] == 0.5
    assert bench.done["plain"]["losses"] == [1.0]


def test_aitoolkit_a_jobs_seconds_are_told_apart():
    told = {"asked": 102.0, "first_step": 105.0, "last_step": 112.5}
    assert cases.phases(told, 100.0, 113.0) == {
        "until_imported": 2.0, "loading": 3.0, "steps": 7.5, "ending": 0.5,
    }  # fmt: skip
    assert cases.phases({"asked": 102.0}, 100.0, 103.0)["ending"] == 1.0


def told_of_a_job():
    """Return what the probe records of 7 steps of 1 s, with a sample (2 s, 4 s), a save (3 s), and one of each at the
    end.
    """
    ends = [5.0, 6.0, 9.0, 13.0, 14.0, 19.0, 20.0]
    pauses = [["sample", 2, 6.0, 7.5], ["save", 3, 9.0, 12.0], ["sample", 5, 14.0, 18.0], ["save", 7, 20.0, 21.0],
              ["sample", 7, 21.0, 25.0]]  # fmt: skip
    return {"steps": [[end - 0.9, end, 1.0] for end in ends], "memory": {"end": {"rss_bytes": 5}}, "pauses": pauses,
            "asked": 100.0, "imported_s": 7.0, "first_step_end": 104.5}  # fmt: skip


def test_aitoolkit_a_job_is_measured_from_its_start_over_samples_and_saves():
    found = cases.figures(told_of_a_job())
    assert found["samples_ms"] == [1000.0]  # of a step without a sample or a save, and not of the first ones
    assert (found["first_step_s"], found["with_imports_s"]) == (4.5, 11.5)
    assert (found["first_sample_s"], found["sample_s"], found["save_s"]) == (2.0, 4.0, 3.0)
    assert [one["call_s"] for one in found["pauses"]] == [1.5, 3.0, 4.0, 1.0, 4.0]
    assert [one["delay_s"] for one in found["pauses"]] == [2.0, 3.0, 4.0, None, None]


def test_aitoolkit_jobs_sample_and_save_between_steps_but_never_in_the_profiled_ones(tmp_path):
    for steps in (15, 16, 17, 20, 30, 31, 300):
        saves, samples = cases.pauses(steps)
        file = cases.job("x", cases.Config("plain"), cases.Shape(512, 16), tmp_path, None, steps)
        (process,) = file["config"]["process"]
        assert (process["save"]["save_every"], process["sample"]["sample_every"]) == (saves, samples)
        assert not process["train"]["disable_sampling"] and process["train"]["skip_first_sample"]
        paused = [[step for step in range(1, steps) if step % every == 0] for every in (samples, saves)]
        assert all(len([step for step in found if step < steps - 2]) == 2 for found in paused)
        assert not (set(paused[0]) & set(paused[1]) or steps - 2 in paused[0] + paused[1])
    file = cases.job("x", cases.Config("plain"), cases.Shape(512, 16), tmp_path, None, 3)
    assert file["config"]["process"][0]["train"]["disable_sampling"]


def test_aitoolkit_parts_of_jobs_are_compared_with_plain_and_with_stock():
    def run(word, *parts):
        return {"config": word, "status": "ok", "samples_ms": [1.0], "peak_reserved_bytes": 0, "rss_bytes": 0,
                "anonymous_bytes": None, "torch_pinned_bytes": None, "report": None, "oom_skipped": 0,
                **dict(zip(parts_of_jobs.PARTS, parts, strict=False))}  # fmt: skip

    plain, stock = run("plain#9", 2.0, 1.0, 0.5, 0.25, 10.0), run("stock", 4.0, 4.0, 4.0, 1.0, 40.0)
    half = [run("half/auto", seconds, 1.0, 1.0, None, 20.0) for seconds in (2.0, 6.0)]
    *_, head, first, second, third = cases.table({"runs": [plain, stock, *half]}).splitlines()
    assert head.startswith("seconds") and first.split()[1:4] == ["2.00", "(1.00,", "0.50)"]
    assert second.startswith("stock") and "4.00 (2.00, 1.00)" in second
    assert " ".join(third.split()[1:]) == (
        "4.00 (2.00, 1.00) 1.00 (1.00, 0.25) 1.00 (2.00, 0.25) 20.00 (2.00, 0.50)"
    )
    assert "seconds (" not in cases.table({"runs": [run("plain")]})  # a record from before these figures


def test_aitoolkit_losses_are_measured_against_what_plain_differs_from_itself():
    def run(word, losses):
        return {"config": word, "status": "ok", "losses": losses}

    record = {"runs": [
        run("plain#30", [1.0] * 30), run("half/auto#30", [1.0] * 29 + [1.5]), run("plain", [1.0, 1.1]),
        run("float8-plain", [9.0, 9.0]), {"config": "plain", "status": "failed", "reason": "x"},
    ]}  # fmt: skip
    lines = [line.split(": ") for line in cases.losses(record).splitlines()[1:]]
    told = {where.strip(): figures for where, figures in lines}
    assert told == {
        "half/auto#30         (run 2) from plain#30 (run 1), 24 steps": "0.0e+00, 0.0e+00; 0.0e+00",
        "half/auto#30         (run 2) from plain#30 (run 1), 30 steps": "5.0e-01, 1.7e-02; 3.3e-02",
        "half/auto#30         (run 2) from plain (run 3), 2 steps": "9.1e-02, 4.5e-02; 9.1e-02",
        "plain                (run 3) from plain#30 (run 1), 2 steps": "1.0e-01, 5.0e-02; 1.0e-01",
    }


READY = """
import sys
print("noise of an import")
print("carom: imported", flush=True)
line = sys.stdin.readline()
sys.exit(7 if '"OUT": "here"' in line and "CAROM_BENCH_ASKED" in line else 1)
"""


def test_aitoolkit_jobs_go_to_processes_that_have_imported(tmp_path, monkeypatch):
    (tmp_path / "aitoolkit_warm.py").write_text(READY)
    monkeypatch.setattr(ready, "HERE", tmp_path)
    waiting = ready.Ready(sys.executable, tmp_path, dict(os.environ), tmp_path / "errors.txt", 2)
    try:
        waiting.imported()
        first = list(waiting._waiting)
        for _ in range(3):  # the third begins when it is asked for
            assert waiting.run(tmp_path / "job", tmp_path / "log", {"OUT": "here"}) == 7
        assert [process.returncode for process in first] == [7, 7]
    finally:
        waiting.close()


def test_aitoolkit_a_process_that_cannot_import_fails_its_job_and_says_why(tmp_path, monkeypatch):
    (tmp_path / "aitoolkit_warm.py").write_text("import no_such_package")
    monkeypatch.setattr(ready, "HERE", tmp_path)
    waiting = ready.Ready(sys.executable, tmp_path, dict(os.environ), tmp_path / "errors.txt", 1)
    waiting.imported()
    assert waiting.run(tmp_path / "job", tmp_path / "log", {}) == 1
    assert "no_such_package" in (tmp_path / "errors.txt").read_text()


def test_aitoolkit_code_is_copied_so_that_the_checkout_stays_as_it_is(tmp_path):
    checkout, place = tmp_path / "checkout", tmp_path / "place"
    for name in ("toolkit/__pycache__", "extensions/theirs", "output", "config"):
        (checkout / name).mkdir(parents=True)
    (checkout / "toolkit" / "a.py").write_text("")
    (checkout / "run.py").write_text("")
    ready.copied(checkout, place)
    assert (place / "toolkit" / "a.py").exists() and not (place / "toolkit").is_symlink()
    assert not (place / "toolkit" / "__pycache__").exists()
    assert (place / "run.py").is_symlink() and (place / "config").is_symlink()
    assert not any((place / "extensions").iterdir()) and not (place / "output").exists()


def test_aitoolkit_budgets_leave_room_for_what_is_not_weights(tmp_path):
    bench = object.__new__(aitoolkit.Bench)
    bench.folder, bench.arguments = tmp_path, SimpleNamespace(cpu=False, stock_peak=None, text_layers=0)
    bench.lib = {"sizes": sizes}
    weights = tmp_path / "models" / "zimage" / "transformer"
    weights.mkdir(parents=True)
    (weights / "w.safetensors").write_bytes(bytes(600))
    bench.done = {
        "plain": {"status": "ok", "peak_reserved_bytes": 700},
        "stock": {"status": "ok", "peak_reserved_bytes": 250},
    }
    assert bench._budget(aitoolkit.Config("all/raw")) == 150  # of 250, 100 are activations
    assert bench._budget(aitoolkit.Config("half/raw")) == 250
    assert bench._budget(aitoolkit.Config("8GiB/raw")) == "8GiB"
    del bench.done["stock"]
    bench.arguments.stock_peak = "240B"
    assert bench._budget(aitoolkit.Config("all/raw")) == 140  # as a kept run of stock says
    bench.done = {"plain#300": bench.done["plain"]}  # of other length, of the same size
    assert bench._budget(aitoolkit.Config("all/raw")) == 140
    assert bench._budget(aitoolkit.Config("half/raw")) == 250
    (weights.parent / "text_encoder").mkdir()
    (weights.parent / "text_encoder" / "w.safetensors").write_bytes(bytes(60))
    assert (
        bench._budget(aitoolkit.Config("half/raw")) == 250
    )  # one that is not at work in a step takes nothing then
    bench.arguments.text_layers = 12
    assert bench._budget(aitoolkit.Config("half/raw")) == 310
    bench.done["float8-plain"] = {"status": "failed"}
    assert bench.run(aitoolkit.Config("float8-half/raw")) == {
        "status": "skipped", "reason": "needs float8-plain run before it",
    }  # fmt: skip


def test_aitoolkit_reads_the_least_budget_from_a_log():
    assert aitoolkit.LEAST.search("x: the least budget that works is 4096 bytes\n")[1] == "4096"


def _run(script: str, out: Path, *arguments: str) -> dict:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "hosts" / script),
        "--tiny",
        "--cpu",
        "--json",
        str(out),
        *arguments,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, env={**os.environ, "CAROM_COMMIT": "0123abc"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="set COMFYUI_PATH to a ComfyUI folder")
@pytest.mark.timeout(600)
def test_tiny_run_in_the_real_comfyui(tmp_path):
    record = _run(
        "comfy_gpu.py", tmp_path / "r.json", "--steps", "3", "--loaders", "stock,raw", "--rounds", "1"
    )
    stock, raw = record["runs"]
    assert stock["second"]["hash"] == raw["second"]["hash"] and raw["second"]["class"] == "CaromModelPatcher"
    assert raw["second"]["report"]["streamed_bytes"] > 0 and record["commit"] == "0123abc"


@pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="set COMFYUI_PATH to a ComfyUI folder")
@pytest.mark.timeout(600)
def test_tiny_run_of_whole_prompts(tmp_path):
    arguments = ("--cases", "lora", "--work", str(tmp_path), "--profile", str(tmp_path / "stacks"))
    record = _run("prompts.py", tmp_path / "r.json", *arguments)
    stock, carom = record["runs"]
    hashes = [[prompt["results"]["latent_0"]["hash"] for prompt in run["prompts"]] for run in (stock, carom)]
    assert hashes[0] == hashes[1] and len(set(hashes[1])) == len(hashes[1]) == 6
    assert all(prompt["carom"][0]["report"]["streamed_bytes"] > 0 for prompt in carom["prompts"])
    assert "== other steps" in (tmp_path / "stacks" / "lora-None-cold-carom-0.txt").read_text()


@pytest.mark.skipif(
    not os.environ.get("AI_TOOLKIT_PATH"), reason="set AI_TOOLKIT_PATH to an ai-toolkit checkout"
)
@pytest.mark.timeout(600)
def test_tiny_run_of_the_real_ai_toolkit(tmp_path):
    record = _run(
        "aitoolkit_gpu.py", tmp_path / "r.json", "--steps", "8", "--rounds", "1", "--configs", "plain,all/raw"
    )
    plain, bouncing = record["runs"]
    for run in (plain, bouncing):
        assert [(one["kind"], one["after_steps"]) for one in run["pauses"]] == [
            ("sample", 3), ("save", 4), ("sample", 5), ("save", 7), ("sample", 7), ("save", 8), ("sample", 8),
        ]  # fmt: skip
        assert 0 < run["first_step_s"] < min(run["total_s"], run["with_imports_s"]) and run["save_s"] > 0
    assert bouncing["losses"] == plain["losses"] and any(
        "stream through" in line for line in bouncing["carom_lines"]
    )


@pytest.mark.parametrize(
    ("words", "stock", "lacks"),
    [
        ("plain,stock,all/raw,half/auto", False, ""),
        ("plain#24,all/raw,half/auto#300", True, ""),
        ("plain,all/raw", False, "stock"),
        ("half/auto,plain", False, "plain"),
        ("float8-plain,float8-half/auto", False, "plain"),
        ("plain,float8-half/auto", False, "float8-plain"),
        ("auto/auto@1024,8GiB/raw", False, ""),
    ],
)
def test_a_budget_derived_from_what_does_not_run_before_it_is_refused_at_once(words, stock, lacks):
    found = cases.needed([cases.Config(word) for word in words.split(",")], stock)
    assert f" needs {lacks} before it" in found if lacks else found == ""
