"""A page in headless Chromium, driven by chromedriver over the W3C WebDriver protocol; no other package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


class Page:
    """A browser window of ``width`` x ``height`` pixels."""

    def __init__(self, width: int = 1600, height: int = 900) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._root = f"http://127.0.0.1:{port}"
        self._profile = tempfile.mkdtemp(prefix="carom-chromium-")
        assert DRIVER and CHROMIUM
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._session = ""
        try:
            self._until_up()
            arguments = [*OPTIONS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
            wanted = {"binary": CHROMIUM, "args": arguments}
            made = self._ask(
                "POST", "/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": wanted}}}
            )
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self.close()
            raise

    def _until_up(self) -> None:
        give_up = time.monotonic() + 30
        while True:
            try:
                self._ask("GET", "/status")
                return
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.1)

    def _ask(self, method: str, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(
            self._root + path, body, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode("utf-8", "replace")[:2000]) from error

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script and return the value of its ``return``; a promise is awaited."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """Wait until a script's value is true and return it. Raises TimeoutError after ``seconds``."""
        give_up = time.monotonic() + seconds
        while True:
            try:
                found = self.run(script, *arguments)
            except RuntimeError:  # not there yet
                found = None
            if found:
                return found
            if time.monotonic() > give_up:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.25)

    def click(self, selector: str, text: str = "", seconds: float = 60) -> None:
        """Click the first visible element that matches ``selector`` and contains ``text``."""
        find = (
            "const all = [...document.querySelectorAll(arguments[0])];"
            "return all.find(e => e.getClientRects().length && (e.innerText || e.ariaLabel || '').includes(arguments[1])) || null;"
        )
        found = self.wait(find, selector, text, seconds=seconds)
        element = next(iter(found.values()))
        self._ask("POST", f"{self._session}/element/{element}/click", {})

    def screenshot(self) -> bytes:
        """Return a PNG image of the window."""
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))

    def close(self) -> None:
        """End the browser. Idempotent."""
        if self._session:
            with contextlib.suppress(OSError, RuntimeError):
                self._ask("DELETE", self._session)
            self._session = ""
        self._driver.terminate()
        try:
            self._driver.wait(10)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        shutil.rmtree(Path(self._profile), ignore_errors=True)
