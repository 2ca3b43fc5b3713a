"""The bench: roofline arithmetic, cases, real workers in small, skipped peers, the record, and no child left behind."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from carom.benchmarks.engines import figures, measure, runner, suite
from carom.benchmarks.engines.case import ENGINES, Case
from carom.benchmarks.engines.case_rows import compare_fingerprints, rows
from carom.benchmarks.engines.dit import build
from carom.benchmarks.engines.measure import HostEvent, fingerprint
from carom.benchmarks.engines.peers import get_engine
from carom.benchmarks.engines.record import SCHEMA, new_record, read_record, write_record
from carom.benchmarks.engines.roofline import crossing_bytes, roofline
from carom.benchmarks.results.render import rendered
from carom.benchmarks.results.table import table
from carom.cli import bench
from carom.cli.main import main
from tests_harness import heed_interrupts

torch = pytest.importorskip("torch")

SMALL = Case(d=64, depth=3, tokens=8, rank=2, steps=2, warmup=1)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """One thread a worker: on a busy machine thread pools wait for each other at every operation."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    for process in _workers():  # a failed test must not leave one to slow down the others
        process.kill()


def _result(ms: float, **more) -> dict:
    return {"status": "ok", "seconds": 1.0, "ms_per_step": ms, "phases_ms": {"forward": ms}, **more}


def _entries(*pairs: tuple[str, Case, dict]) -> list[dict]:
    return [{"key": key, "case": case.to_dict(), "result": result} for key, case, result in pairs]


class TestCase:
    def test_twenty_blocks_of_3072_are_six_point_eight_gigabytes(self):
        case = Case(d=3072, depth=20)
        assert case.block_bytes == 339_738_624
        assert case.weight_bytes == pytest.approx(6.8e9, rel=0.002)

    def test_sizes_said_are_the_sizes_built(self):
        model = build(SMALL.but(mode="train"))
        frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
        assert frozen == SMALL.weight_bytes
        assert len(model.adapters()) == 3 * 4 * 2

    def test_budget_holds_residents_slots_and_the_rest_with_a_page_each(self):
        case = Case(d=3072, depth=20, resident=10, slots=3, device="cuda")
        exact = 13 * case.block_bytes + case.outside_bytes
        assert exact <= case.budget_bytes <= exact + 12 * (2 << 20)

    def test_budget_never_counts_more_slots_than_streamed_blocks(self):
        assert (
            Case(d=1024, depth=4, resident=4, slots=3).budget_bytes
            == Case(d=1024, depth=4, slots=4).budget_bytes
        )

    def test_survives_json(self):
        case = SMALL.but(engine="carom", mode="train", vram=123)
        assert Case.from_json(case.to_json()) == case

    @pytest.mark.parametrize(
        "text", ["", "[]", '{"engine": "magic"}', '{"d": 0}', '{"d": "3"}', '{"depth": 1e99}', '{"steps": true}',
                 '{"resident": 99}', '{"heads": 7, "d": 64}', '{"nonsense": 1}', '{"mode": "train", "rank": 0}',
                 '{"limit_s": 0}', '{"vram": -1}'],
    )  # fmt: skip
    def test_bad_cases_are_named_not_run(self, text):
        with pytest.raises(ValueError):
            Case.from_json(text)


class TestModel:
    def test_same_seed_same_weights_and_other_seed_other_weights(self):
        one, two, other = build(SMALL), build(SMALL), build(SMALL.but(seed=1))
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
        assert not torch.equal(one.blocks[0].mlp.fc1.weight, other.blocks[0].mlp.fc1.weight)

    def test_blocks_differ_and_no_weight_is_degenerate(self):
        model = build(SMALL)
        first, second = model.blocks[0].attn.qkv.weight, model.blocks[1].attn.qkv.weight
        assert not torch.equal(first, second)
        assert first.float().std().item() == pytest.approx(64**-0.5, rel=0.1)

    @pytest.mark.parametrize("where", ["outside", "inside", "off"])
    def test_checkpointing_changes_no_gradient(self, where):
        attached = get_engine("none").attach(
            build(SMALL.but(mode="train", checkpoint=where)), SMALL.but(mode="train"), torch.device("cpu")
        )
        x = torch.ones(1, 8, 64, dtype=torch.bfloat16)
        attached.gradients(x, torch.ones(1, 64, dtype=torch.bfloat16), -x, lambda name: None)
        total = sum(p.grad.float().abs().sum().item() for _, p in attached.adapters)
        plain = build(SMALL.but(mode="train", checkpoint="off"))
        loss = (plain(x, torch.ones(1, 64, dtype=torch.bfloat16)).float() - -x.float()).pow(2).mean()
        loss.backward()
        assert total == sum(p.grad.float().abs().sum().item() for _, p in plain.adapters()) > 0


