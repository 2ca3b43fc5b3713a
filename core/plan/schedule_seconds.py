"""Simulation of a schedule: predicts the seconds of a cycle and what it copies, without running the model.

The machine is that of `predict`: one link to the device, which copies in the order of issue, and one stream, which
computes. A copy starts when the link is free and the use after which it is issued has ended; a use starts when the
stream is free and the unit is there. Packed bytes are copied to one of two staging buffers, so their copy waits for a
buffer, and only the decoding waits for the place in the region. Kernels that run beside the decoding take that much
longer. The host issues ahead of the device, except that no use starts before the host has issued the crossings up to
it. The module imports no torch and has no side effects.
"""

from __future__ import annotations

from .predict import Prediction
from .schedule import Schedule, Times, Way

_CYCLES = 3  # the first one, whose fetches of the cycle before are missing, does not count


def predict_schedule(schedule: Schedule, times: Times) -> Prediction:
    """Return the figures of one cycle of ``schedule``, after the first one.

    The `Prediction` has one phase, the cycle without its pause.
    """
    link, compute_seconds, uses = times.link, times.compute, schedule.order.uses
    after, before, host = schedule.after, schedule.before, times.host_seconds
    rate = times.decode_bytes_per_second
    copying: list[float] = []  # seconds on the link and of decoding, by unit
    decoding: list[float] = []
    for cost, way in zip(schedule.units, schedule.ways, strict=True):
        copying.append(link.seconds(cost.packed if way is Way.STREAMED_PACKED else cost.nbytes))
        decoding.append(cost.nbytes / rate if rate and way.packed else 0.0)
    packed = [way.packed for way in schedule.ways]
    crosses = [way.crosses for way in schedule.ways]
    there = [0.0] * len(schedule.units)
    compute = wire = issued = unpacked = 0.0
    staged = (0.0, 0.0)  # times when the packed bytes of the last two units were decoded, the older first

    def fetch(unit: int) -> None:
        nonlocal compute, wire, issued, unpacked, staged
        issued += host
        place_free = compute
        if link.blocking:
            compute = max(compute, issued) + copying[unit] * crosses[unit] + decoding[unit]
            there[unit] = compute
        elif not packed[unit]:
            there[unit] = wire = max(wire, place_free, issued) + copying[unit]
        else:
            compute += decoding[unit]
            if crosses[unit]:
                wire = max(wire, staged[0], issued) + copying[unit]
                unpacked = max(wire, place_free, unpacked) + decoding[unit]
                staged = staged[1], unpacked
            else:
                unpacked = max(place_free, issued, unpacked) + decoding[unit]
            there[unit] = unpacked

    begin = 0.0
    for cycle in range(_CYCLES):
        compute += times.pause
        for position, unit in enumerate(uses):
            for fetched in before.get(position, ()):
                fetch(fetched)
            ready = there[unit]
            if ready > compute:
                compute = ready
            if issued > compute:
                compute = issued
            compute += compute_seconds[position]
            for fetched in after[position]:
                fetch(fetched)
        if cycle == 0:
            begin = compute
    seconds = (compute - begin) / (_CYCLES - 1) - times.pause
    return Prediction(
        seconds,
        max(0.0, seconds - sum(compute_seconds)),
        schedule.wire_bytes,
        schedule.transfers,
        (seconds,),
        issued / _CYCLES,
    )
