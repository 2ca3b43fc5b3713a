"""Parameters and buffers that cannot be moved in place are refused by name; other unusual layouts come back as they were."""

from __future__ import annotations

import carom
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.timeout(60)
WIDTH = 32


def model(odd: torch.Tensor, as_buffer: bool) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).requires_grad_(False)
    if as_buffer:
        blocks[0].register_buffer("odd", odd)
    else:
        blocks[0].odd = nn.Parameter(odd, requires_grad=False)
    return blocks


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_unusual_layouts_stay_resident_and_come_back(convert, as_buffer, simulated):
    odd = getattr(torch.eye(WIDTH), convert)()
    blocks = model(odd, as_buffer)
    x = torch.ones(2, WIDTH)
    want = blocks(x)
    with carom.stream(blocks, vram=20000, device=carom.SimulatedDevice() if simulated else "cpu"):
        assert torch.equal(blocks(x), want)
    assert blocks[0].odd.layout == odd.layout
    assert torch.equal(blocks[0].odd.to_dense(), torch.eye(WIDTH))


@pytest.mark.parametrize(
    ("make", "as_buffer"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(WIDTH, WIDTH), 0.01, 0, torch.qint8), False),
        (lambda: torch.nested.nested_tensor([torch.ones(WIDTH), torch.ones(3)]), False),
        (lambda: torch.nested.nested_tensor([torch.ones(WIDTH), torch.ones(3)]), True),
    ],
    ids=["qint8", "nested", "nested-buffer"],
)
def test_what_cannot_be_moved_in_place_is_refused_by_name(make, as_buffer):
    blocks = model(make(), as_buffer)
    tensors = [*blocks.parameters(), *blocks.buffers()]
    with pytest.raises(carom.UnsupportedError, match=r"0\.odd is a"):
        carom.stream(blocks, vram=20000, device="cpu")
    assert all(a is b for a, b in zip([*blocks.parameters(), *blocks.buffers()], tensors, strict=True))
