"""Rows of the records of whole prompts in ComfyUI (`benchmarks/hosts/prompts.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .rows import Row, pooled

GIB = 1 << 30
STOCK, CAROM = "stock", "Carom"
FIRST, SECOND, LATER = "1st prompt", "2nd prompt", "later prompts"
# The prompts of a case that are not alike from the third on.
_NAMES = {
    "lora": (
        FIRST, "1st prompt with a LoRA", "later prompt with a LoRA", "LoRA, strength changed", "a second LoRA",
        "without LoRA again",
    ),
    "switch-back": (FIRST, "the other model, new", "models of two prompts ago"),
}  # fmt: skip
CASES = {
    "two-models": "two models of {model} in turns",
    "one-model": "one model of {model}",
    "encoder": "two models of {model} in turns, Carom for the text encoder too",
    "behind-loader": "two models of {model} in turns, Offload Model behind the stock loader",
    "lora": "one model of {model}, LoRA of rank 16",
    "decode": "one model of {model}, VAE decode of 3 GiB",
    "same-text": "two models of {model} in turns, the same text",
    "switch-back": "two models of {model}, one a prompt",
    "ram-32GB": "two models of {model} in turns, 32 GB of RAM",
    "ram-16GB": "two models of {model} in turns, 16 GB of RAM",
}


def prompt_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `prompts` record: seconds of a prompt, and of a step from the second prompt on.

    Prompts that are alike are pooled, over all processes of a case. The base case is stock in the same group.
    """
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in record["runs"]:
        if not run["link"]:  # prompts whose copies were counted have no times to compare
            places.setdefault((_group(record, run), _case(run)), []).append(run)
    found = []
    for (group, case), runs in places.items():
        done = [run for run in runs if run["status"] == "ok"]
        if not done:
            reason = (runs[-1].get("reason") or "no reason kept").strip().splitlines()[-1]
            found.append(Row(group, case, FIRST, "s", note=f"{runs[-1]['status']}: {reason}"))
            continue
        stock = [run for run in places.get((group, STOCK), ()) if run["status"] == "ok"]
        cache = {"cache": done[0]["cache"]}  # on which the bytes over the link do not depend
        counted = _by_name(
            run
            for run in record["runs"]
            if run["link"] and (_group(record, run | cache), _case(run)) == (group, case)
        )
        found += _rows(record, group, case, done, [] if case == STOCK else stock, counted)
    return found


def _case(run: dict[str, Any]) -> str:
    return STOCK if run["loader"] == "stock" else CAROM


def _rows(
    record: dict[str, Any],
    group: str,
    case: str,
    runs: list[dict[str, Any]],
    stock: list[dict[str, Any]],
    counted: dict[str, list[dict[str, Any]]],
) -> Iterable[Row]:
    """Yield the rows of a case. ``counted``: its prompts whose copies were counted, by name."""
    steps = record["sizes"]["steps"]
    ours, theirs = _by_name(runs), _by_name(stock)
    for name, prompts in ours.items():
        other = theirs.get(name, [])
        for metric, seconds in ((name, _prompt), (f"step, {name}", _step)):
            if metric == f"step, {FIRST}":
                continue
            row = _pooled([seconds(prompt, steps) for prompt in prompts])
            if other:
                row |= {
                    "base": _pooled([seconds(prompt, steps) for prompt in other])["value"],
                    "base_case": STOCK,
                }
            whole = metric == name
            yield Row(
                group, case, metric, "s", **row,
                device_bytes=max((prompt.get("device_peak_bytes") or 0 for prompt in prompts), default=0) or None,
                host_bytes=max(prompt["memory"]["sum_bytes"] for prompt in prompts) if whole else None,
                same_bits=_same(prompts, other) if other and whole else None,
                note=_parts(prompts) + _copies(counted.get(name, [])) if whole else "",
            )  # fmt: skip


def _pooled(seconds: list[float]) -> dict[str, Any]:
    return pooled(seconds, seconds) | {"processes": 1}


def _by_name(runs: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the prompts of all processes by the name of what they do."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        names = _NAMES.get(run["case"], (FIRST, SECOND, LATER))
        for prompt in run.get("prompts", ()):
            found.setdefault(names[min(prompt["prompt"], len(names) - 1)], []).append(prompt)
    return found


def _prompt(prompt: dict[str, Any], steps: int) -> float:
    return prompt["wall_s"]


def _step(prompt: dict[str, Any], steps: int) -> float:
    """Return the seconds of a step other than the first one of each model."""
    models = sum(name.startswith("latent_") for name in prompt["results"])
    return prompt["parts_s"]["other steps"] / max(1, steps - models)


def _same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Return whether latents and conditioning equal those of stock's prompts with the same numbers."""
    known = {prompt["prompt"]: prompt["results"] for prompt in theirs}
    return all(
        result["hash"] == known[prompt["prompt"]].get(name, {}).get("hash")
        for prompt in ours
        if prompt["prompt"] in known
        for name, result in prompt["results"].items()
        if name != "image"
    )


def _parts(prompts: list[dict[str, Any]]) -> str:
    """Return the seconds by part and the bytes read, of the prompt whose time is the middle one."""
    prompt = sorted(prompts, key=lambda one: one["wall_s"])[len(prompts) // 2]
    words = [f"{name} {seconds:.2f}" for name, seconds in prompt["parts_s"].items() if seconds >= 0.01]
    read = prompt["read_bytes"].get("storage", 0)
    return ", ".join(words) + (f"; {read / 1e9:.1f} GB read" if read >= 1e8 else "")


def _copies(prompts: list[dict[str, Any]]) -> str:
    """Return the bytes over the link of the last of the prompts whose copies were counted, "" without one."""
    if not prompts or not prompts[-1].get("link_bytes"):
        return ""
    found = prompts[-1]["link_bytes"]
    return f"; {found['to_device'] / 1e9:.1f} GB to the device, {found['from_device'] / 1e9:.1f} GB from it"


def _group(record: dict[str, Any], run: dict[str, Any]) -> str:
    """Return the group of a run: what its prompts do, the free memory, and whether the files were in the page cache."""
    model = f"{record['file_bytes']['model'] / 1e9:.1f} GB"
    limit = "the whole card" if run["limit"] is None else f"{run['limit'] / GIB:g} GiB"
    words = CASES.get(run["case"], run["case"]).format(model=model)
    cached = "not " if run["cache"] == "cold" else ""
    return f"{words}, {limit} free, files {cached}in the page cache"
