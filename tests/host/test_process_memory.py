"""Host memory of a process that streams a model much larger than its budget, as the operating system counts and limits it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

MIB = 1 << 20
WIDTH, BLOCKS = 512, 48  # 4 MiB of bf16 each: 192 MiB
RAM, VRAM = 16 * MIB, 16 * MIB
# With the CPU as the device, its slots are in this memory too.
BOUND = RAM + VRAM + 300_000_000

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or torch.version.cuda is not None or torch.version.hip is not None,
    reason="the bound holds on Linux with a CPU build of torch; the libraries of other builds take more",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, root) -> Path:
    """A folder with a packed checkpoint of 192 MiB, twelve times the budget, and what it computes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "source").mkdir()
    for part in ("make", "pack"):
        done = subprocess.run(
            _part(root, part, folder), capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
    return folder


def _part(root: Path, name: str, folder: Path) -> list[str]:
    return [
        sys.executable, str(root / "benchmarks" / "tiers" / "disk_stream.py"), "--part", name, "--in", str(folder),
        "--blocks", str(BLOCKS), "--width", str(WIDTH), "--ram", str(RAM), "--vram", str(VRAM), "--passes", "2",
    ]  # fmt: skip


def _run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@linux
def test_a_process_that_streams_a_packed_checkpoint_stays_small(root, checkpoint):
    """Loaded whole, the process would exceed the bound."""
    done = _run(_part(root, "run", checkpoint))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bit_exact"] and result["packed"] and result["weights_bytes"] == BLOCKS * 16 * WIDTH**2
    assert result["ram_peak_bytes"] <= result["ram_budget_bytes"] == RAM
    print(f"peak memory of the process: {result['peak_rss_bytes']} bytes")
    assert result["peak_rss_bytes"] <= BOUND


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """A control group whose processes hold at most ``nbytes`` (page cache included, which the kernel takes back), or a skip."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base, f"carom-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(nbytes))
                with contextlib.suppress(OSError):  # where there is swap, none of it
                    (group / "memory.swap.max").write_text("0")
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here: needs root and a writable /sys/fs/cgroup")


def _inside(group: Path, command: list[str]) -> list[str]:
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]


@linux
@pytest.mark.slow
def test_streaming_fits_into_a_control_group_that_loading_whole_does_not(root, checkpoint):
    whole = (
        "import sys, torch; from safetensors.torch import load_file;"
        "held = [t.clone() for t in load_file(sys.argv[1]).values()]; print(sum(t.nbytes for t in held))"
    )
    with limited(BOUND) as group:
        done = _run(_inside(group, _part(root, "run", checkpoint)))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["bit_exact"]
        done = _run(_inside(group, [sys.executable, "-c", whole, str(checkpoint / "packed.safetensors")]))
        assert done.returncode != 0, "the limit does not bite: this test shows nothing"


MAPPED = """
import json, sys, carom, torch
from pathlib import Path
from safetensors.torch import load_file
from torch import nn
path, ram, vram = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48))).requires_grad_(False)
model.load_state_dict(load_file(path), assign=True)
x = torch.ones(1, 1024)
with carom.stream(model, device="cpu", vram=vram, ram=ram, disk="auto") as session, torch.no_grad():
    for _ in range(3):
        y = model(x)
    report = session.report()
memory = {line.split(":")[0]: int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("Rss")}
print(json.dumps({"sum": y.sum().item(), "anon": memory["RssAnon"], "disk": report.disk_bytes_per_step,
                  "notes": report.notes, "ram_peak": report.ram_peak_bytes}))
"""


@linux
@pytest.mark.slow
def test_a_module_of_a_mapped_file_fits_into_a_control_group_of_a_part_of_its_size(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weights = {f"{index}.weight": torch.randn(1024, 1024) / 32 for index in range(48)}
    save_file(weights, tmp_path / "model.safetensors")
    x = torch.ones(1, 1024)
    for weight in weights.values():
        x = torch.nn.functional.linear(x, weight)
    nbytes = sum(weight.nbytes for weight in weights.values())
    with limited(BOUND) as group:
        command = [sys.executable, "-c", MAPPED, str(tmp_path / "model.safetensors"), str(RAM), str(VRAM)]
        done = _run(_inside(group, command))
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
    assert found["sum"] == x.sum().item()
    assert found["ram_peak"] <= RAM
    assert found["anon"] <= BOUND < nbytes + 300_000_000
    assert 0 < found["disk"] <= nbytes


CONTAINED = """
import faulthandler, json, sys, time, carom, torch
from carom.core.host.probe import host_memory
from safetensors.torch import load_file
from torch import nn
faulthandler.dump_traceback_later(150, exit=True)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(60))).requires_grad_(False)
model.load_state_dict(load_file(sys.argv[1]), assign=True)
x, passes, others = torch.ones(1, 2048), [], []
with carom.stream(model, device="cpu", vram=64 << 20, ram="auto", disk="auto") as session, torch.no_grad():
    for turn in range(9):
        y = model(x)
        report, free = session.report(), host_memory().free
        passes.append({
            "sum": y.sum().item(), "ram": report.ram_budget_bytes, "peak": report.ram_peak_bytes, "free": free,
            "others": sum(len(other) for other in others),
        })
        if turn == 2:
            share = (free + report.ram_budget_bytes // 2) // 5
        if 2 <= turn < 7:
            others.append(bytearray(b"1") * share)
        time.sleep(1.05)
print(json.dumps(passes))
"""


@linux
@pytest.mark.slow
def test_ram_auto_gives_memory_back_before_the_limit_of_its_control_group(tmp_path):
    """A model of 1 GB in 600 MB, and other allocations of the group that take more than it has free beside the cache."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weights = {f"{index}.weight": torch.randn(2048, 2048) / 45 for index in range(60)}
    save_file(weights, tmp_path / "model.safetensors")
    x = torch.ones(1, 2048)
    for weight in weights.values():
        x = torch.nn.functional.linear(x, weight)
    with limited(600_000_000) as group:
        done = _run(_inside(group, [sys.executable, "-c", CONTAINED, str(tmp_path / "model.safetensors")]))
    assert done.returncode == 0, done.stderr
    passes = json.loads(done.stdout)
    assert all(one["sum"] == x.sum().item() for one in passes)
    assert all(0 < one["peak"] <= one["ram"] for one in passes)
    first, last = passes[2], passes[-1]
    assert last["others"] > first["free"], "without giving memory back, the group has no room for this"
    smaller = next(one for one in passes if one["ram"] < first["ram"])
    assert smaller["others"] < first["free"], "before the limit"
    assert last["ram"] < first["ram"] // 2
