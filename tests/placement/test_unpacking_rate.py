"""How fast the device unpacks: by the largest unit, and without the host's seconds for the launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import carom
import pytest
import torch
from carom.core.placement import decoder_check
from carom.core.placement.decoder_check import DecoderCheck
from tests_inside import inside
from tests_models import WideModel


def test_the_rate_is_that_of_the_largest_unit_within_a_half(monkeypatch):
    sizes: list[int] = []

    def timed(self, streamed):
        sizes.append(streamed.nbytes)
        if streamed.nbytes > self._timed_bytes:
            self._timed_bytes, self.decode_bytes_per_second = streamed.nbytes, float(streamed.nbytes)
        out = torch.empty(streamed.nbytes, dtype=torch.uint8)
        streamed.decoder(streamed.block.data, out)
        return out

    class Elsewhere:
        type = "cuda"

    monkeypatch.setattr(DecoderCheck, "_time_decoding", timed)
    proven = DecoderCheck.check

    def prove(self, streamed, entries):
        device, self._engine.device = self._engine.device, Elsewhere()
        try:
            return proven(self, streamed, entries)
        finally:
            self._engine.device = device

    monkeypatch.setattr(DecoderCheck, "check", prove)
    torch.manual_seed(0)
    model = WideModel()
    with carom.stream(model, device=carom.SimulatedDevice(), vram=500_000, codec="lossless") as session:
        largest = max(unit.nbytes for unit in inside(session).streamed if unit.packed)
        assert sizes and inside(session).placement.tier.decoder_check.decode_bytes_per_second >= largest / 2
        assert len(sizes) < len(inside(session).streamed), "each of a size once"


class Clocks:
    """An engine with a host that takes ``launch`` seconds for a decoding, and a device that takes ``decode`` seconds."""

    device = torch.device("cpu")

    def __init__(self, launch: float, decode: float) -> None:
        self.launch, self.decode = launch, decode
        self.host = self.ready = 0.0  # times; the device is ready for more work at the second one

    def mark(self) -> float:
        self.ready = max(self.ready, self.host)
        return self.ready

    def hold(self, seconds: float) -> None:
        self.ready = max(self.ready, self.host) + seconds

    def __call__(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        self.host += self.launch
        self.ready = max(self.ready, self.host) + self.decode

    def synchronize(self) -> None:
        self.host = max(self.host, self.ready)

    def elapsed(self, before: float, after: float) -> float:
        return after - before


@pytest.mark.parametrize("launch", [1e-6, 1e-3, 1e-2])
def test_a_slow_host_does_not_make_the_decoder_look_slow(launch, monkeypatch):
    engine: Any = Clocks(launch, decode=1e-4)
    monkeypatch.setattr(decoder_check, "time", SimpleNamespace(perf_counter=lambda: engine.host))
    unit: Any = SimpleNamespace(
        decoder=engine, nbytes=1 << 20, block=SimpleNamespace(data=torch.zeros(8, dtype=torch.uint8))
    )
    check = DecoderCheck(engine)
    check._time_decoding(unit)
    assert check.decode_bytes_per_second == pytest.approx((1 << 20) / 1e-4)
