"""Rows of the records about what a session decides and costs: `vram="auto"`, `codec="auto"`, predicted steps, host time
and calls, gradients.
"""

from __future__ import annotations

import statistics
import tarfile
from pathlib import Path
from typing import Any

from .rows import Row, pooled


def auto_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `carom auto` record: `vram="auto"` beside the best budget set by hand on the same card."""
    found = []
    codec = _option(record, "--codec") or "raw"
    for one in record["cards"]:
        job = "inference" if one["mode"] == "infer" else "LoRA training"
        size = f" of {one['model_bytes'] / 1e9:.1f} GB" if "model_bytes" in one else ""
        group = f"DiT{size}, {job}, {one['tokens']} tokens, {one['card_gb']:g} GB of the card free"
        auto = one.get("auto") or {}
        case = f'Carom, vram="auto", {codec}'
        if "step_s" not in auto:
            why = (
                one.get("skipped")
                or one.get("failed")
                or auto.get("skipped")
                or auto.get("failed")
                or "no figure"
            )
            found.append(Row(group, case, "step", "ms", note=str(why)))
            continue
        note = "" if auto.get("settled", True) else "its layout had not settled"
        if auto.get("ooms"):
            note = f"{auto['ooms']} steps ran out of memory"
        found.append(
            Row(group, case, "step", "ms", 1e3 * auto["step_s"], base=1e3 * one["best_s"] if one.get("best_s") else None,
                base_case="best budget set by hand" if one.get("best_s") else None, device_bytes=auto["held_bytes"],
                same_bits=one.get("exact"), note=note)
        )  # fmt: skip
        for tried in one.get("hand_set", ()):
            if "step_s" not in tried:
                continue
            found.append(
                Row(group, f"Carom, budget of {tried['budget_bytes'] / 1e9:.2f} GB, {codec}", "step", "ms",
                    1e3 * tried["step_s"], device_bytes=tried.get("held_bytes"))
            )  # fmt: skip
    both = record.get("alternate")
    if both:
        found.append(
            Row("two models in turns, one budget for 1.5 of them", "Carom, one SharedBudget", "wire bytes", "GB",
                both["shared"]["wire_bytes"] / 1e9, base=min(one["wire_bytes"] for one in both["fixed"]) / 1e9,
                base_case="best fixed split", same_bits=both["exact"])
        )  # fmt: skip
    return found


def predict_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `carom predict` record: the measured step, compared with the predicted one."""
    found = []
    for row in record["rows"]:
        job = "inference" if row["mode"] == "infer" else "LoRA training"
        learnt = row.get("learnt_error")
        found.append(
            Row(
                f"DiT, {record['depth']} blocks of width {record['d']}, {job}, {row['tokens']} tokens",
                f"Carom, {row['share']:.0%} of the weights resident", "step", "ms",
                1e3 * row["measured_s"], base=1e3 * row["predicted_s"], base_case="prediction from a probe",
                note="" if learnt is None else f"the session's own prediction is off by {100 * learnt:+.1f} %",
            )
        )  # fmt: skip
    return found


