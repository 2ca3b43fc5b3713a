"""Starts a real ComfyUI on the CPU and posts prompts to it, as its page does. Used where COMFYUI_PATH is set."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATHS = [path for path in os.environ.get("COMFYUI_PATH", "").split(os.pathsep) if path]
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
REASON = (
    "set COMFYUI_PATH to a ComfyUI folder (several: separated as in PATH) to run the tests of the real server"
)


class PromptFailed(Exception):
    """The server refused or failed a prompt; the text is what the page would show."""


class Server:
    """A running ComfyUI with these nodes and the test pack, over a data folder of its own."""

    def __init__(self, comfyui: str, base: Path) -> None:
        self.comfyui, self.base = comfyui, base
        self.log = base / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen | None = None

    def prepare(self) -> None:
        """Folders, models, and the packs: ours by the documented command, the tests' by copying."""
        nodes = self.base / "custom_nodes"
        for folder in (nodes / "carom_test", self.base / "input", self.base / "user"):
            folder.mkdir(parents=True)
        (nodes / "carom_test" / "__init__.py").write_text(
            (HERE / "comfy_test_nodes.py").read_text("utf-8"), "utf-8"
        )
        made = subprocess.run(
            [PYTHON, str(HERE / "comfy_maker.py"), self.comfyui, str(self.base / "models")],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"the tiny models could not be made:\n{made.stderr[-4000:]}")

    def start(self, *options: str) -> None:
        command = [
            PYTHON, "main.py", "--cpu", "--port", str(self.port), "--base-directory", str(self.base),
            "--disable-auto-launch", "--disable-metadata", *options,
        ]  # fmt: skip
        with open(self.log, "ab") as log:
            # Layers this small only wait for other threads.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, cwd=self.comfyui, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        give_up = time.monotonic() + 180
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                break
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text('utf-8', 'replace')[-4000:]}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def rss_bytes(self) -> int:
        import psutil

        assert self._process is not None
        return psutil.Process(self._process.pid).memory_info().rss

    # -- HTTP

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text = answer.read().decode("utf-8")
        return json.loads(text) if text.startswith(("[", "{")) else text

    def post(self, path: str, data: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(data).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read().decode("utf-8")
        except urllib.error.HTTPError as error:
            raise PromptFailed(error.read().decode("utf-8", "replace")) from error
        return json.loads(text) if text.startswith(("[", "{")) else text

    def queue(self, prompt: dict) -> str:
        """Post a prompt without waiting; returns its id."""
        return self.post("/prompt", {"prompt": prompt})["prompt_id"]

    def result(self, prompt_id: str, timeout: float = 120) -> dict:
        """Outputs by node of a queued prompt. Raises PromptFailed with what the page would show."""
        give_up = time.monotonic() + timeout
        while time.monotonic() < give_up:
            found = self.get(f"/history/{prompt_id}").get(prompt_id)
            if found is not None and found.get("status", {}).get("completed") is not None:
                if found["status"].get("status_str") != "success":
                    raise PromptFailed(json.dumps(found["status"].get("messages", [])))
                return found["outputs"]
            time.sleep(0.05)
        raise TimeoutError(
            f"prompt {prompt_id} did not end:\n{self.log.read_text('utf-8', 'replace')[-3000:]}"
        )

    def run(self, prompt: dict, timeout: float = 120) -> dict:
        return self.result(self.queue(prompt), timeout)

    def free(self) -> None:
        """ "Free model and node cache" of the menu; waits until it is done."""
        self.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(1.5)


def node(kind: str, **inputs: Any) -> dict:
    return {"class_type": kind, "inputs": inputs}
