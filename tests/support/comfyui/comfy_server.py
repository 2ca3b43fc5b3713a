"""The real ComfyUI of the tests, with tiny random models, used if COMFYUI_PATH is set.

It runs on the CPU, or with the options in COMFYUI_OPTIONS.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from carom.benchmarks.hosts.comfy_host import PYTHON, ComfyServer, PromptFailed, node

__all__ = ["OPTIONS", "PACKS", "PATHS", "PYTHON", "REASON", "PromptFailed", "Server", "node"]

HERE = Path(__file__).resolve().parent
PATHS = [path for path in os.environ.get("COMFYUI_PATH", "").split(os.pathsep) if path]
# On a GPU: COMFYUI_OPTIONS="--verbose INFO", say.
OPTIONS = os.environ.get("COMFYUI_OPTIONS", "--cpu").split()
PACKS = [path for path in os.environ.get("COMFYUI_PACKS", "").split(os.pathsep) if path]
REASON = (
    "set COMFYUI_PATH to a ComfyUI folder (several: separated as in PATH) to run the tests of the real server"
)


class Server(ComfyServer):
    """A running ComfyUI with these nodes and the test pack, and its own data folder."""

    def prepare(self) -> None:
        """Create the folders and models, and install the node packs: Carom's by the documented command, the tests' by
        copying.
        """
        nodes = self.base / "custom_nodes"
        for folder in (self.base / "input", self.base / "user"):
            folder.mkdir(parents=True)
        for pack, file in (("carom_test", "comfy_test_nodes.py"), ("carom_test_gguf", "comfy_gguf_nodes.py")):
            (nodes / pack).mkdir(parents=True)
            (nodes / pack / "__init__.py").write_text((HERE / file).read_text("utf-8"), "utf-8")
        for pack in PACKS:
            (nodes / Path(pack).name).symlink_to(Path(pack).resolve(), target_is_directory=True)
        made = subprocess.run(
            [PYTHON, str(HERE / "comfy_maker.py"), self.comfyui, str(self.base / "models")],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"the tiny models could not be made:\n{made.stderr[-4000:]}")

    def start_for_tests(self) -> None:
        # Layers this small only wait for other threads. ComfyUI keeps the outputs of a prompt in a set of strings: with
        # a fixed seed they run in the same order each time.
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
        self.start(*OPTIONS, environment=environment)
