"""How far laying out has come, as it is told to who asks."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.common.progress import progress_listener
from torch import nn


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(5))).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_bytes_that_stand_grow_to_those_that_stream(codec):
    told: list[tuple[int, int]] = []
    with progress_listener(lambda done, total: told.append((done, total))):
        session = carom.stream(model(), device="cpu", vram="270KiB", granularity="layer", codec=codec)
    with session:
        streamed = session.report().streamed_bytes
    assert [done for done, _ in told] == sorted({done for done, _ in told}) and len(told) > 2
    assert told[-1] == (streamed, streamed) and {total for _, total in told} == {streamed}


def test_nobody_is_told_afterwards_or_elsewhere():
    told: list[int] = []
    with progress_listener(lambda done, total: told.append(done)):
        pass
    carom.stream(model(), device="cpu", vram="270KiB", granularity="layer").close()
    assert told == []


def test_a_listener_that_fails_leaves_the_module_as_it_was():
    def fail(done: int, total: int) -> None:
        raise RuntimeError("no page")

    plain = model()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with progress_listener(fail), pytest.raises(RuntimeError, match="no page"):
        carom.stream(plain, device="cpu", vram="270KiB", granularity="layer")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, before[name])
    with carom.stream(plain, device="cpu", vram="270KiB", granularity="layer"):
        plain(torch.zeros(1, 256, dtype=torch.bfloat16))
