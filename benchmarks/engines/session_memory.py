"""Host memory of a session with residents, in a table of six cases, here and in another checkout.

    python -m carom.benchmarks.engines.session_memory [BEFORE] [--json FILE]

BEFORE is the folder of a checkout; without it only this one is measured. Each case is a process of its own on the simulated
device, whose memory is memory of the process as well and is subtracted. The figure is the anonymous memory of the process
(Linux: RssAnon and RssShmem, without the page cache of files) beyond what it had before the model was made, in units of the
model's bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..results.provenance import ProvenanceError, checkout_commit
from .record import new_record, write_record

CASES = ("in memory", "from a file", "packed", "ram short", "after a park", "two models")
# This file's code, with the modules of the checkout that is measured.
_CHILD = """
import importlib.util, sys
importlib.import_module("carom.benchmarks.engines")
spec = importlib.util.spec_from_file_location("carom.benchmarks.engines.session_memory", sys.argv[1])
module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module
spec.loader.exec_module(module); module.measure(*sys.argv[2:])
"""
_D, _DEPTH = 1024, 10  # blocks of 38 MB


def resident_set() -> int:
    """Return the anonymous and shared memory of this process, in bytes. Raises OSError where the system is not Linux."""
    if sys.platform != "linux":
        raise OSError("only Linux tells the anonymous memory of a process")
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def measure(case: str, folder: str) -> None:
    """Print the figures of ``case`` as JSON. ``folder``: where a file of the model's weights is written."""
    import torch
    from safetensors.torch import save_file

    from ...core.budget.shared_budget import SharedBudget
    from ...core.device.simulated import SimulatedDevice
    from ...core.session.assembly import parts
    from ...core.session.session import stream
    from . import dit
    from .case import Case

    torch.set_num_threads(1)
    settings = Case(d=_D, depth=_DEPTH, tokens=8)
    inputs = dit.make_inputs(settings, torch.device("cpu"))[:2]
    nbytes = settings.weight_bytes
    before = resident_set()
    count = 2 if case == "two models" else 1
    budget: Any = SharedBudget(nbytes) if count == 2 else nbytes // 2
    sessions = []
    for number in range(count):
        model = dit.build(Case(**{**settings.to_dict(), "seed": number}))
        options: dict[str, Any] = {"codec": "lossless" if case == "packed" else "raw"}
        if case in ("from a file", "after a park"):
            path = Path(folder) / "weights.safetensors"
            save_file(dict(model.state_dict()), path)
            with torch.device("meta"):
                model = dit.Dit(_D, _DEPTH, settings.head_count).requires_grad_(False)
            options["weights"] = path
        if case == "ram short":
            options["ram"] = nbytes // 4
        sessions.append((model, stream(model, vram=budget, device=SimulatedDevice(), **options)))
    found: dict[str, Any] = {}
    parked = case == "after a park"
    with torch.no_grad():
        for model, _ in sessions * 3:
            model(*inputs)
        if parked:
            for _ in range(2):
                sessions[0][1].park(keep=True)
                found["parked"] = _held(before, sessions, parts) / nbytes
                sessions[0][0](*inputs)
                sessions[0][0](*inputs)
    found["attached"] = _held(before, sessions, parts) / nbytes
    print(json.dumps(found))


def _held(before: int, sessions: list[Any], parts: Any) -> int:
    gc.collect()
    device = sum(parts(session).manager.engine.allocated for _, session in sessions)
    return resident_set() - before - device


def run(case: str, checkout: Path) -> dict[str, Any]:
    """Return the figures of ``case`` in a process that uses ``checkout``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "carom").symlink_to(checkout.resolve())
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, __file__, case, folder],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m carom.benchmarks.engines.session_memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("before", nargs="?", type=Path, help="folder of another checkout")
    parser.add_argument("--before-commit", default="", help="its commit, where the folder has no git")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    given = parser.parse_args(argv)
    try:
        resident_set()
        record = new_record(
            "carom session memory", sys.argv[1:] if argv is None else argv, kept=given.json is not None
        )
        commit = given.before_commit or (checkout_commit(given.before) if given.before else None)
    except (OSError, ProvenanceError) as error:
        print(f"session_memory: {error}", file=sys.stderr)
        return 2
    record["before_commit"] = commit
    here = Path(__file__).resolve().parents[2]
    for case in CASES:
        row = {"case": case, "after": run(case, here)}
        if given.before is not None:
            row["before"] = run(case, given.before)
        record["cases"].append(row)
        print(json.dumps(row), flush=True)
        if given.json is not None:
            write_record(record, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
