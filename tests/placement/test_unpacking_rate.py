"""How fast the device unpacks is told by the largest unit: the time of a small one is that of its launch."""

from __future__ import annotations

import carom
import torch
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
        largest = max(unit.nbytes for unit in inside(session).placement.streamed if unit.packed)
        assert sizes and inside(session).placement.tier.decoder_check.decode_bytes_per_second >= largest / 2
        assert len(sizes) < len(inside(session).placement.streamed), "each of a size once"