class TestRoofline:
    case = Case(d=3072, depth=20, slots=3, mode="train")

    def test_training_fetches_all_but_the_slots_in_each_phase(self):
        assert crossing_bytes(self.case) == (17 * self.case.block_bytes,) * 2

    def test_inference_fetches_every_streamed_block_once(self):
        case = self.case.but(mode="infer", resident=10)
        assert crossing_bytes(case) == (10 * case.block_bytes, 0)

    def test_nothing_crosses_where_the_slots_hold_all(self):
        for mode in ("infer", "train"):
            assert crossing_bytes(self.case.but(mode=mode, resident=17)) == (0, 0)

    def test_slack_in_one_phase_does_not_pay_for_the_other(self):
        # 17 blocks at 55.5 GB/s are 104.06 ms a phase: the forward is link-bound, the backward compute-bound.
        resident = {"kernel_ms": {"forward": 40.0, "backward": 110.0, "optimizer": 5.0}}
        bound = roofline(self.case, resident, 55.5e9)
        assert bound.ms == pytest.approx(104.06 + 115.0, abs=0.01)
        assert bound.source == "profiler"

    def test_a_record_without_kernels_uses_its_phases_and_says_so(self):
        resident = {"phases_ms": {"forward": 40.0, "backward": 110.0, "optimizer": 5.0}}
        bound = roofline(self.case, resident, 55.5e9)
        assert bound.ms == pytest.approx(104.06 + 115.0, abs=0.01) and bound.source == "phases"

    def test_a_peer_s_roofline_counts_the_slots_that_the_peer_has(self):
        # ai-toolkit holds nothing, and copies 12 of 18 d^2 a third time for the gradients of their inputs.
        block = self.case.block_bytes
        assert crossing_bytes(self.case.but(engine="ai-toolkit")) == (20 * block, round(20 * block * 30 / 18))
        assert crossing_bytes(self.case.but(engine="musubi")) == (18 * block, 18 * block)

    def test_a_budget_in_bytes_is_bound_by_what_the_engine_made_of_it(self):
        case = self.case.but(vram=5 << 30)
        made = {
            "resident_bytes": 10 * case.block_bytes + case.outside_bytes,
            "slot_bytes": 2 * case.block_bytes,
        }
        assert crossing_bytes(case, made) == (8 * case.block_bytes,) * 2
        assert crossing_bytes(case.but(mode="infer"), made) == (10 * case.block_bytes, 0)

    def test_a_link_that_carries_nothing_is_refused(self):
        with pytest.raises(ValueError, match="link"):
            roofline(self.case, {"forward": 1.0}, 0.0)


