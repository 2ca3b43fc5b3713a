"""Whole prompts in the real ComfyUI, stock beside Carom, on a card whose free memory another process holds to a limit.

    COMFYUI_PATH=/path/to/ComfyUI python3 benchmarks/hosts/prompts.py [--cases two-models,lora] [--limits 6GiB] [--json FILE]

Run by path, or as ``python -m carom.benchmarks.hosts.prompts``. COMFYUI_PYTHON names the Python that runs ComfyUI
(default: this one). Random files are written once to ``--work``: two Flux-shaped models (9.4 GiB each), an fp8 text
encoder of T5 XXL's size, a VAE and two LoRA of rank 16. Each case runs in a fresh process for stock, and in another one
for Carom; `prompt_cases` has the cases. ComfyUI runs without its server, by its own executor and with stock's nodes.

A prompt's seconds are divided into parts: ``load`` (the nodes that load files), ``encode``, ``switch`` (from the begin of a
sampler to its model's first pass), ``first step``, ``other steps``, ``decode`` and ``rest``. The device is synchronised
after each model's first step. Hashing of results is in no part. The run fails if latents or the conditioning of any
prompt differ from those of stock, or if ComfyUI logged that it left out the LoRA of a weight.

``--link`` runs each configuration once more with CUPTI's record of copies, for the bytes over the link; its times are
not compared. ``--profile FOLDER`` samples the stack of the prompts' thread and writes the places that took time, by
part. Without a GPU, ``--tiny --cpu`` tests the path.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOADERS = ("stock", "carom")


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    comfyui = os.environ.get("COMFYUI_PATH", "").split(os.pathsep)[0]
    if not comfyui:
        print("set COMFYUI_PATH to a ComfyUI folder")
        return 2
    if "carom" not in sys.modules:  # run by path
        sys.path.insert(0, str(HERE.parent / "engines"))
        launch: Any = importlib.import_module("launch")
        sys.path.pop(0)  # its modules could shadow others
        launch.load_checkout()
    prompt_bench = importlib.import_module("carom.benchmarks.hosts.prompt_bench")
    prompt_cases = importlib.import_module("carom.benchmarks.hosts.prompt_cases")
    sizes = prompt_cases.TINY if arguments.tiny else prompt_cases.Sizes()
    known = prompt_cases.cases(arguments.prompts)
    names = list(known) if arguments.cases == "all" else arguments.cases.split(",")
    if unknown := [name for name in names if name not in known]:
        print(f"unknown cases: {', '.join(unknown)}; known are {', '.join(known)}")
        return 2
    return prompt_bench.run(
        arguments, comfyui, sizes, [known[name] for name in names], sys.argv[1:] if argv is None else argv
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="two-models", help="names, separated by commas, or all")
    parser.add_argument("--limits", default="6GiB", help="free memory of the card, none: all of it")
    parser.add_argument("--cache", default="cold", help="page cache of the files: cold, warm or cold,warm")
    parser.add_argument(
        "--prompts", type=int, default=4, help="prompts of a case, where it does not set them"
    )
    parser.add_argument("--repeat", type=int, default=1, help="processes of each configuration, in turns")
    parser.add_argument(
        "--only", choices=LOADERS, default="", help="one loader alone; nothing is compared then"
    )
    parser.add_argument("--vram", default="auto", help="vram of Carom's nodes")
    parser.add_argument(
        "--link", action="store_true", help="also count the bytes over the link, in further processes"
    )
    parser.add_argument(
        "--profile", type=Path, help="sample the stack, and write what took time to this folder"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "carom-prompts",
        help="where the files are kept",
    )
    parser.add_argument(
        "--touch-gb", type=float, default=0, help="first use so much host memory: guests that grow"
    )
    parser.add_argument("--limit-s", type=float, default=560, help="seconds within which the run ends")
    parser.add_argument("--json", type=Path, help="keep the record here")
    parser.add_argument("--logs", type=Path, help="keep the processes' output in this folder")
    parser.add_argument("--tiny", action="store_true", help="models of a few MB")
    parser.add_argument("--cpu", action="store_true", help="no GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
