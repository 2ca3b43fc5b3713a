"""Bytes that Carom copies, decodes, encodes and reads for each prompt in the real ComfyUI, on the CPU.

ComfyUI believes in a card of 70 MB (see `prompt_counts.imagine_card`), on which a text encoder of 47 MB and a model
that may take 12 MiB do not fit together. Carom's engine of the CPU seems to pin memory, so that parked weights wait as beside a
GPU. A model has 23 MB of weights. The counts are the same in every run. They must not
exceed the bounds below, so a weight that is copied or decoded once more fails. After a change that lowers them,
``python tests/comfyui/test_comfy_prompt_counts.py`` prints the new bounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from carom.benchmarks.hosts.prompt_cases import TINY, Way, cases, graph
from carom.benchmarks.hosts.prompts_on_cpu import COMFYUI, run

VRAM, PROMPTS = "12MiB", 3
KINDS = ("link", "copied", "decoded", "encoded", "read")  # see `prompt_counts.Counts`

# Bytes of each kind, for each prompt of a case. The codec stands after the name of the case.
BOUNDS: dict[str, list[tuple[int, ...]]] = {
    "one-model raw": [
        (89_976_832, 23_136_256, 0, 0, 23_068_672),
        (80_504_832, 0, 0, 0, 0),
        (80_504_832, 0, 0, 0, 0),
    ],
    "two-models raw": [
        (102_475_776, 46_272_512, 0, 0, 46_137_344),
        (108_529_664, 0, 0, 0, 0),
        (105_502_720, 0, 0, 0, 0),
    ],
    "encoder raw": [
        (154_113_024, 93_919_872, 0, 0, 93_782_016),
        (160_166_912, 0, 0, 0, 0),
        (157_139_968, 0, 0, 0, 0),
    ],
    "behind-loader raw": [
        (102_475_776, 46_272_512, 0, 0, 0),
        (108_529_664, 0, 0, 0, 0),
        (105_502_720, 0, 0, 0, 0),
    ],
    "lora raw": [
        (89_976_832, 23_136_256, 0, 0, 23_068_672),
        (97_867_776, 3_692_544, 0, 0, 1_720_320),
        (88_395_776, 0, 0, 0, 0),
        (97_867_776, 0, 0, 0, 0),
        (85_612_032, 30_065_152, 0, 0, 1_720_320),
        (91_949_568, 24_428_544, 0, 0, 0),
    ],
    "switch-back raw": [
        (89_976_832, 23_136_256, 0, 0, 23_068_672),
        (89_976_832, 23_136_256, 0, 0, 23_068_672),
        (89_976_832, 23_136_256, 0, 0, 23_068_672),
    ],
    "two-models lossless": [
        (102_475_776, 46_272_512, 0, 0, 46_137_344),
        (108_529_664, 0, 0, 0, 0),
        (105_502_720, 0, 0, 0, 0),
    ],
}

pytestmark = [
    pytest.mark.skipif(not COMFYUI, reason="set COMFYUI_PATH to a ComfyUI folder"),
    pytest.mark.timeout(600),
]


INTERRUPTED = ("encode", "switch", "first step", "other steps")


def counts_of(told: dict[str, Any]) -> tuple[int, ...]:
    return tuple(told["counts"][kind] for kind in KINDS)


def counted(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Run all cases; return the counts of each prompt in the form of `BOUNDS`."""
    known, graphs, names = cases(PROMPTS), [], []
    for name in BOUNDS:
        case, _, codec = name.partition(" ")
        way = Way(carom=True, mode="stream", vram=VRAM, codec=codec)
        graphs += [graph(known[case], number, TINY, way) for number in range(len(known[case].prompts))]
        graphs.append(None)  # drop the models
        names += [name] * (len(known[case].prompts) + 1)
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in BOUNDS}
    for told in run(folder, graphs):
        found[names[told["prompt"]]].append(counts_of(told))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prompts")


@pytest.fixture(scope="module")
def found(folder):
    return counted(folder)


@pytest.mark.parametrize("case", BOUNDS)
def test_prompts_copy_decode_and_read_no_more_than_their_bounds(found, case):
    assert len(found[case]) == len(BOUNDS[case])
    for number, (counts, bounds) in enumerate(zip(found[case], BOUNDS[case], strict=True), 1):
        over = {
            kind: f"{count:,} > {bound:,}"
            for kind, count, bound in zip(KINDS, counts, bounds, strict=True)
            if count > bound
        }
        assert not over, f"{case}, prompt {number}: {over}"


def test_a_prompt_after_an_interrupted_one_is_right_and_reads_nothing_again(folder):
    way = Way(carom=True, mode="stream", vram=VRAM, codec="raw")
    first, second, third = (graph(cases(PROMPTS)["two-models"], number, TINY, way) for number in range(3))
    graphs, interrupts = [first, second, third], {}
    for part in INTERRUPTED:
        interrupts[len(graphs)] = part
        graphs += [first, second]
    told = run(folder, graphs, interrupts=interrupts)
    for number, part in interrupts.items():
        again = told[number + 1]
        assert "interrupted" in told[number] and again["results"] == told[1]["results"], part
        assert again["counts"]["read"] == 0 and told[number]["counts"]["read"] == 0, part
        assert again["counts"]["link"] <= told[1]["counts"]["link"], part


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        for name, rows in counted(Path(made)).items():
            print(f'    "{name}": [')
            for row in rows:
                print(f"        ({', '.join(f'{count:_}' for count in row)}),")
            print("    ],")
