"""A process that ends while sessions are open, in any state, ends with its own exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests_disk_harness import save
from torch import nn

STATES = ("in a forward", "several sessions", "spilled, after an error", "packed file")

# Each state is made in a forked child, which then ends as any program does. A drive that computes with torch while it
# reads keeps the reader's threads in torch nearly all the time.
PROGRAM = """
import os, sys, threading, time
import torch, carom
from torch import nn
from carom.core.checkpoint import direct_io

folder, *states = sys.argv[1:]
torch.set_num_threads(1)  # else OpenMP waits in a forked child for threads of its parent
Native = type(direct_io.open_raw(sys.executable))
own, reading, product = Native.read_into, threading.Event(), torch.ones(200, 200)
slow = False

def read_into(self, buffer, offset):
    if slow and threading.current_thread() is not threading.main_thread():
        reading.set()
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            product @ product
    return own(self, buffer, offset)

Native.read_into = read_into

def net():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))).to(torch.bfloat16).requires_grad_(False)

def from_file(path, **settings):
    with torch.device("meta"):
        model = net()
    return carom.stream(model, weights=path, vram=100_000, ram=60_000, device="cpu", **settings)

def becomes_slow(*_):
    global slow
    slow = True

def fails(*_):
    raise RuntimeError("a fault of the model")

def step(session):
    with torch.no_grad():
        session.module(torch.ones(1, 64, dtype=torch.bfloat16))

def main(state):
    path = f"{folder}/model.safetensors"
    sessions = []
    if state == "in a forward":
        sessions.append(from_file(path))
    elif state == "packed file":
        sessions.append(from_file(f"{folder}/packed.safetensors"))
    elif state == "several sessions":
        sessions += [from_file(path), from_file(path)]
    else:
        sessions.append(carom.stream(net(), vram=100_000, ram=60_000, device="cpu", disk=folder))
    for session in sessions:
        step(session)
        session.module[12].register_forward_hook(becomes_slow)
    if state == "spilled, after an error":
        sessions[0].module[18].register_forward_hook(fails)
        try:
            step(sessions[0])
        except RuntimeError:
            pass
    elif state == "in a forward":
        threading.Thread(target=step, args=(sessions[0],)).start()  # Python waits for this thread
    else:
        step(sessions[0])
    assert reading.wait(5)
    return sessions

ended = {}
for state in states:
    child = os.fork()
    if not child:
        sessions = main(state)
        break
    ended[state] = os.waitpid(child, 0)[1]
else:
    print(ended, flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_with_open_sessions_exits_cleanly(tmp_path: Path, package: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))).to(torch.bfloat16)
    save(model, tmp_path, packed=True)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM, str(tmp_path), *STATES],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(package)},
    )  # fmt: skip
    assert not done.stderr, done.stderr
    assert done.stdout.strip() == str(dict.fromkeys(STATES, 0))
