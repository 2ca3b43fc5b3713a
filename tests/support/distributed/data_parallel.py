"""A rank of tests/session/test_group.py: trains on weights that the ranks share, beside resident ones.

It computes on the CPU with gloo. With the environment variable CAROM_TEST_GPUS it computes on a GPU with NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import carom
import torch
import torch.distributed as dist
from carom.core.placement import shared_weights
from carom.core.session import gathering, host_resources, settings
from carom.tools.pack.writer import pack
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GPUS = "CAROM_TEST_GPUS" in os.environ
WIDTH, BLOCKS, STEPS = 1024 if GPUS else 256, 6, 3
FROZEN = BLOCKS * 2 * WIDTH * 4 * WIDTH * 4  # bytes of the large weights
VRAM = FROZEN // 2
DEVICE = torch.device("cuda", int(os.environ["RANK"])) if GPUS else torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH),
        )  # fmt: skip
        self.adapter: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.first(self.norm(x))))
        return x + (y if self.adapter is None else y + self.adapter(x))


class Blocks(nn.Sequential):
    skipped: tuple[int, ...] = ()  # the numbers of blocks that forwards leave out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self):
            x = x if number in self.skipped else block(x)
        return x


def model(seed: int = 0) -> Blocks:
    torch.manual_seed(seed)
    return Blocks(*(Block() for _ in range(BLOCKS))).requires_grad_(False)


def with_adapters(net: nn.Sequential) -> nn.Sequential:
    torch.manual_seed(1)
    for block in net:
        block.adapter = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)).to(DEVICE)
    return net


def train(net: nn.Module, average: Callable[[list], None] = lambda adapters: None) -> list[torch.Tensor]:
    """Return the losses and adapters of some steps on this rank's data."""
    adapters = [tensor for tensor in net.parameters() if tensor.requires_grad]
    optimizer, found = torch.optim.AdamW(adapters, lr=1e-2), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator).to(DEVICE)
        loss = (net(x) - x.flip(0)).square().mean()
        loss.backward()
        average(adapters)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + [tensor.detach().clone() for tensor in adapters]


def average(adapters: list) -> None:
    for adapter in adapters:
        dist.all_reduce(adapter.grad)
        adapter.grad /= dist.get_world_size()


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def memory() -> dict[str, int]:
    """Return this process's share of shared memory, and its own memory, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = {
        words[0]: int(words[1]) << 10
        for words in map(str.split, lines)
        if len(words) > 1 and words[1].isdigit()
    }
    return {"shared": found["Pss_Shmem:"], "own": found["Pss_Anon:"]}


def gather(on: bool) -> None:
    """Let the next sessions gather, or not, whatever a measurement would say."""
    gathering._possible = lambda engine: on
    gathering.measure = lambda *_: (1.0, 0.5)


def streamed(expected: list[torch.Tensor], **settings: Any) -> dict:
    """Train a streamed model under DDP; return whether it is equal to the resident one, and figures."""
    meta = "weights" in settings
    with torch.device("meta" if meta else "cpu"):
        net = model()
    with carom.stream(net, **{"device": DEVICE, "vram": VRAM, "group": "world"} | settings) as session:
        found = train(DistributedDataParallel(carom.prepare_for_ddp(with_adapters(net))))
        dist.barrier()
        report, used = session.report().to_dict(), memory()
        dist.barrier()
    frozen = {name: value for name, value in net.state_dict().items() if "adapter" not in name}
    closed = meta or all(map(torch.equal, frozen.values(), model().state_dict().values()))
    wire = report["wire_bytes_per_step"] / (report["transfers_per_weight"] or 1)
    return {
        "equal": equal(found, expected), "closed": closed, "memory": used, "wire": wire, "notes": report["notes"],
        "raw": report["raw_bytes_per_step"], "read": report["disk_bytes_per_second"],
    }  # fmt: skip


def resident() -> list[torch.Tensor]:
    """Return what `train` returns with all weights on the device, under DDP."""
    return train(DistributedDataParallel(with_adapters(model().to(DEVICE))))


def saved(folder: Path) -> Path:
    """Write the model's weights to a file, once, and return its path."""
    file = folder / "weights.safetensors"
    if dist.get_rank() == 0:
        save_file(model().state_dict(), file)
        pack(file, folder / "packed.safetensors", codec="lossless")
    dist.barrier()
    return file


def failure(function: Callable[[], object]) -> list[str]:
    """Return the class and text of the error that ``function`` raises."""
    try:
        function()
    except carom.CaromError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


@contextlib.contextmanager
def settings_of_small_machines() -> Iterator[None]:
    """Let each rank take 1 MiB of its own, and share weights in groups of 1 MiB, as the model is small."""
    modules: list[Any] = [shared_weights, host_resources]
    before = shared_weights.RANK_BYTES, shared_weights._GRANULE
    for module in modules:
        module.RANK_BYTES = 1 << 20
    shared_weights._GRANULE = 1 << 20
    try:
        yield
    finally:
        for module in modules:
            module.RANK_BYTES = before[0]
        shared_weights._GRANULE = before[1]