def codec_choice_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `codec_choice` record: `codec="auto"` beside the faster one of the explicit settings."""
    found = []
    for one in record["rows"]:
        job = "inference" if one["mode"] == "infer" else "LoRA training"
        times = ", ".join(
            f"{codec} {1e3 * one['results'][codec]['seconds']:.2f} ms" for codec in ("raw", "lossless")
        )
        places = one.get("places")
        if places is not None:
            by_room = ", ".join(
                f"{number} {1e3 * places[number]['seconds']:.2f} ms" for number in ("one", "two")
            )
            taken = "one" if one["results"]["auto"]["one_decoded"] else "two"
            room = f"room for {taken}" if one["chosen"] == "lossless" else "raw"
            times += f"; decoded units in the region: {by_room}; auto: {room}"
        found.append(
            Row(
                f"{one['model']}, {job}, {record['device']}", f'Carom, codec="auto", {one["budget"]:.0%} of the weights as budget',
                "step", "ms", 1e3 * one["results"]["auto"]["seconds"], base=1e3 * one["results"][one["best"]]["seconds"],
                base_case="best explicit codec", note=f"{one['chosen']}; {times}",
            )
        )  # fmt: skip
    return found


def host_time_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a record of host times of two checkouts, which a program of earlier versions made."""
    found = []
    before, after = (record["commits"][side] for side in ("before", "after"))
    for row in record["cases"]:
        for side, name in (("before", before), ("after", after)):
            own = row[side]
            samples = [one["unit_us"] for one in record["samples"][row["case"]][side]]
            ratio = row["ratio"]
            words = (
                f"ratio {ratio['median']:.3f}, quartiles {ratio['q1']:.3f} to {ratio['q3']:.3f} over pairs"
            )
            found.append(
                Row(
                    f"small blocks on the CPU, {row['case']}", f"Carom at {name}", "host time of a unit", "us",
                    own["median"], quartiles=(own["q1"], own["q3"]), samples=len(samples), processes=len(samples),
                    base=row["before"]["median"] if side == "after" else None,
                    base_case=f"Carom at {before}" if side == "after" else None, note=words if side == "after" else "",
                )
            )  # fmt: skip
    return found


def two_commits_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a record of `two_commits`: steps of the DiT at two commits and of peers, measured in turns."""
    names = {side: f"Carom at {commit[:12]}" for side, commit in record["commits"].items()}
    found = []
    for row in record["cases"]:
        for side, turns in ((side, data["turns"]) for side, data in record["samples"][row["case"]].items()):
            if side not in row:
                continue
            own, later = row[side], side == "after" and "ratio" in row
            host = row["unit"] == "us a block"
            found.append(
                Row(
                    f"DiT, {row['case']}, in turns", names.get(side, side),
                    "host time added to a block" if host else "step", "us" if host else "ms", own["median"],
                    quartiles=(own["q1"], own["q3"]), samples=len(turns), processes=1,
                    base=row["before"]["median"] if later else None, base_case=names["before"] if later else None,
                    note=f"ratio {row['ratio']:.3f}" if later else "",
                )
            )  # fmt: skip
    return found


_CHANGES = {
    "beyond_seconds": "a switch, beyond a settled pass",
    "smaller": "a budget smaller by a sixth, beyond a settled pass",
    "larger": "that budget raised again, beyond a settled pass",
}


def switches_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a record of `switches`: what switches and changes of budget take beyond settled passes."""
    found = []
    for cell in record["cases"]:
        homes, codec = cell["key"].split()
        result = cell["result"]
        where = "RAM" if homes == "ram" else "a file"
        group = f"two DiTs in turns, {cell['case']['tokens']} tokens, {cell['vram'] / (1 << 30):g} GiB for weights, which wait in {where}"
        figures = {"beyond_seconds": result["beyond_seconds"], **result["budget_beyond_seconds"]}
        for key, values in figures.items():
            floor = result.get("copies_seconds") if key == "beyond_seconds" else None
            found.append(
                Row(group, f'Carom, codec="{codec}"', _CHANGES[key], "ms", 1e3 * values["median"],
                    floor=None if floor is None else 1e3 * floor,
                    note=f"{1e3 * values['least']:.0f} to {1e3 * values['largest']:.0f} ms")
            )  # fmt: skip
    return found


