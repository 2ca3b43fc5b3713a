"""A program that runs one session with pool="aimdo" on the real comfy-aimdo library; test_gpu.py starts it.

A separate process is needed because comfy-aimdo hooks the allocator of its process. Results are compared at rest,
while torch takes memory that only evicted weights can supply, after that memory was returned, and in training. One
JSON object is printed.
"""

from __future__ import annotations

import copy
import gc
import json
import time

import carom
import torch
from inside import inside
from torch import nn

MIB = 1 << 20
BLOCKS = 24


class Net(nn.Module):
    """A model with 24 blocks of 32 MiB in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)) for _ in range(BLOCKS)
        )
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def main() -> None:
    x = torch.randn(256, 2048, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    net = Net()
    plain = copy.deepcopy(net).cuda()
    with torch.no_grad():
        expected = plain(x)
    leaf = x.clone().requires_grad_()
    plain(leaf).float().pow(2).mean().backward()
    gradient = leaf.grad
    del plain
    seen: dict = {"exact": [], "resident": []}

    def look(session) -> None:
        with torch.no_grad():
            seen["exact"].append(torch.equal(net(x), expected))
        seen["resident"].append(len(session.report().resident_by_choice))

    with carom.stream(net, device="cuda", vram=(BLOCKS + 4) * 33 * MIB, pool="aimdo") as session:
        report = session.report()
        seen.update(pool=report.pool, reason=report.pool_reason)
        if report.pool == "aimdo":
            for _ in range(3):
                look(session)
            seen["loaded"] = inside(session).held_bytes
            seen["wire_at_rest"] = session.report().wire_bytes_per_step
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            # More than is free: without the pool this allocation fails.
            taken = torch.empty(free + 200 * MIB, dtype=torch.uint8, device="cuda")
            for _ in range(3):
                look(session)
            seen["loaded_under_pressure"] = inside(session).held_bytes
            del taken
            gc.collect()
            torch.cuda.empty_cache()
            until = time.monotonic() + 20
            while (
                time.monotonic() < until and inside(session).vbar is not None and inside(session).vbar.reduced
            ):
                look(session)
                time.sleep(0.05)
            look(session)
            leaf = x.clone().requires_grad_()
            net(leaf).float().pow(2).mean().backward()
            seen["gradient"] = torch.equal(leaf.grad, gradient)
            seen["peak"], seen["budget"] = (
                session.report().vram_peak_bytes,
                session.report().vram_budget_bytes,
            )
            for key in ("exact", "resident"):
                seen[key] = seen[key][:6] + seen[key][-2:] if key == "resident" else [all(seen[key])]
    torch.cuda.synchronize()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