def freed() -> dict:
    """Return by how much this rank's own memory falls when 64 MiB of its weights are shared, in bytes."""
    net = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(8))).requires_grad_(False)
    before = memory()["own"]
    with carom.stream(net, device="cpu", vram="20MiB", group="world"):
        return {"equal": True, "closed": True, "bytes": before - memory()["own"]}


def exact(folder: Path) -> dict:
    expected, file = resident(), saved(folder)
    found: dict[str, Any] = {}
    for together in (False, True):
        gather(together)
        found[f"memory-{together}"] = streamed(expected)
        found[f"file-{together}"] = streamed(expected, weights=file)
    for timing in ("late", "early", "random"):
        found[f"simulated-{timing}"] = streamed(expected, device=carom.SimulatedDevice(seed=5, timing=timing))
    gather(True)
    device = carom.SimulatedDevice(seed=5, timing="random")
    found["packed"] = streamed(expected, weights=folder / "packed.safetensors", device=device)
    found["decoded by the host"] = streamed(expected, weights=folder / "packed.safetensors")
    gather(False)
    with settings_of_small_machines():
        found["partly"] = streamed(expected, weights=file, ram=FROZEN // 2)
    found["mesh"] = streamed(
        expected, group=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    )
    found["freed"] = freed()
    net = model()
    with carom.stream(net, device="cpu", vram=VRAM, group=dist.group.WORLD):
        by_hand = train(with_adapters(net), average)
    found["by hand"] = {"equal": equal(by_hand, train(with_adapters(model()), average))}
    return found


def on_gpus(folder: Path) -> dict:
    """As `exact`, on GPUs. The ranks choose by their own measurement in the cases "measured"."""
    expected, file = resident(), saved(folder)
    found = {"measured": streamed(expected)}
    measure, possible = gathering.measure, gathering._possible
    for together in (False, True):
        gather(together)
        found[f"memory-{together}"] = streamed(expected)
        found[f"file-{together}"] = streamed(expected, weights=file)
        found[f"packed-{together}"] = streamed(expected, weights=folder / "packed.safetensors")
    gathering.measure, gathering._possible = measure, possible
    found["packed, measured"] = streamed(expected, weights=folder / "packed.safetensors")
    return found


def failing(folder: Path) -> dict:
    rank, found = dist.get_rank(), {}
    gather(False)

    def stream(
        net: nn.Module | None = None, vram: int = VRAM, device: Any = "cpu", **more: Any
    ) -> carom.Session:
        return carom.stream(model() if net is None else net, device=device, vram=vram, group="world", **more)

    found["other model"] = failure(lambda: stream(model()[: BLOCKS - rank]))
    found["small budget"] = failure(lambda: stream(vram=1000 if rank == 1 else VRAM))
    found["no device"] = failure(lambda: stream(device="cuda:99" if rank == 1 else "cpu"))
    little = mock.patch.object(settings, "ram_budget", lambda value, *_: FROZEN // 2)
    with little, stream(device=carom.SimulatedDevice()) as session:
        found["pinned"] = ["", str(session.report().pinned_bytes)]
    found["nothing frozen"] = failure(lambda: stream(model().requires_grad_(True)))
    missing = saved(folder).with_name("none.safetensors" if rank == 1 else "weights.safetensors")
    with torch.device("meta"):
        found["no file"] = failure(lambda: stream(weights=missing))
    found["codec"] = failure(lambda: stream(codec="lossless"))
    found["disk"] = failure(lambda: stream(disk=folder))
    found["training"] = failure(lambda: stream(training="stream"))
    found["name"] = failure(lambda: carom.stream(model(), device="cpu", vram=VRAM, group="all"))
    net = model()
    with stream(net):
        found["works after all"] = [
            "",
            str(torch.equal(net(torch.ones(2, WIDTH)), model()(torch.ones(2, WIDTH)))),
        ]
    gather(True)
    x = torch.ones(2, WIDTH)
    net = model()
    with stream(net):
        net(x)
        # After the first block that is left out each one is fetched for its use, so the ranks fetch different ones.
        net.skipped = 1, BLOCKS - 2 + rank
        found["other paths"] = failure(lambda: net(x))
        dist.barrier()
    net = with_adapters(model())
    with stream(net), torch.set_grad_enabled(rank == 1):
        found["validation"] = failure(lambda: net(x))
        dist.barrier()
    os.environ["CAROM_GATHER"] = "0" if rank == 1 else "1"
    net = model()
    with stream(net) as session:
        found["whole"] = ["", " ".join(session.report().notes)]
    del os.environ["CAROM_GATHER"]
    net = model()
    with stream(net) as session:
        found["set_budget"] = failure(lambda: session.set_budget(vram=VRAM // 2))
        dist.barrier()
        if rank == 0:
            began = time.monotonic()
            found["closed early"] = failure(lambda: [net(torch.ones(2, WIDTH)) for _ in range(3)])
            found["seconds"] = ["", str(time.monotonic() - began)]
    return found


class Wrapper(torch.Tensor):
    """A tensor of a class whose bytes Carom does not know."""


def seeded(seed: int) -> Blocks:
    """A model with tensors of every kind that ranks do not share: trainable, small, buffers, views."""
    net = model(seed)
    net[0].second.requires_grad_(True)
    net[1].norm.requires_grad_(True)
    net[2].register_buffer("scale", torch.randn(WIDTH, WIDTH))
    net[2].register_buffer("count", torch.tensor(3 + seed))
    net[2].register_buffer("mask", torch.randn(WIDTH) > 0)
    net[2].register_buffer("turned", torch.randn(8, 16, dtype=torch.bfloat16).t())
    net[2].register_buffer("phase", torch.randn(4, dtype=torch.complex64).conj())
    return net


def one_source(folder: Path) -> dict:
    """Stream models that differ between the ranks."""
    rank, first, found = dist.get_rank(), seeded(0), {}
    gather(False)
    x = torch.ones(2, WIDTH)
    file = saved(folder)
    for case, settings_ in (("memory", {}), ("file", {"weights": file})):
        net = seeded(rank)
        expected = {name: value.clone() for name, value in first.state_dict().items()}
        if case == "file":  # the tensors that the file holds have its values; the rest that of the first rank
            expected |= model().state_dict()
            net.requires_grad_(False)
        with (
            carom.stream(net, device="cpu", vram=VRAM, group="world", **settings_) as session,
            torch.no_grad(),
        ):
            out, notes = net(x), session.report().notes
            read = {name: session.read(name) for name in expected}
        other = [name for name, value in expected.items() if not torch.equal(read[name], value)]
        later = net.state_dict()
        other += [
            name
            for name, value in expected.items()
            if case == "memory" and not torch.equal(later[name], value)
        ]
        found[case] = {
            "other": other, "notes": " ".join(notes), "strides": net[2].turned.stride(),
            "output": torch.equal(out, first(x)) if case == "memory" else True,
        }  # fmt: skip
    # The weights of each rank are its own again.
    net = model()
    with carom.stream(net, device="cpu", vram=VRAM, group="world"):
        pass
    with torch.no_grad():
        if rank == 0:
            net[0].first.weight.fill_(5)
        dist.barrier()
        found["own after close"] = bool((net[0].first.weight == 5).all()) is (rank == 0)
        dist.barrier()
    more, strides, wrapped = model(), model(), model()
    if rank == 1:
        more[3].register_buffer("more", torch.zeros(3))
        strides[3].first.weight.data = strides[3].first.weight.t().contiguous().t()
    wrapped[3].register_buffer("odd", torch.full((5,), float(rank)).as_subclass(Wrapper))
    for case, net in (("more", more), ("strides", strides), ("wrapped", wrapped)):
        found[case] = failure(lambda net=net: carom.stream(net, device="cpu", vram=VRAM, group="world"))
    return found


def other_files(folder: Path) -> list[str]:
    """Stream from files of the ranks' own, which have equal sizes, times and bytes."""
    file = folder / f"{dist.get_rank()}.safetensors"
    save_file(model().state_dict(), file)
    os.utime(file, ns=(10**18, 10**18))
    with torch.device("meta"):
        net = model()
    return failure(lambda: carom.stream(net, device="cpu", vram=VRAM, group="world", weights=file))


def killed(folder: Path) -> dict:
    """Train until a rank is killed. With the environment variable CAROM_TEST_DIE rank 1 kills itself."""
    gather(sys.argv[4] == "gather")
    net = model()
    with carom.stream(net, device=DEVICE, vram=VRAM, group="world"):
        ready = DistributedDataParallel(carom.prepare_for_ddp(with_adapters(net)))
        print("ready", flush=True)
        while True:
            train(ready)
            if "CAROM_TEST_DIE" in os.environ and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)


CASES = {
    "exact": exact,
    "on_gpus": on_gpus,
    "failing": failing,
    "one_source": one_source,
    "other_files": other_files,
    "killed": killed,
}


def main() -> Any:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if GPUS:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "nccl" if GPUS else "gloo",
        init_method=f"file://{sys.argv[1]}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=15),
    )
    torch.set_num_threads(1)
    return CASES[sys.argv[2]](Path(sys.argv[3]))


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
    os._exit(0)  # at a normal exit, threads of gloo that still run may abort the process
