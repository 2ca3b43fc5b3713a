"""PURE. What the user asked for on a node, and what follows from it: which way a model runs, with how much VRAM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.common.errors import UnsupportedError
from ..core.common.sizes import MIB, format_size, parse_size, suggest_size

MODES = ("auto", "stream", "native")
GRANULARITIES = ("auto", "block", "phase", "layer")
CODECS = ("auto", "raw", "lossless")
PRIORITIES = ("normal", "high", "low")
# Accelerators whose copies run beside their computing; on others a streamed weight is always waited for.
STREAMING_DEVICES = ("cuda", "xpu", "npu", "mlu")
GROW_SHARE = (
    8  # a budget grows when an eighth of what streams would become resident: laying out anew costs a second
)
GROW_LEAST = 256 * MIB
KEPT_ALIKE = 1.05  # what ComfyUI keeps for passes of one size differs by less
SIZES_SEEN = 8  # of passes, whose room is remembered
STREAMED_SHARE = 8  # mode "stream": at least an eighth of the weights streams
SHRINK_SHARE, SHRINK_MOST = 8, 384 * MIB  # of what is held: offers that are less by no more are not followed


@dataclass(frozen=True)
class Settings:
    """A node's widgets. ``vram`` and ``ram``: "auto", bytes, "8GiB", "50%"; ``priority``: who gives way to whom; ``node``: the id
    progress text goes to; ``reason``: why ComfyUI keeps the weights, once that is decided."""

    mode: str = "auto"
    vram: str = "auto"
    ram: str = "auto"
    granularity: str = "auto"
    codec: str = "auto"
    priority: str = "normal"
    node: str = ""
    reason: str = ""

    def checked(self) -> Settings:
        """Itself. Raises ValueError that names the widget for a value that cannot be meant."""
        for name, value, allowed in (
            ("mode", self.mode, MODES),
            ("granularity", self.granularity, GRANULARITIES),
            ("codec", self.codec, CODECS),
            ("priority", self.priority, PRIORITIES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(allowed)}")
        for name, size in (("vram", self.vram), ("ram", self.ram)):
            nbytes, meant = parse_limit(size, 1 << 40, name), suggest_size(size)
            if meant is not None:
                raise ValueError(f"{name}={size!r} means {nbytes} bytes; did you mean {meant}?")
        return self


@dataclass(frozen=True)
class Way:
    """``streams``: Carom takes the model; else ComfyUI keeps it. ``reason``: why, in words."""

    streams: bool
    reason: str


@dataclass(frozen=True)
class Beyond:
    """Budget beyond what ComfyUI offered: ``nbytes`` that passes left free while it ``kept`` so many bytes for them."""

    nbytes: int
    kept: int

    def covers(self, kept: int) -> bool:
        """Whether passes for which ComfyUI keeps ``kept`` need no more, as far as it knows."""
        return kept <= KEPT_ALIKE * self.kept


def beyond_now(seen: Sequence[Beyond], kept: int) -> int:
    """Bytes beyond the offer now that ComfyUI keeps ``kept``: as after the least of the passes ``seen`` that it expects to
    need as much, none where there were none."""
    found = next((one for one in seen if one.covers(kept)), None)
    # What is kept less of is offered more of: that much of it is in the offer already.
    return 0 if found is None else max(0, found.nbytes - max(0, found.kept - kept))


def remember(seen: Sequence[Beyond], new: Beyond) -> tuple[Beyond, ...]:
    """``seen`` and ``new``, which stands for passes of its size; the least first. (Passes of two sizes take turns where an
    image is made twice, larger: with only the last one known, each turn would cost a layout.)"""
    others = [one for one in seen if not (one.covers(new.kept) and new.covers(one.kept))]
    return tuple(sorted([*others, new], key=lambda one: one.kept)[-SIZES_SEEN:])


def choose_way(mode: str, device: str, leaves: str | None = None) -> Way:
    """Who runs a model of a node in ``mode`` on a ``device`` of that type.

    ``leaves``: None, or why the model cannot leave ComfyUI's dynamic VRAM. Raises UnsupportedError where
    ``mode`` "stream" cannot be had.
    """
    if mode == "native":
        return Way(False, "asked for: ComfyUI keeps the weights, Carom plans and reports")
    if leaves is not None:
        if mode == "stream":
            raise UnsupportedError(
                f"this model cannot be streamed: {leaves}; load it with a Carom loader, or set mode to native"
            )
        return Way(False, f"{leaves}; ComfyUI keeps the weights")
    if mode == "auto" and device == "cpu":
        return Way(False, "computing happens on the CPU, where the weights are: there is nothing to stream")
    if mode == "auto" and device not in STREAMING_DEVICES:
        return Way(
            False, f"copies to a {device} device do not run beside its computing; ComfyUI keeps the weights"
        )
    return Way(True, "asked for" if mode == "stream" else "streams what does not fit")


def is_auto(value: int | str) -> bool:
    """Whether a widget leaves a size to Carom."""
    return isinstance(value, str) and value.strip().lower() in ("auto", "")


def parse_limit(value: int | str, whole: int, setting: str = "vram") -> float:
    """Bytes that ``value`` allows, infinity for "auto"; percentages are of ``whole``. Raises ValueError."""
    if is_auto(value):
        return math.inf
    size = parse_size(value, whole=whole, setting=setting)
    if size == 0:
        raise ValueError(f"{setting}={value!r} leaves no memory at all; write a size such as 8GiB, or auto")
    return size


def most_held(mode: str, limit: float, total: int) -> float:
    """Bytes that a model of ``total`` bytes may hold on the device under the user's ``limit``.

    In mode "stream" a part of the weights always streams, so a model that would fit whole may not hold all of them.
    """
    return min(limit, total - total // STREAMED_SHARE) if mode == "stream" else limit


def next_budget(now: int | None, held: int, streamed: int, bound: int, limit: float = math.inf) -> int | None:
    """The budget to change to, None to leave things as they are.

    ``now``: the present budget (None: no session); ``held``: bytes on the device under it; ``streamed``: bytes that
    are not resident; ``bound``: what ComfyUI offers from now on; ``limit``: the user's own. Shrinks below ``limit``
    at once, and for an offer that is much smaller; grows for a gain worth laying the weights out anew. What ComfyUI
    offers changes a little from prompt to prompt (kernels that were loaded, memory that is cached), within what it
    keeps in reserve, and following it would lay out the whole model each time.
    """
    if now is None:
        return bound
    if held > limit:
        return int(min(bound, limit))
    if bound < held:
        return None if held - bound <= min(SHRINK_MOST, held // SHRINK_SHARE) else bound
    if streamed and bound - now >= min(worth(streamed), streamed):
        return bound
    return None


def worth(streamed: int) -> int:
    """Bytes by which a budget grows at least, ``streamed`` not being resident."""
    return max(GROW_LEAST, streamed // GROW_SHARE)


def rounded(offer: int) -> int:
    """``offer`` less at most a 256th: it differs by some bytes from prompt to prompt, and the same budget has the same plan."""
    step = 1 << max(0, (offer >> 8).bit_length() - 1)
    return offer // step * step


def describe(
    way: str,
    held: int,
    streamed: int,
    budget: int | None,
    stall: float | None = None,
    size: int | None = None,
) -> str:
    """One line for the node: the policy, the residency and, once measured, the stall.

    ``held``: bytes on the device, slots included; ``streamed``: bytes of weights that wait on the host; ``size``: of
    all weights, each counted once (default: the sum of both, which is right where there are no slots).
    """
    if way == "stream":
        total = held + streamed if size is None else size
        share = f"{100 * streamed / total:.0f} %" if total else "0 %"
        text = f"Carom: {share} of {format_size(total)} streams, {format_size(held)} on the device"
        if budget is not None:
            text += f" of {format_size(budget)} allowed"
        return text if stall is None else f"{text}; waited for weights {100 * stall:.1f} % of the time"
    if way == "whole":
        return f"Carom: the whole model fits ({format_size(held)}); nothing streams"
    return f"Carom: {way}"
