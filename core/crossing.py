"""How a unit's bytes reach its slot: as they are in one copy, packed through the staging ring, or unpacked where they stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import ops
from .codec.unit import UnitDecoder
from .staging import Staging
from .store.arena import storage_bytes
from .transfer import Engine

if TYPE_CHECKING:
    from .streamed import Streamed
    from .streamer import Streamer


def prepare(staging: Staging, units: Iterable[Streamed], engine: Engine) -> None:
    """What decodes pieces has its tables on the device, as what decodes units whole has."""
    if engine.device.type == "cpu":
        return
    for unit in units:
        if unit.decoder is not None:
            for piece in staging.pieces(unit.decoder, unit.host.numel()):
                piece.decoder.prepare(engine.device)


def bring(streamer: Streamer, unit: Streamed, target: torch.Tensor, after: list[Any]) -> Any:
    """Issue what brings the unit's bytes to ``target`` once ``after`` is reached: the event that ends it."""
    if unit.decoder is None:
        engine, meter, backward = streamer.engine, streamer.meter, ops.in_backward()
        event, marks = engine.copy_in(target, unit.host, after, meter.timing)
        if engine.blocking and marks is not None:
            meter.waited(marks[0], marks[1], unit.name, backward)
        meter.copied(unit.name, marks, unit.nbytes, unit.unit.raw_bytes, backward)
        return event
    if unit.encoded is not None and unit.version() != unit.encoded:  # a weight was written since
        return _bring_plain(streamer, unit, target, after)
    if unit.wire is not None:
        return _unpack_here(streamer, unit, target, after)
    return _bring_packed(streamer, unit, unit.decoder, target, after)


def _bring_plain(streamer: Streamer, unit: Streamed, target: torch.Tensor, after: list[Any]) -> Any:
    """Each tensor's plain bytes, which wait beside the packed ones."""
    event, meter, backward = None, streamer.meter, ops.in_backward()
    for owner in unit.owners:
        start, end = owner.entry.offset, owner.entry.offset + owner.entry.nbytes
        event, marks = streamer.engine.copy_in(
            target[start:end], storage_bytes(owner.host), after, meter.timing
        )
        meter.copied(unit.name, marks, end - start, end - start, backward, int(start == 0))
    return event


def _unpack_here(streamer: Streamer, unit: Streamed, target: torch.Tensor, after: list[Any]) -> Any:
    """One that stays on the device packed; what trains of it crosses, once a step."""
    here, meter = streamer.packed_here, streamer.meter
    if here.stale(unit):
        for marks, nbytes, raw in here.renew(unit, meter.timing):
            meter.copied(unit.name, marks, nbytes, raw, ops.in_backward(), 0)
    event, times = here.unpack(unit, target, after, meter.timing)
    meter.decoded(times)
    return event


def _bring_packed(
    streamer: Streamer, unit: Streamed, decoder: UnitDecoder, target: torch.Tensor, after: list[Any]
) -> Any:
    """The unit's wire to the staging ring, where it is decoded to ``target``; one transfer, in pieces or not."""
    engine, meter, backward = streamer.engine, streamer.meter, ops.in_backward()
    assert streamer.staging is not None
    done, raw = None, unit.unit.raw_bytes
    for event, marks, nbytes, times in streamer.staging.bring(
        unit.host, decoder, target, after, meter.timing
    ):
        done = event
        if engine.blocking and marks is not None:
            meter.waited(marks[0], times[1], unit.name, backward)
        meter.copied(unit.name, marks, nbytes, raw, backward, int(raw > 0))
        meter.decoded(times)
        raw = 0
    return done
