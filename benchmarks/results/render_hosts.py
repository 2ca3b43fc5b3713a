"""Rows of the records taken inside ComfyUI (`comfy_gpu`) and ai-toolkit (`aitoolkit_gpu`)."""

from __future__ import annotations

import re
from typing import Any

from .rows import Row, pooled, split

GIB = 1 << 30
STOCK, PLAIN = "stock", "no offloading"
# The prompts of a ComfyUI run, each a metric of its own: another layout of Carom's may run in each.
_PROMPTS = {"second": "iteration, 2nd prompt", "settled": "iteration, settled layout"}


def comfy_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `comfy_gpu` record: time of an iteration by prompt, of the first image, and of a turn of two
    models.

    The base case is ComfyUI's own loader with the same free memory in the same record, pooled over its processes like
    the case itself. Carom's settled layout is compared with stock's second prompt where stock has no settled one.
    """
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in record["runs"]:
        loader = run["loader"] if run["loader"].startswith(STOCK) else f"Carom, {run['loader']}"
        places.setdefault((_free(record, run), loader), []).append(run)
    found = []
    for (group, loader), runs in places.items():
        done = [run for run in runs if run["status"] == "ok"]
        if not done:
            found.append(Row(group, loader, _metric(runs[-1]), "s", note=_why(runs[-1])))
            continue
        stock = [run for run in places.get((group, STOCK), ()) if run["status"] == "ok"]
        metrics = ("turn",) if done[0].get("alternating") else ("second", "settled", "first")
        found += [row for name in metrics if (row := _comfy_row(record, group, loader, name, done, stock))]
    return found


def _comfy_row(
    record: dict[str, Any],
    group: str,
    loader: str,
    name: str,
    runs: list[dict[str, Any]],
    stock: list[dict[str, Any]],
) -> Row | None:
    row = _comfy_pooled(runs, name)
    if row is None:
        return None
    base = _comfy_pooled(stock, name)
    if base is None and name == "settled":
        base = _comfy_pooled(stock, "second")
    if base is not None and loader != STOCK:
        row |= {"base": base["value"], "base_case": STOCK}
    run = runs[0]
    if name == "turn":
        return Row(group, loader, "turn of a model", "s", **row, same_bits=run.get("same_latents"))
    same: bool | None = None
    if stock and loader != STOCK:
        pairs = [
            (run[p]["hash"], stock[0][q]["hash"]) for p, q in _compared(name) if p in run and q in stock[0]
        ]
        same = all(a == b for a, b in pairs) if pairs else None
    host = run["host"]
    key = "anonymous_bytes" if "anonymous_bytes" in host["peak"] else "resident_bytes"
    profile = run.get("profile") or {}
    return Row(
        group,
        loader,
        "first image" if name == "first" else _PROMPTS[name],
        "s",
        **row,
        device_bytes=run["card"]["peak_bytes"] if "card" in run else None,
        host_bytes=host["peak"][key] - host["before"][key],
        same_bits=same,
        kernels=(("iteration", profile["kernel_ms"]),) if "kernel_ms" in profile and name != "first" else (),
        note=split((run.get(name) or {}).get("report")) if name != "first" else "",
    )


def _comfy_pooled(runs: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the pooled result of the runs of one case, None if no run has this metric."""
    values = [value for run in runs if (value := _comfy_value(run, name)) is not None]
    return pooled(values, [s for run in runs for s in _samples(run, name)]) if values else None


def _compared(name: str) -> tuple[tuple[str, str], ...]:
    """Return which prompts have equal seeds. The settled prompt has the seed of the second."""
    return (("settled", "second"),) if name == "settled" else ((name, name),)


def _comfy_value(run: dict[str, Any], name: str) -> float | None:
    if name == "turn":
        return run.get("turn_s")
    if name == "first":
        return (run.get("first") or {}).get("wall_s")
    return run.get("s_per_iteration" if name == "second" else "s_per_iteration_settled")


def _samples(run: dict[str, Any], name: str) -> list[float]:
    """Return the samples of a run in seconds. Where an older record keeps only the times of a prompt's iterations, its
    first one does not count, because the prompt prepares within it.
    """
    kept = run.get("samples_settled_s" if name == "settled" else "samples_s")
    if name == "first":
        return []
    if kept is not None or name == "turn":
        return list(kept or ())
    found = list((run.get(name) or {}).get("iterations_s") or ())
    return found[1:] or found


def _metric(run: dict[str, Any]) -> str:
    return "turn of a model" if run.get("alternating") else _PROMPTS["second"]


def _free(record: dict[str, Any], run: dict[str, Any]) -> str:
    """Return the group of a run: the model and the free memory of the card."""
    shape = record["shape"]
    blocks = f"{shape['double']}+{shape['single']} blocks of width {shape['hidden']}"
    limit = "the whole card" if run["limit"] is None else f"{run['limit'] / GIB:g} GiB"
    text = f"Flux-shaped, {record['file_bytes'] / 1e9:.1f} GB ({blocks}), {limit} free"
    options = _option(record["arguments"], "--options")
    if run.get("alternating"):
        text += ", two models in turns"
    return text + (f", {options}" if options else "")