class TestFigures:
    def test_a_missed_a_reached_and_an_unmeasured_figure(self):
        cases = suite.suite_cases("cpu")
        link, block = 55.5e9, cases["link"].block_bytes
        results = {
            "link": {"status": "ok", "link_bytes_per_second": link},
            "none-infer-16384": _result(200.0),
            "carom-infer-16384": _result(203.0),
            "carom-infer-4096": _result(1e3 * 20 * block / link / 0.99, peak_reserved_bytes=1_100_000_000),
            "carom-train-1024": {"status": "failed", "reason": "boom"},
        }
        judged = {
            r["figure"]: r for r in (f.judge(figures.Results(cases, results)) for f in suite.suite_figures())
        }
        share = judged["infer 4096, all streamed: share of the link"]
        assert share["reached"] is True and share["measured"] == pytest.approx(0.99)
        assert judged["infer 4096, all streamed: reserved"]["reached"] is True
        assert judged["infer 16384, all streamed: of no offloading"]["reached"] is False
        broken = judged["train 1024, all streamed: of ai-toolkit"]
        assert broken["reached"] is None and "boom" in broken["reason"]
        assert "MISSED" in figures.render(list(judged.values()))

    def test_every_case_a_figure_names_is_in_the_suite(self):
        cases = suite.suite_cases("cuda")
        results = figures.Results(cases, {})
        for figure in suite.suite_figures():
            reason = figure.judge(results)["reason"]
            named = reason.split(":")[0]
            assert named in cases or reason.startswith("no")
        assert set(suite.PAIRS) | set(suite.PAIRS.values()) <= set(cases)

    def test_codecs_are_compared_at_the_same_budget_and_shape(self):
        cases = suite.suite_cases("cuda")
        pairs = [
            (f"carom-{kind}-auto", f"carom-{kind}")
            for kind in ("infer-4096", "infer-16384", "train-1024", "train-4096")
        ]
        pairs += [
            (f"carom-infer-4096-vram-{words}-lossless", f"carom-infer-4096-vram-{words}")
            for words in suite.BUDGETS
        ]
        for key, raw in pairs:
            packed, plain = cases[key], cases[raw]
            assert plain.codec == "raw" != packed.codec and packed.budget_bytes == plain.budget_bytes
            assert packed.but(codec="raw", warmup=plain.warmup) == plain
        for words, share in suite.BUDGETS.items():
            case = cases[f"carom-infer-4096-vram-{words}-lossless"]
            assert case.budget_bytes == int(share * case.weight_bytes) and case.warmup == suite.RELAID

    def test_cases_are_chosen_by_a_part_of_their_key_or_by_all_of_it(self):
        cases = suite.suite_cases("cuda")
        assert suite.chosen(cases, []) == cases
        assert list(suite.chosen(cases, ["=carom-infer-4096", "none-infer-4"])) == [
            "link", "none-infer-4096", "carom-infer-4096",
        ]  # fmt: skip
        assert len(suite.chosen(cases, ["carom-infer-4096-vram"])) == 7

    def test_what_stays_packed_is_a_figure_of_the_last_layout(self):
        cases, key = suite.suite_cases("cuda"), "carom-infer-4096-vram-half-lossless"
        for count in (0, 18):
            results = figures.Results(cases, {key: _result(44.0, report={"resident_packed_units": count})})
            assert figures.stayed_packed(results, key) == count
        with pytest.raises(figures.Missing, match="resident_packed_units"):
            figures.stayed_packed(figures.Results(cases, {key: _result(44.0, report={})}), key)

    def test_half_resident_counts_only_within_its_memory(self):
        cases = suite.suite_cases("cuda")
        results = {
            "none-train-4096": _result(100.0),
            "carom-train-4096-half": _result(110.0, peak_reserved_bytes=5_000_000_000),
            "carom-train-4096-half-3": _result(101.0, peak_reserved_bytes=6_000_000_000),
        }
        keys = ["carom-train-4096-half", "carom-train-4096-half-3"]
        value = figures.within_memory(figures.Results(cases, results), keys, "none-train-4096", 5.3e9)
        assert value == pytest.approx(1.10)

    def test_transfers_are_held_against_two_less_the_turns(self):
        cases = suite.suite_cases("cuda")
        for counted, over in ((1.7, 0.0), (1.9, 0.2)):
            results = {"carom-train-4096": _result(1.0, report={"transfers_per_weight": counted})}
            got = figures.transfers_over_ideal(figures.Results(cases, results), "carom-train-4096")
            assert got == pytest.approx(over)


