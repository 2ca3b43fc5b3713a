"""A rank of tests/session/test_sharded_modules.py: divides small models in each way, before and after streaming."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import carom
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

X = torch.ones(2, 32)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(4)]
    return nn.Sequential(*blocks).requires_grad_(False)


def attempt(function: Callable[[], object]) -> str | None:
    """Return the text of the UnsupportedError that ``function`` raises; None if it raises none."""
    try:
        function()
    except carom.UnsupportedError as error:
        return str(error)
    return None


def main() -> dict:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    want = model()(X)

    def fsdp_blocks(net: nn.Sequential) -> None:
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)

    def fsdp_gathered(net: nn.Sequential) -> None:
        """The root stays gathered after a forward: its parameters are plain tensors then."""
        fully_shard(net, mesh=mesh)
        net(X)

    def tensor_parallel(net: nn.Sequential) -> None:
        parallelize_module(net[1], mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    found = {}
    for divide in (fsdp_blocks, fsdp_gathered, tensor_parallel):
        net = model()
        divide(net)
        before = [id(tensor) for tensor in net.parameters()]
        refused = attempt(lambda net=net: carom.stream(net, device="cpu", vram=30_000))
        as_before = before == [id(tensor) for tensor in net.parameters()] and torch.allclose(net(X), want)

        net = model()
        session = carom.stream(net, device="cpu", vram=30_000)
        streamed = session.report().to_dict()["slot_bytes"] > 0 and torch.equal(net(X), want)
        later = attempt(lambda net=net, divide=divide: (divide(net), net(X)))
        session.close()
        found[divide.__name__] = {
            "refused": refused, "as_before": as_before, "streamed": streamed, "later": later,
            "after_close": torch.allclose(net(X), want),
        }  # fmt: skip
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
    os._exit(0)  # at a normal exit, threads of gloo that still run may abort the process
