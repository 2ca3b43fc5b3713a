"""A program that writes a Flux-shaped checkpoint of random bf16 weights: ``python comfy_checkpoint.py COMFYUI FILE
SHAPE_JSON``.

The program is a separate process, because `prompt_files` imports ComfyUI.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    import prompt_files  # beside this file, which is the first folder of the path when it runs

    job = {"kind": "model", "file": sys.argv[2], "seed": 1, "cpu": False, **json.loads(sys.argv[3])}
    prompt_files.main(sys.argv[1], [job])