class TestMeasure:
    def test_fingerprint_sees_one_changed_bit(self):
        tensor = torch.randn(100).to(torch.bfloat16)
        changed = tensor.clone()
        changed[77] += 1
        assert compare_fingerprints(fingerprint([tensor]), fingerprint([tensor.clone()]))["bit_exact"]
        verdict = compare_fingerprints(fingerprint([changed]), fingerprint([tensor]))
        assert not verdict["bit_exact"]
        assert verdict["max_abs_diff_of_sample"] == pytest.approx(1.0, abs=0.05)

    def test_steps_are_timed_apart_from_warm_up_and_by_phase(self, monkeypatch):
        calls, now = [], [0.0]
        # A clock of its own: how busy the machine is does not matter.
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

        def step(marks):
            calls.append(1)
            now[0] += 0.2 if len(calls) == 1 else 0.01
            marks("forward")
            now[0] += 0.02
            marks("backward")

        found = measure.time_steps(step, steps=3, warmup=1, device=torch.device("cpu"))
        assert len(calls) == 4
        assert found["ms_per_step"] == pytest.approx(30) == found["wall_ms_per_step"]
        assert found["phases_ms"] == pytest.approx({"forward": 10, "backward": 20})
        assert HostEvent().elapsed_time(HostEvent()) == 0


class TestPeers:
    @pytest.mark.parametrize("name", ENGINES)
    def test_each_engine_says_why_it_cannot_run_or_runs(self, name, monkeypatch):
        monkeypatch.delenv("AI_TOOLKIT_PATH", raising=False)
        monkeypatch.delenv("MUSUBI_PATH", raising=False)
        reason = get_engine(name).unavailable(SMALL.but(engine=name))
        if name == "none":
            assert reason is None
        if name == "ai-toolkit":
            assert "AI_TOOLKIT_PATH" in reason
        if name == "musubi":
            assert "MUSUBI_PATH" in reason
        if name in ("ramtorch", "diffusers", "accelerate") and importlib.util.find_spec(name) is None:
            assert "pip install" in reason

    def test_a_peer_that_is_not_there_is_a_result_not_an_error(self, monkeypatch):
        monkeypatch.delenv("MUSUBI_PATH", raising=False)
        seen = io.StringIO()
        results = []
        case = SMALL.but(engine="musubi", device="cuda")
        assert not runner.run_cases({"m": case}, lambda *result: results.append(result), progress=seen)
        ((key, process, result),) = results
        assert (key, process, result["status"]) == ("m", 1, "skipped") and "MUSUBI_PATH" in result["reason"]
        assert "skipped" in seen.getvalue()

    def test_a_checkout_that_does_not_import_is_skipped_with_its_words(self, tmp_path, monkeypatch):
        broken = tmp_path / "toolkit" / "memory_management"
        broken.mkdir(parents=True)
        (broken / "__init__.py").write_text("import no_such_module_at_all\n")
        monkeypatch.setenv("AI_TOOLKIT_PATH", str(tmp_path))
        result = runner.run_case(SMALL.but(engine="ai-toolkit"))
        assert result["status"] == "skipped" and "no_such_module_at_all" in result["reason"]


class TestRunner:
    def test_a_case_that_takes_too_long_is_ended_and_reported(self):
        result = runner.run_case(SMALL.but(steps=1_000_000), limit_s=2.0)
        assert result["status"] == "timeout" and 2.0 <= result["seconds"] < 15
        assert not _workers()

    def test_an_engine_that_fails_leaves_its_reason_and_its_words(self, tmp_path, monkeypatch):
        fake = tmp_path / "toolkit" / "memory_management"
        fake.mkdir(parents=True)
        (fake / "__init__.py").write_text(
            "class MemoryManager:\n"
            "    @classmethod\n"
            "    def attach(cls, *args, **kwargs):\n"
            "        print('chatter that must not mix with the result')\n"
            "        raise RuntimeError('out of luck')\n"
        )
        monkeypatch.setenv("AI_TOOLKIT_PATH", str(tmp_path))
        result = runner.run_case(SMALL.but(engine="ai-toolkit"))
        assert result["status"] == "failed" and result["reason"] == "RuntimeError: out of luck"
        assert "chatter" in result["stderr_tail"] and "Traceback" in result["stderr_tail"]

    def test_cases_past_the_time_limit_are_skipped_with_that_reason(self):
        seen = []
        cases = {"link": SMALL.but(kind="link"), "a": SMALL, "b": SMALL}
        runner.run_cases(cases, lambda *one: seen.append(one), processes=2, time_limit_s=5.0, least_s=20.0)
        assert [(key, process) for key, process, _ in seen] == [
            ("link", 1), ("a", 1), ("b", 1), ("a", 2), ("b", 2),
        ]  # fmt: skip
        assert {result["reason"] for _, _, result in seen} == {"the time limit was reached"}

    @pytest.mark.skipif(os.name != "posix", reason="signals")
    @pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
    def test_no_child_is_left_however_the_run_ends(self, root, tmp_path, how):
        signum = getattr(signal, how)
        out = tmp_path / "out"
        shim = tmp_path / "path"
        shim.mkdir()
        (shim / "carom").symlink_to(root, target_is_directory=True)
        command = [sys.executable, "-m", "carom", "bench", "--engines", "none", "--mode", "infer", "--d", "64",
                   "--depth", "2", "--tokens", "8", "--steps", "1000000", "--out", str(out)]  # fmt: skip
        run = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(shim)}, cwd=shim,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=heed_interrupts,
        )  # fmt: skip
        try:
            _wait_for(lambda: (out / "bench.json").exists(), 60)  # the link is measured
            _wait_for(lambda: _workers(run.pid), 30)  # the endless case runs
            os.kill(run.pid, signum)
            printed, _ = run.communicate(timeout=30)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        _wait_for(lambda: not _workers(), 20)
        record = json.loads((out / "bench.json").read_text())
        assert [entry["key"] for entry in record["cases"]] == ["link"]
        if signum != signal.SIGKILL:
            assert run.returncode == 1 and record["interrupted"] is True
            assert "record:" in printed


