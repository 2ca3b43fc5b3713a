"""The runner of cases: one after the other, each in a new process. No child process outlives this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from .case import Case

LAUNCH = Path(__file__).resolve().parent / "launch.py"
STDERR_KEPT = 4000  # characters of a failed worker's stderr that go into the record


class Lines(Protocol):
    """A text stream, or a similar object, to which progress is written. Each write is one whole line."""

    def write(self, line: str, /) -> object: ...

    def flush(self) -> object: ...


def run_case(case: Case, limit_s: float | None = None) -> dict[str, Any]:
    """Run `case` in a worker process and return its result.

    `status`: "ok", "skipped", "failed" or "timeout"; `seconds`: duration of the process. On KeyboardInterrupt, or any
    other exception here, the child and its children are killed first.
    """
    limit = case.limit_s if limit_s is None else min(case.limit_s, limit_s)
    command = [sys.executable, str(LAUNCH), "worker", "--watch-stdin", case.to_json()]
    started = time.perf_counter()
    # stderr goes to a file, because a full pipe would block the worker, and only the end of the text is needed.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # never written to; its end of file tells the worker that this process ended
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=os.name
            == "posix",  # Ctrl-C then reaches this process only, which ends the group
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            out = _read_output(child, limit)
        finally:
            kill_group(child)
        seconds = time.perf_counter() - started
        if out is None:
            result = {"status": "timeout", "reason": f"not done after {limit:.0f} s"}
        else:
            result = _parse(out, child.returncode)
        if result["status"] in ("failed", "timeout"):
            errors.seek(0, os.SEEK_END)
            errors.seek(max(0, errors.tell() - STDERR_KEPT))
            result["stderr_tail"] = errors.read()
    return {**result, "seconds": seconds}


def _read_output(child: subprocess.Popen, limit: float) -> bytes | None:
    """Return all of the child's stdout, or None after `limit` seconds."""
    # A thread reads the output, because `communicate` would close stdin at once, and the worker would then exit.
    chunks: list[bytes] = []
    assert child.stdout is not None
    stdout = child.stdout
    reader = threading.Thread(target=lambda: chunks.append(stdout.read()), daemon=True)
    reader.start()
    try:
        child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    reader.join(timeout=5)
    return b"".join(chunks)


def _parse(out: bytes, code: int) -> dict[str, Any]:
    lines = out.decode("utf-8", "replace").strip().splitlines()
    try:
        result = json.loads(lines[-1])
        if isinstance(result, dict) and "status" in result:
            return result
    except (IndexError, json.JSONDecodeError):
        pass
    return {"status": "failed", "reason": f"the worker left no result (exit code {code})"}


def kill_group(child: subprocess.Popen) -> None:
    """Kill the child and the processes that it started, and wait for the child."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Convert SIGTERM to KeyboardInterrupt inside the ``with`` block, so that a termination cleans up like Ctrl-C."""

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_cases(
    cases: dict[str, Case],
    on_result: Callable[[str, int, dict[str, Any]], None],
    *,
    processes: int = 1,
    time_limit_s: float | None = None,
    least_s: float = 20.0,
    progress: Lines | None = None,
    on_start: Callable[[Case], None] | None = None,
) -> bool:
    """Run the cases in order, each in ``processes`` processes; return whether the run was interrupted.

    One process of every case runs before the next process of any, so that a change of the host's speed meets all
    engines. Exactness is checked in the first process only, and so is everything that is no step.

    ``on_result`` is called with key, number of the process (from 1) and result. ``on_start`` is called before each
    process that runs. With a time limit, a process that would start with less than `least_s` seconds left is skipped,
    and its result says so.
    """

    def say(line: str) -> None:
        if progress:
            progress.write(line + "\n")
            progress.flush()

    turns = [(1, key, case) for key, case in cases.items()]
    turns += [
        (process, key, case.but(verify=False))
        for process in range(2, processes + 1)
        for key, case in cases.items()
        if case.kind == "step"
    ]
    began = time.perf_counter()
    with terminate_as_interrupt():
        for number, (process, key, case) in enumerate(turns, 1):
            left = None if time_limit_s is None else time_limit_s - (time.perf_counter() - began)
            try:
                reason = unavailable(case)
                if reason is not None:
                    result: dict[str, Any] = {"status": "skipped", "reason": reason, "seconds": 0.0}
                elif left is not None and left < least_s:
                    result = {"status": "skipped", "reason": "the time limit was reached", "seconds": 0.0}
                else:
                    if on_start:
                        on_start(case)
                    result = run_case(case, left)
            except KeyboardInterrupt:
                say("interrupted; what is done is kept")
                return True
            say(f"[{number}/{len(turns)}] {case.label()}: {outcome(result)}")
            on_result(key, process, result)
    return False


def unavailable(case: Case) -> str | None:
    """Return why the case cannot run here, as far as that is known without starting the case; None if no reason is
    known.
    """
    if case.kind != "step":
        return None
    from .peers import get_engine

    return get_engine(case.engine).unavailable(case)


def outcome(result: dict[str, Any]) -> str:
    """Return a short description of a result."""
    if result["status"] != "ok":
        return f"{result['status']}: {result.get('reason', '')}"
    took = f" ({result['seconds']:.0f} s)"
    if "link_bytes_per_second" in result:
        return f"{result['link_bytes_per_second'] / 1e9:.1f} GB/s" + took
    if "touched_bytes" in result:
        return f"{result['touched_bytes'] / 1e9:.0f} GB touched" + took
    if "added_us" in result:
        return f"{result['added_us']:+.1f} us a call of {result['plain_us']:.0f} us" + took
    if "ms_per_step" not in result:
        return f"attached in {result['attach_seconds']:.2f} s" + took
    peak = result.get("peak_reserved_bytes")
    memory = f", {peak / 1e9:.2f} GB reserved" if peak else ""
    return f"{result['ms_per_step']:.1f} ms a step{memory}" + took
