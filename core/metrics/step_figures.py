"""The seconds and bytes of finished steps (`StepFigures`), and their medians (`Medians`). Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ..plan.profile import ForwardTiming, StepProfile
from ..plan.roofline import PhaseWork, roofline_seconds
from .kernel_times import StepSplit

# A step counts as free of the host's delays if they may take at most this share of its computing.
LATE = 0.02


@dataclass(frozen=True)
class StepFigures:
    """The seconds and bytes of one finished step.

    ``raw_bytes``: bytes of the copied weights when unpacked.
    ``wire_bytes``: bytes that were copied from the host (packed or not). ``peer_bytes``: those from other devices.
    ``copied_bytes``: bytes of those copies from the host that were timed. ``copy_seconds``: their seconds.
    ``peer_copied_bytes``, ``peer_seconds``: the same of copies from other devices.
    ``late_seconds``: seconds of the forward in which the device had finished one unit and the host had not
    reached the next; None where units were not timed.
    ``held``: whether the device was held back, so that it did not wait for the host.
    ``host_by_phase``: seconds of computing that may contain delays by the host.
    ``root``: whether the root's forward ran in the step, and not only forwards of its parts.
    ``..._by_phase``: pairs (forward, backward).
    """

    train: bool
    timed: bool
    seconds: float
    copied_bytes: int
    stall_seconds: float
    copy_seconds: float
    decode_seconds: float
    wire_bytes: int
    raw_bytes: int
    transfers: int
    disk_bytes: int
    compute_by_phase: tuple[float, float]
    bytes_by_phase: tuple[int, int]
    late_seconds: float | None = None
    held: bool = False
    host_by_phase: tuple[float, float] = (0.0, 0.0)
    root: bool = True
    peer_bytes: int = 0
    peer_copied_bytes: int = 0
    peer_seconds: float = 0.0


@dataclass(frozen=True)
class Medians:
    """Medians over the latest steps of the latest kind (inference or training). None where nothing was
    measured.

    ``roofline_seconds``: the roofline of a step (core/plan/roofline.py).
    ``split``: the parts of a step.
    ``hidden_fraction``: share of the copies' seconds during which the device did not wait for copies.
    """

    train: bool = False
    steps: int = 0
    seconds: float | None = None
    stall_seconds: float | None = None
    compute_seconds: float | None = None
    roofline_seconds: float | None = None
    hidden_fraction: float | None = None
    link_bytes_per_second: float | None = None
    decode_seconds: float = 0.0
    wire_bytes: float = 0
    peer_bytes: float = 0
    raw_bytes: float = 0
    transfers: float = 0
    disk_bytes: float = 0
    host_bound: bool = False
    split: StepSplit | None = None


def step_profile(
    figures: Iterable[StepFigures],
    forwards: Sequence[tuple[bool, ForwardTiming]],
    copies: tuple[tuple[int, float], ...],
) -> StepProfile | None:
    """Return the timings of the units in steps of the latest kind, or None before units were timed in any step.

    ``forwards``: for each step of which every unit was timed, whether it trained, and its forward. ``copies``: the
    `StepEvents.copy_times` of the last of these steps.
    """
    if not forwards:
        return None
    train = forwards[-1][0]
    timed = [step for step in figures if step.train == train and step.root and step.timed]
    timed = timed[2:] or timed[-1:]
    if not timed:
        return None
    usual = [step for step in timed if not step.held] or timed
    forwards_ = [forward for kind, forward in forwards if kind == train]
    # A slow host also lengthens the measured copies: a copy is issued later than the event before it. All links
    # together count as one link, as they copy at the same time.
    best = _least_delayed(timed)
    copy_seconds = sum(max(step.copy_seconds, step.peer_seconds) for step in best)
    copied_bytes = sum(step.copied_bytes + step.peer_copied_bytes for step in best)
    return StepProfile(
        train=train,
        seconds=median(step.seconds for step in usual),
        compute=_device_seconds(best),
        link_bytes_per_second=copied_bytes / copy_seconds if copy_seconds > 0 else None,
        forwards=tuple(forwards_),
        copies=copies,
        stalled=median(step.stall_seconds for step in usual),
    )


def _least_delayed(steps: Sequence[StepFigures]) -> list[StepFigures]:
    """Return the steps in which the device waited least for the host."""

    def delays(step: StepFigures) -> float:
        return sum(step.host_by_phase)

    least = min(map(delays, steps))
    return [step for step in steps if delays(step) <= least + LATE * sum(step.compute_by_phase)]


def _device_seconds(steps: Sequence[StepFigures]) -> tuple[float, float]:
    """Return the seconds that the device itself computes in (forward, backward) of ``steps``.

    The host's delays are subtracted. The device may have computed then too, so on a device that cannot be held back the
    result is a lower bound.
    """

    def phase(which: int) -> float:
        return median(max(0.0, step.compute_by_phase[which] - step.host_by_phase[which]) for step in steps)

    return phase(0), phase(1)


def medians(
    figures: Sequence[StepFigures],
    split: StepSplit | None,
    profile: StepProfile | None,
    source: str,
    disk: float | None = None,
) -> Medians:
    """Return medians over the steps of the latest kind (inference or training, with or without the root's forward) in
    ``figures``.

    ``split``: the parts of a step that ran under the profiler. ``profile``: of `step_profile`. ``source``: the clock of
    the figures ("events" or "clock"). ``disk``: the drive's rate in bytes/s, or None. In the roofline, the drive
    limits the step as a whole and not each phase, because reads that begin in the forward continue in the backward.
    """
    if not figures:
        return Medians()
    train, root = figures[-1].train, figures[-1].root
    steps = [step for step in figures if (step.train, step.root) == (train, root)]
    # In the first two steps the order of use is learnt and caches are filled. Leave them out if there are other steps.
    steps = steps[2:] or steps[-1:]
    steps = [step for step in steps if not step.held] or steps
    timed = [step for step in steps if step.timed] or steps
    copy_seconds = sum(step.copy_seconds for step in timed)
    link = sum(step.copied_bytes for step in timed) / copy_seconds if copy_seconds > 0 else None
    if split is None or split.train != train:
        split = _split_by_events(train, timed, source)
    return Medians(
        train=train,
        steps=len(steps),
        seconds=median(step.seconds for step in steps),
        stall_seconds=median(step.stall_seconds for step in timed),
        compute_seconds=median(sum(step.compute_by_phase) for step in timed),
        roofline_seconds=median(_roofline(step, split, link, disk) for step in timed),
        hidden_fraction=median(_hidden_fraction(step) for step in timed),
        link_bytes_per_second=link,
        decode_seconds=median(step.decode_seconds for step in timed),
        wire_bytes=median(step.wire_bytes for step in steps),
        peer_bytes=median(step.peer_bytes for step in steps),
        raw_bytes=median(step.raw_bytes for step in steps),
        transfers=median(step.transfers for step in steps),
        disk_bytes=median(step.disk_bytes for step in steps),
        host_bound=profile is not None and profile.train == train and profile.host_bound,
        split=split,
    )


def _roofline(step: StepFigures, split: StepSplit, link: float | None, disk: float | None) -> float:
    phases = [PhaseWork(*pair) for pair in zip(split.undisturbed_seconds, step.bytes_by_phase, strict=True)]
    seconds = roofline_seconds(phases, link, step.disk_bytes / disk if disk else 0.0)
    return max(seconds, step.peer_seconds)


def _hidden_fraction(step: StepFigures) -> float:
    """Return the share of the seconds of copies in which the device did not wait for them."""
    copying = step.copy_seconds + step.peer_seconds
    return max(0.0, 1 - step.stall_seconds / copying) if copying > 0 else 1.0


def _split_by_events(train: bool, timed: Sequence[StepFigures], source: str) -> StepSplit:
    """Return the parts of a step without a profiler. ``timed``: steps with times."""
    late = [step.late_seconds for step in timed if step.late_seconds is not None]
    gaps = median(late) if late else 0.0
    forward, backward = (median(step.compute_by_phase[phase] for step in timed) for phase in (0, 1))
    return StepSplit(
        train=train,
        kernel_seconds=(max(0.0, forward - gaps), backward),
        stall_seconds=median(step.stall_seconds for step in timed),
        host_late_seconds=gaps,
        source=source,
    )