def _workers(parent: int | None = None) -> list[psutil.Process]:
    """Worker processes started by this test run (children of `parent`, where given)."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "ppid"]):
        line = process.info["cmdline"] or []
        if (
            "--watch-stdin" in line
            and str(runner.LAUNCH) in line
            and process.status() != psutil.STATUS_ZOMBIE
        ):
            mine = (process.info["environ"] or {}).get("PYTEST_CURRENT_TEST", "") != ""
            if mine and (parent is None or process.info["ppid"] == parent):
                found.append(process)
    return found


def _wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


class TestRecord:
    def test_is_written_whole_or_not_at_all(self, tmp_path):
        record = new_record("test", [])
        write_record(record, tmp_path / "deep" / "r.json")
        assert json.loads((tmp_path / "deep" / "r.json").read_text())["schema"] == SCHEMA
        assert [p.name for p in (tmp_path / "deep").iterdir()] == ["r.json"]

    @pytest.mark.parametrize(
        "text", ["", "{}", "[]", '{"schema": 99, "cases": []}', '{"schema": 1, "cases": [{}]}']
    )
    def test_a_file_that_is_no_record_is_refused(self, tmp_path, text):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ValueError, match="r.json"):
            read_record(tmp_path / "r.json")

    def test_rows_compare_each_case_with_the_resident_run_of_its_shape(self):
        base = Case(d=3072, depth=20, mode="infer", tokens=4096, resident=20, device="cuda")
        print_a = {"output": {"sha256": "a", "sample": [1.0]}, "passes_agree": True}
        print_b = {"output": {"sha256": "b", "sample": [1.5]}, "passes_agree": True}
        streamed = base.but(engine="carom", resident=0, slots=2)
        entries = _entries(
            ("link", base.but(kind="link"), {"status": "ok", "link_bytes_per_second": 55.5e9}),
            ("none", base, _result(38.6, fingerprint=print_a, peak_reserved_bytes=7_000_000_000)),
            ("carom", streamed, _result(123.0, fingerprint=print_a)),
            ("musubi", streamed.but(engine="musubi"), _result(130.0, fingerprint=print_b)),
            ("other", streamed.but(engine="musubi", tokens=1024), _result(130.0, fingerprint=print_b)),
            ("gone", streamed.but(engine="ramtorch"), {"status": "skipped", "reason": "not installed"}),
        )
        found = {row.key: row for row in rows(entries)}
        assert found["carom"].of_roofline == pytest.approx(
            123.0 / (1e3 * base.weight_bytes / 55.5e9), rel=1e-3
        )
        assert found["carom"].bit_exact is True
        assert found["musubi"].bit_exact is False
        assert found["other"].bit_exact is None and found["other"].roofline is None
        shown = table(rendered({"tool": "carom bench", "cases": entries}).rows)
        assert "not installed" in shown and "55.5 GB/s" in shown

    def test_a_cpu_has_no_roofline(self):
        base = Case(d=64, depth=2, device="cpu", resident=2)
        entries = _entries(
            ("link", base.but(kind="link"), {"status": "ok", "link_bytes_per_second": 5e9}),
            ("none", base, _result(10.0)),
            ("carom", base.but(engine="carom", resident=0), _result(9.0)),
        )
        assert [row.roofline for row in rows(entries)] == [None, None]

    def test_a_budget_of_bytes_and_what_stays_packed_in_it_are_in_the_table(self):
        base = Case(d=3072, depth=20, mode="infer", tokens=4096, resident=20, device="cuda")
        half = base.but(engine="carom", resident=0, vram=base.weight_bytes // 2, codec="lossless")
        report = {"resident_packed_units": 18, "slot_bytes": 1, "resident_bytes": 2 * base.block_bytes,
                  "resident_packed_bytes": base.block_bytes, "resident_packed_raw_bytes": 2 * base.block_bytes}  # fmt: skip
        entries = _entries(
            ("link", base.but(kind="link"), {"status": "ok", "link_bytes_per_second": 55.5e9}),
            ("none", base, _result(38.6)),
            ("raw", half.but(codec="raw"), _result(66.0)),
            ("packed", half, _result(44.0, report=report)),
        )
        # 20 blocks, less the one that stays raw and the two that stay in the bytes of one.
        streamed = base.weight_bytes - 3 * base.block_bytes
        packed = next(row for row in rows(entries) if row.key == "packed")
        assert packed.roofline.forward_bytes == streamed
        shown = table(rendered({"tool": "carom bench", "cases": entries}).rows)
        assert (
            "Carom, 3.4 GB budget, lossless" in shown
            and "18 units stay packed" in shown
            and "0 of 20" not in shown
        )


class TestCommand:
    def test_a_run_in_which_nothing_ran_fails(self, capsys):
        one = ("--d", "64", "--depth", "1", "--tokens", "8", "--mode", "infer", "--engines", "none")
        assert main(["bench", "--device", "cuda:77", *one]) == 1
        assert "no case could run" in capsys.readouterr().err

    SMALL_RUN = ("bench", "--d", "256", "--depth", "4", "--tokens", "8", "--rank", "2", "--steps", "2", "--warmup", "1",
                 "--processes", "1", "--device", "cpu")  # fmt: skip

    @pytest.mark.parametrize("modes", ["train", pytest.param("infer,train", marks=pytest.mark.slow)])
    def test_small_run_end_to_end(self, tmp_path, capsys, modes):
        code = main([
            *self.SMALL_RUN, "--engines", "none,carom,musubi", "--mode", modes, "--slots", "2",
            "--json", "--out", str(tmp_path), "--chart", str(tmp_path / "c.png"),
        ])  # fmt: skip
        done = capsys.readouterr()
        assert code == 0, done.err
        record = json.loads(done.out)
        assert record["schema"] == SCHEMA and record["interrupted"] is False
        assert {"date", "commit", "machine", "versions", "arguments", "rooflines", "bit_exact"} <= set(record)
        assert record["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
        entries = {entry["key"]: entry for entry in record["cases"]}
        for mode in modes.split(","):
            base = entries[f"none-{mode}-8"]["result"]
            assert base["status"] == "ok" and base["ms_per_step"] > 0 and base["fingerprint"]["passes_agree"]
            assert entries[f"musubi-{mode}-8-0"]["result"]["status"] == "skipped"
            mine = entries[f"carom-{mode}-8-0"]
            assert mine["result"]["status"] == "ok", mine["result"]
            assert record["bit_exact"][mine["key"]] is True
            report = mine["result"]["report"]
            assert (
                report["vram_peak_bytes"]
                <= report["vram_budget_bytes"]
                == mine["result"]["vram_budget_bytes"]
            )
            assert report["vram_peak_bytes"] < mine["result"]["weight_bytes"]
            assert record["rooflines"] == {}, "a CPU has no roofline"
        assert set(base["phases_ms"]) == {"forward", "backward", "optimizer"}
        if "infer" in modes:
            for engine in ("none-infer-8", "carom-infer-8-0"):  # also on the layout that the steps led to
                said = entries[engine]["result"]["fingerprint"]
                assert said["settled"] == said["output"]
        assert json.loads((tmp_path / "bench.json").read_text()) == record
        assert (tmp_path / "c.png").stat().st_size > 1000
        assert "carom train" in done.err
        assert main(["bench", "--show", str(tmp_path / "bench.json"), "--markdown"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("| case |") and "median" in shown

    def test_where_no_engine_could_run_it_is_exit_one(self, capsys, monkeypatch):
        monkeypatch.delenv("MUSUBI_PATH", raising=False)
        assert main(["bench", "--engines", "musubi", "--device", "cpu", "--mode", "infer"]) == 1
        assert "no case could run" in capsys.readouterr().err

    LINE = [
        "bench",
        "--processes",
        "1",
        "--engines",
        "none,carom,musubi",
        "--device",
        "cpu",
        "--mode",
        "infer",
        "--timeout",
        "60",
    ]

    @pytest.fixture
    def heard(self, monkeypatch, capsys):
        """What stderr got before each case that ran, and in the end; no case runs in earnest."""
        heard = []

        def run_case(case, limit_s=None):
            heard.append(capsys.readouterr().err)
            return (
                _result(1.0)
                if case.kind == "step"
                else {"status": "ok", "seconds": 0.0, "link_bytes_per_second": 1e9}
            )

        monkeypatch.delenv("MUSUBI_PATH", raising=False)
        monkeypatch.setattr(runner, "run_case", run_case)
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((100, 24)))
        return heard

    def test_what_is_going_to_run_is_said_before_it_runs(self, heard, capsys):
        assert main(self.LINE) == 0
        first = heard[0].splitlines()
        assert len(first) == 1, "one line before the first case"
        assert "4 cases on cpu, 3 of which can run here" in first[0] and "60 s at most" in first[0]
        after = "".join(heard[1:]) + capsys.readouterr().err
        assert [line[:5] for line in after.splitlines()] == [f"[{n}/4]" for n in range(1, 5)]

    def test_on_a_terminal_a_bar_names_the_case_that_runs(self, heard, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        assert main(self.LINE) == 0
        assert len(heard) == 3
        assert "link |" in heard[0].split("\r")[-1] and heard[0].endswith("0/4")
        for before, name in zip(heard[1:], ("none infer", "carom infer"), strict=True):
            lines = before.split("\n")
            blank, line = lines[-2].split("\r")[-2:]
            assert not blank.strip() and line.startswith("["), "a line of what has run stands alone"
            assert lines[-1].split("\r")[-1].startswith(name)
        assert capsys.readouterr().err.split("\r")[-1].strip() == "", "the bar is taken away in the end"

    def test_with_json_neither_is_there(self, heard, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        assert main([*self.LINE, "--json"]) == 0
        assert heard[0] == ""
        out = capsys.readouterr()
        assert "\r" not in "".join(heard) + out.err
        assert len(json.loads(out.out)["cases"]) == 4

    @pytest.mark.parametrize(("options", "modes"), [((), {"infer", "train"}), (("--mode", "both"), {"infer", "train"}),
                                                    (("--mode", "train"), {"train"})])  # fmt: skip
    def test_both_modes_are_measured_unless_one_is_named(self, options, modes):
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        cases = bench.make_cases(parser.parse_args(list(options)), "cpu")
        assert {case.mode for case in cases.values() if case.kind == "step"} == modes

    def test_a_record_that_is_not_there_is_named(self, tmp_path, capsys):
        assert main(["bench", "--show", str(tmp_path / "nofile")]) == 2
        assert "nofile cannot be read (No such file or directory)" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "wrong", [("--engines", "magic"), ("--mode", "dream"), ("--tokens", "many"), ("--resident", "2"), ("--d", "0"),
                  ("--vram", "lots"), ("--device", "toaster"), ("--rank", "0")],
    )  # fmt: skip
    def test_bad_use_is_exit_two_and_says_which_option(self, wrong, capsys):
        assert main(["bench", *wrong]) == 2
        assert wrong[0].lstrip("-") in capsys.readouterr().err
