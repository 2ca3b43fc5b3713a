"""A real ComfyUI as a headless process, and functions that post prompts to it like its page."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)


class PromptFailed(Exception):
    """Raised if the server refuses or fails a prompt; the message is the text that the page would show."""


class ComfyServer:
    """A running ComfyUI with its own data folder.

    ``prefix``: words before the command that starts it (see `ControlGroup.prefix`).
    """

    def __init__(self, comfyui: str, base: Path, log: Path | None = None, prefix: Sequence[str] = ()) -> None:
        self.comfyui, self.base, self.prefix = comfyui, base, prefix
        self.log = log or base / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen | None = None

    def start(self, *options: str, environment: dict[str, str] | None = None, timeout: float = 180) -> None:
        """Start the server with ``options`` for its main.py and wait until it answers.

        Raises RuntimeError, with the end of the log, if it does not answer within ``timeout`` seconds.
        """
        command = [
            *self.prefix, PYTHON, "main.py", "--port", str(self.port), "--base-directory", str(self.base), "--disable-auto-launch",
            "--disable-metadata", *options,
        ]  # fmt: skip
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.comfyui, env={**os.environ, **(environment or {})}, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        give_up = time.monotonic() + timeout
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                break
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self.tail()}")

    def stop(self) -> None:
        """Stop the server. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def rss_bytes(self) -> int:
        import psutil

        return psutil.Process(self.pid).memory_info().rss

    def tail(self, characters: int = 4000) -> str:
        """Return the last ``characters`` of the log."""
        return self.log.read_text("utf-8", "replace")[-characters:]

    # -- HTTP

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text = answer.read().decode("utf-8")
        return json.loads(text) if text.startswith(("[", "{")) else text

    def status(self, path: str) -> int:
        """Return the HTTP status of the answer for ``path``."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

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
        """Post a prompt without waiting; return its id."""
        return self.post("/prompt", {"prompt": prompt})["prompt_id"]

    def result(self, prompt_id: str, timeout: float = 120) -> dict:
        """Wait for a queued prompt and return its outputs by node. Raises PromptFailed with the text that the page
        would show.
        """
        give_up = time.monotonic() + timeout
        while time.monotonic() < give_up:
            found = self.get(f"/history/{prompt_id}").get(prompt_id)
            if found is not None and found.get("status", {}).get("completed") is not None:
                if found["status"].get("status_str") != "success":
                    raise PromptFailed(json.dumps(found["status"].get("messages", [])))
                return found["outputs"]
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the server ended while it ran prompt {prompt_id}:\n{self.tail()}")
            time.sleep(0.05)
        raise TimeoutError(f"prompt {prompt_id} did not end:\n{self.tail(3000)}")

    def run(self, prompt: dict, timeout: float = 120) -> dict:
        return self.result(self.queue(prompt), timeout)

    def free(self) -> None:
        """Request "Free model and node cache", as in the menu, and wait until it is done."""
        self.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(1.5)


def node(kind: str, **inputs: Any) -> dict:
    """Return one node of a prompt."""
    return {"class_type": kind, "inputs": inputs}
