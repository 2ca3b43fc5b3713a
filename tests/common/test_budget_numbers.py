"""Budgets may be integers of any kind."""

from __future__ import annotations

import json

import carom
import numpy as np
import pytest
import torch
from carom.core.common.sizes import parse_size
from torch import nn


class Index:
    def __index__(self) -> int:
        return 1 << 20


NUMBERS = {
    "numpy.int64": np.int64(1 << 20),
    "numpy.uint32": np.uint32(1 << 20),
    "tensor": torch.tensor(1 << 20),
    "index": Index(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_whatever_is_an_integer_is_a_budget(number):
    net = nn.Linear(8, 8).requires_grad_(False)
    with carom.stream(net, device="cpu", vram=number, ram=number) as session:
        assert session.report().vram_budget_bytes == 1 << 20
        session.set_budget(vram="2MiB")
        session.set_budget(vram=number, ram=number)
        assert json.loads(json.dumps(session.report().to_dict()))["vram_budget_bytes"] == 1 << 20
    with carom.stream(net, device="cpu", vram=carom.SharedBudget(number)) as session:
        assert session.report().vram_budget_bytes == 1 << 20


@pytest.mark.parametrize("value", [True, np.bool_(True), np.int64(-1), np.zeros(2, int), None, object()])
def test_what_is_no_number_of_bytes_is_refused_by_name(value):
    with pytest.raises(ValueError, match="vram="):
        parse_size(value, setting="vram")
