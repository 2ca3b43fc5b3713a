"""How fast the device unpacks is told by the largest unit: the time of a small one is that of its launch."""

from __future__ import annotations

import carom
import torch
from carom.core.decoder_proof import Proof
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

    monkeypatch.setattr(Proof, "_decode_timed", timed)
    proven = Proof.holds

    def prove(self, streamed, entries):
        device, self._engine.device = self._engine.device, Elsewhere()
        try:
            return proven(self, streamed, entries)
        finally:
            self._engine.device = device

    monkeypatch.setattr(Proof, "holds", prove)
    torch.manual_seed(0)
    model = WideModel()
    with carom.stream(model, device=carom.SimulatedDevice(), vram=500_000, codec="lossless") as session:
        largest = max(unit.nbytes for unit in session._placement.streamed if unit.decoder is not None)
        assert sizes and session._placement.proof.decode_bytes_per_second >= largest / 2
        assert len(sizes) < len(session._placement.streamed), "each of a size once"