def aitoolkit_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of an `aitoolkit_gpu` record: the time of a training step by configuration.

    The base case is the job without offloading of the same record, rank and quantisation; where the record has none,
    there is no base case. The runs of one configuration are pooled, also if they differ in the number of steps.
    """
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in record["runs"]:
        places.setdefault(_place(record, run["config"]), []).append(run)
    found = []
    for (group, case), runs in places.items():
        done = [run for run in runs if run["status"] == "ok"]
        if not done:
            found.append(Row(group, case, "step", "s", note=_why(runs[-1])))
            continue
        samples = [ms / 1e3 for run in done for ms in run.get("samples_ms", ())]
        quartiles = [[ms / 1e3 for ms in run["quartiles_ms"]] for run in done if run.get("quartiles_ms")]
        row = pooled([run["s_per_step"] for run in done], samples, quartiles)
        plain = [run for run in places.get((group, PLAIN), ()) if run["status"] == "ok"]
        same: bool | None = None
        if plain and case != PLAIN:
            row |= {
                "base": pooled(
                    [run["s_per_step"] for run in plain],
                    [ms / 1e3 for run in plain for ms in run.get("samples_ms", ())],
                )["value"],
                "base_case": PLAIN,
            }
            compared = [run["against_plain"] for run in done if run.get("against_plain")]
            if compared and all(one["equal"] == one["compared"] for one in compared):
                same = True
        found.append(
            Row(
                group,
                case,
                "step",
                "s",
                **row,
                device_bytes=max(run["peak_reserved_bytes"] for run in done),
                host_bytes=done[0].get("anonymous_bytes") or done[0].get("rss_bytes"),
                same_bits=same,
                kernels=tuple((done[0].get("kernel_ms") or {}).items()),
                note="; ".join(
                    filter(None, (_split(done[0]), _losses(done, plain if case != PLAIN else [])))
                ),
            )
        )
    return found


def _split(run: dict[str, Any]) -> str:
    """Return what a step waits for, from the report of the model that trains."""
    models = ((run.get("report") or {}).get("models") or {}).values()
    return split(next((one for one in models if one.get("kind") == "train"), None))


def _losses(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """Return how the losses differ from the job without offloading, and failed steps, in words.

    ``plain``: the runs without offloading, of which the first is compared with; empty for the case without offloading.
    """
    words = []
    largest = [run["against_plain"]["largest_relative"] for run in runs if run.get("against_plain")]
    between = [run["against_plain"]["largest_relative"] for run in plain if run.get("against_plain")]
    if largest and max(largest):
        share = f"{100 * max(largest):.2g} %"
        if plain:
            words.append(f"losses within {share} of no offloading's")
            words[-1] += (
                f", whose own runs differ by {100 * max(between):.2g} %" if between and max(between) else ""
            )
        else:
            words.append(f"the losses of its runs differ by {share}")
    skipped = sum(run.get("oom_skipped") or 0 for run in runs)
    if skipped:
        words.append(f"{skipped} steps failed, out of memory")
    return "; ".join(words)


def _place(record: dict[str, Any], word: str) -> tuple[str, str]:
    """Return group and case of a configuration such as `float8-half/auto@1024#100`."""
    word = re.sub(r"#\d+", "", word)
    ranked = re.search(r"@(\d+)", word)
    rank = int(ranked[1]) if ranked else record["rank"]
    word = re.sub(r"@\d+", "", word)
    quantised = word.startswith("float8-")
    word = word.removeprefix("float8-")
    given = record["arguments"]
    group = f"Z-Image-shaped, {record['layers']} layers, LoRA rank {rank}"
    if record.get("text_layers"):
        group += f", captions encoded in every step by {record['text_layers']} layers"
    group += ", float8" if quantised else ""
    pixels = _option(given, "--pixels")
    group += f", {pixels} pixels" if pixels not in (None, "512") else ""
    group += ", no checkpointing" if "--no-checkpointing" in given else ""
    if word == "plain":
        case = PLAIN
    elif word.startswith("stock"):
        share = word.removeprefix("stock")
        case = "ai-toolkit's layer_offloading" + (f", {share} % of the layers" if share else "")
    else:
        budget, _, codec = word.partition("/")
        case = f"Carom, {_budget(budget)}" + (f", {codec}" if codec else "")
        limit = _option(given, "--limit")
        # With the limit `fit` the card has as much memory as the job's model and adapters call for.
        case += (
            f", {'just enough' if limit == 'fit' else limit} of the card free"
            if limit and budget == "auto"
            else ""
        )
        granularity = _option(given, "--granularity")
        case += f", granularity {granularity}" if granularity not in (None, "auto") else ""
    return group, case


def _budget(word: str) -> str:
    """Return the budget of a configuration in words."""
    words = {"all": "the memory of layer_offloading", "half": "half of no offloading's memory"}
    return words.get(word, f"budget {word}")


def _option(arguments: list[str], name: str) -> str | None:
    """Return the last value of an option on a command line."""
    found = None
    for place, word in enumerate(arguments):
        if word == name and place + 1 < len(arguments):
            found = arguments[place + 1]
        elif word.startswith(name + "="):
            found = word.partition("=")[2]
    return found


def _why(run: dict[str, Any]) -> str:
    lines = (run.get("reason") or "no reason kept").strip().splitlines()
    return f"{run['status']}: {lines[-1]}"
