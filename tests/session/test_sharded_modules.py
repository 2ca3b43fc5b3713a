"""Modules whose parameters FSDP2 or tensor parallelism divided among processes are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests_ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)

# What divides the module, and what the error names.
WAYS = {
    "fsdp_blocks": "0.0.weight is a DTensor",
    "fsdp_gathered": "the module (FSDPSequential) is managed by FSDP",
    "tensor_parallel": "1.0.weight is a DTensor",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of two processes found; tests/support/distributed/sharded_modules.py."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks("sharded_modules.py", folder / "rendezvous")


@pytest.mark.parametrize("way", WAYS)
def test_a_divided_module_is_refused_before_anything_is_changed(found, way):
    for rank in found:
        refused = rank[way]["refused"]
        assert WAYS[way] in refused and "group=" in refused and "pipelining" in refused
        assert rank[way]["as_before"]


@pytest.mark.parametrize("way", WAYS)
def test_dividing_a_streamed_module_is_refused_at_its_next_forward_and_close_leaves_it_working(found, way):
    for rank in found:
        assert rank[way]["streamed"]
        assert WAYS[way] in rank[way]["later"] and "Session.close()" in rank[way]["later"]
        assert rank[way]["after_close"]