def attaching_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a record of `attaching`: how long `carom.stream` takes for a module in memory."""
    floors = [case["result"]["pin_seconds"] for case in record["cases"] if "pin_seconds" in case["result"]]
    found = []
    for case in record["cases"]:
        result = case["result"]
        if "seconds" not in result:
            continue
        if "tensors" in result:
            group = f"{result['tensors']:,} tensors of 4 KiB, on the CPU"
        else:
            group = f"a DiT of {result['bytes'] / 1e9:.1f} GB in memory, 6 GiB for weights"
        times = result["seconds"]
        floor = statistics.median(floors[0]) if floors else None
        note = f"{times['least']:.2f} to {times['largest']:.2f} s"
        found += [
            Row(group, f"Carom, {case['key']}", "the first attach", "s", times["first"], floor=floor),
            Row(
                group, f"Carom, {case['key']}", "later attaches", "s", times["median"], floor=floor, note=note
            ),
        ]
    return found


def session_memory_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a record of `session_memory`: host memory of sessions with residents, beside another commit."""
    base_case = f"Carom at {(record['before_commit'] or '')[:12]}" if record["before_commit"] else None
    return [
        Row("host memory of a session, half of the weights' bytes as VRAM", f"Carom, {row['case']}", f"while {when}",
            "of the model's bytes", value, base=row.get("before", {}).get(when), base_case=base_case)
        for row in record["cases"]
        for when, value in row["after"].items()
    ]  # fmt: skip


_HOST_CALLS = {
    "ram": "a streamed unit, weights in RAM, inference",
    "disk": "a streamed unit, weights on disk, inference",
    "train": "a streamed unit, weights in RAM, LoRA training",
    "set_budget": "one change of the budget and the next pass",
}


def host_calls_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a record of `host_calls`: Python calls for a unit, and the files that a pass enters."""
    return [
        Row("24 blocks on the CPU, raw", _HOST_CALLS[row["case"]], metric, unit, value)
        for row in record["cases"]
        for metric, unit, value in (
            ("calls of functions of core", "calls", row["calls"]),
            ("files of core that the pass enters", "files", len(row["files"])),
        )
    ]


def schedule_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a record of `schedules`: predicted seconds over those of a prefetcher, and seconds of tables."""
    found = []
    for words, key in (
        ("units that cross raw", "figures"),
        ("units that may be packed", "packed_figures"),
        ("the units of a session", "session_figures"),
    ):
        group = f"predicted seconds of a schedule, {words}"
        for kind, one in record.get(key, {}).items():
            case = f"{kind}, {one['count']} random cases"
            if kind == "all":
                found.append(Row(group, case, "median", "of the prefetcher's", one["median"]))
                found.append(Row(group, case, "nine of ten", "of the prefetcher's", one["nine_of_ten"]))
            found.append(Row(group, case, "worst", "of the prefetcher's", one["worst"]))
    for one in record["tables"]:
        case = f"a table of {one['units']:,} units, {one['kind']}"
        found.append(Row("making a table, on the CPU", case, "time", "ms", one["seconds"] * 1e3))
    return found


def gradient_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of the record of device memory with streamed gradients, step by step."""
    return [
        Row(
            record["what"],
            f"Carom at {row['tree']}, step {row['step']}",
            "peak device memory",
            "MiB",
            row["peak_mib"],
        )
        for row in record["rows"]
    ]


def sample_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of the record of steps that were timed beside stack samples, one group for each host."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for number, lease in enumerate(record["leases"], 1):
        for one in lease:
            found.setdefault((f"DiT, host {number}", one["key"]), []).append(one)
    return [
        Row(group, key, "step", "ms", **pooled([one["ms"] for one in members]),
            device_bytes=None, note=f"the host issues a step in {members[0]['issue_ms']:.1f} ms")
        for (group, key), members in found.items()
    ]  # fmt: skip


def archive_rows(path: Path) -> list[Row]:
    """Return a row for each file in an archive that accompanies a record. Raises tarfile.TarError for a broken one."""
    with tarfile.open(path) as archive:
        return [
            Row(path.name, member.name, "size", "MB", member.size / 1e6)
            for member in archive.getmembers()
            if member.isfile()
        ]


def _option(record: dict[str, Any], name: str) -> str | None:
    given = record.get("arguments", [])
    return given[given.index(name) + 1] if name in given[:-1] else None
