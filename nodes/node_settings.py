"""PURE. The settings of a node, and the rules for whether a model streams and for its VRAM budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.common.sizes import MIB, format_size, parse_size, suggest_size

MODES = ("auto", "stream", "native")
GRANULARITIES = ("auto", "block", "phase", "layer")
CODECS = ("auto", "raw", "lossless")
PRIORITIES = ("normal", "high", "low")
# Accelerators that copy while they compute. On other devices each streamed weight would delay the computation.
STREAMING_DEVICES = ("cuda", "xpu", "npu", "mlu")
# A budget grows if at least 1/8 of the streamed bytes, and at least 256 MiB, would become resident: a new layout costs
# about a second.
GROW_SHARE = 8
GROW_LEAST = 256 * MIB
KEPT_ALIKE = 1.05  # the bytes that ComfyUI keeps for passes of one size differ by a smaller factor
SIZES_SEEN = 8  # sizes of passes for which additional bytes are remembered
STREAMED_SHARE = 8  # mode "stream": at least 1/8 of the weights streams
# An offer that is smaller than the held bytes by at most 1/8 of them and at most 384 MiB does not change the budget.
SHRINK_SHARE, SHRINK_MOST = 8, 384 * MIB


@dataclass(frozen=True)
class Settings:
    """The values of a node's widgets.

    ``vram``, ``ram``: "auto", a number of bytes, or a size such as "8GiB" or "50%"; ``priority``: the rank of the model
    among models that share memory; ``peers``: other GPUs whose memory holds weights, in the form that `parse_peers`
    reads; ``node``: the id of the node that shows progress text; ``reason``: why ComfyUI keeps
    the weights, "" where Carom streams them. `MODES`, `GRANULARITIES`, `CODECS` and `PRIORITIES` list the values of the
    other attributes.
    """

    mode: str = "auto"
    vram: str = "auto"
    ram: str = "auto"
    granularity: str = "auto"
    codec: str = "auto"
    priority: str = "normal"
    peers: str = ""
    node: str = ""
    reason: str = ""

    def lays_out_as(self, other: Settings) -> bool:
        """Return whether weights are laid out equally under both settings, but for the budget of device memory."""
        return (self.ram, self.granularity, self.codec, self.peers) == (
            other.ram,
            other.granularity,
            other.codec,
            other.peers,
        )

    def limits_as(self, other: Settings) -> bool:
        """Return whether both settings allow the same device memory."""
        return (self.vram, self.mode) == (other.vram, other.mode)

    @property
    def may_stand_aside(self) -> bool:
        """Whether ComfyUI may keep the weights of a model that fits: the user chose nothing that only Carom does."""
        return self.mode == "auto" and is_auto(self.vram) and is_auto(self.ram) and not self.peers.strip()

    def checked(self) -> Settings:
        """Return this object. Raises ValueError that names the widget for a value that is invalid or implausible."""
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
        parse_peers(self.peers)
        return self


@dataclass(frozen=True)
class Way:
    """The decision about a model. ``streams``: True if Carom streams its weights, False if ComfyUI keeps them;
    ``reason``: the reason for the decision, as text for the user.
    """

    streams: bool
    reason: str


@dataclass(frozen=True)
class Beyond:
    """An addition to ComfyUI's offer, as earlier passes taught it.

    ``nbytes``: bytes that the passes left free beyond ComfyUI's offer; ``kept``: bytes that ComfyUI kept for the
    passes; ``needs``: bytes that casts and patches needed in the passes by Carom's estimate.
    """

    nbytes: int
    kept: int
    needs: int = 0

    def covers(self, kept: int) -> bool:
        """Return whether passes for which ComfyUI keeps ``kept`` bytes need no more memory by ComfyUI's estimate."""
        return kept <= KEPT_ALIKE * self.kept


def beyond_now(seen: Sequence[Beyond], kept: int, needs: int = 0) -> int:
    """Return the bytes to add to ComfyUI's offer while ComfyUI keeps ``kept`` bytes for passes.

    The first entry of ``seen`` (smallest ``kept`` first) that covers ``kept`` decides. Without such an entry the result
    is 0. Passes whose casts and patches needed less than ``needs`` bytes (without the LoRA) do not count.
    """
    found = next((one for one in seen if one.covers(kept) and one.needs >= needs), None)
    # If ComfyUI keeps fewer bytes than then, its offer is larger by the difference, which is subtracted here.
    return 0 if found is None else max(0, found.nbytes - max(0, found.kept - kept))


def remember(seen: Sequence[Beyond], new: Beyond) -> tuple[Beyond, ...]:
    """Return ``seen`` with ``new`` in the place of entries for passes of the same size, sorted by ``kept``.

    At most `SIZES_SEEN` entries stay. Several sizes are remembered because passes of two sizes alternate in a workflow
    that makes an image and then a larger one. With a single remembered size, each change of size would cost a new
    layout.
    """
    others = [
        one for one in seen if not (one.covers(new.kept) and new.covers(one.kept) and one.needs == new.needs)
    ]
    return tuple(sorted([*others, new], key=lambda one: one.kept)[-SIZES_SEEN:])


def choose_way(mode: str, device: str) -> Way:
    """Decide whether Carom streams a model, for a node in ``mode`` and a ``device`` type such as "cuda"."""
    if mode == "native":
        return Way(False, "asked for: ComfyUI keeps the weights, Carom plans and reports")
    if mode == "auto" and device == "cpu":
        return Way(False, "computing happens on the CPU, where the weights are: there is nothing to stream")
    if mode == "auto" and device not in STREAMING_DEVICES:
        return Way(
            False, f"copies to a {device} device do not run beside its computing; ComfyUI keeps the weights"
        )
    return Way(True, "asked for" if mode == "stream" else "streams what does not fit")


def without_gain(size: int, room: int, for_passes: int) -> Way | None:
    """Return the decision that ComfyUI keeps a model of ``size`` bytes, None where streaming may gain.

    ``room``: bytes of the device that are free when no other model is on it; ``for_passes``: bytes that ComfyUI keeps
    free for passes at least. A model that fits beside these bytes streams nothing, and its host's own loading and
    switching is then as fast as Carom's or faster.
    """
    if size + for_passes > room:
        return None
    return Way(
        False, f"the whole model fits ({format_size(size)} of {format_size(room)}); ComfyUI keeps the weights"
    )


def is_auto(value: int | str) -> bool:
    """Return whether a size widget is "auto" or empty."""
    return isinstance(value, str) and value.strip().lower() in ("auto", "")


def parse_limit(value: int | str, whole: int, setting: str = "vram") -> float:
    """Return the bytes that ``value`` allows, infinity for "auto". Percentages refer to ``whole`` bytes.

    Raises ValueError that names ``setting`` if ``value`` is no size or is 0.
    """
    if is_auto(value):
        return math.inf
    size = parse_size(value, whole=whole, setting=setting)
    if size == 0:
        raise ValueError(f"{setting}={value!r} leaves no memory at all; write a size such as 8GiB, or auto")
    return size


def parse_peers(value: str) -> list[tuple[str, str]] | None:
    """Return the pairs (device, size) that ``value`` names, None for "auto", all other GPUs.

    ``value``: "", "auto", or devices such as "cuda:1=8GiB, cuda:2=50%". A device without a size has the size "auto".
    Raises ValueError for another value.
    """
    if value.strip().lower() == "auto":
        return None
    found = []
    for part in filter(None, (part.strip() for part in value.replace(";", ",").split(","))):
        device, equals, size = (piece.strip() for piece in part.partition("="))
        if not device.partition(":")[2].isdigit() or (equals and not size):
            raise ValueError(
                f"peers={value!r}: write auto for all other GPUs, or GPUs with sizes, such as cuda:1=8GiB, cuda:2=50%"
            )
        if is_auto(size):
            size = "auto"
        else:
            nbytes, meant = parse_limit(size, 1 << 40, "peers"), suggest_size(size)
            if meant is not None:
                raise ValueError(f"peers={value!r}: {size} means {nbytes} bytes; did you mean {meant}?")
        found.append((device, size))
    return found


def most_held(mode: str, limit: float, total: int) -> float:
    """Return the bytes that a model of ``total`` bytes may hold on the device under the user's ``limit``.

    In mode "stream" at least 1/8 of the weights streams, also for a model that would fit whole.
    """
    return min(limit, total - total // STREAMED_SHARE) if mode == "stream" else limit


def tolerance(held: int) -> int:
    """Return the bytes by which ComfyUI's offer may be below the ``held`` bytes of a layout that stays as it is."""
    return min(SHRINK_MOST, held // SHRINK_SHARE)


def next_budget(
    now: int | None, held: int, streamed: int, bound: int, limit: float = math.inf, away: bool = False
) -> int | None:
    """Return the new budget in bytes, None to keep the present one.

    ``now``: the present budget (None: no session); ``held``: bytes on the device under it; ``streamed``: bytes that
    are not resident; ``bound``: the bytes that ComfyUI offers from now on; ``limit``: the user's own limit; ``away``:
    whether the model is suspended, and its layout is made again in any case. The budget
    shrinks at once if ``held`` exceeds ``limit``, and for an offer that is much smaller than ``held``. It grows if the
    gain is worth a new layout. ComfyUI's offer changes a little from prompt to prompt (loaded kernels, cached memory),
    within ComfyUI's reserve. Following each such change would lay out the whole model each time.
    """
    if now is None:
        return bound
    if held > limit:
        return int(min(bound, limit))
    if bound < held:
        return None if held - bound <= tolerance(held) else bound
    if streamed and bound - now >= (
        min(GROW_LEAST, streamed // GROW_SHARE) if away else min(worth(streamed), streamed)
    ):
        return bound
    return None


def worth(streamed: int) -> int:
    """Return the least growth of a budget in bytes that is worth a new layout, where ``streamed`` bytes stream."""
    return max(GROW_LEAST, streamed // GROW_SHARE)


def gives_whole(asked: float, streamed: int) -> bool:
    """Return whether a model that is asked for ``asked`` bytes gives up all of its device memory.

    ``streamed``: bytes that are not resident. The budget would grow again with the next load, so a smaller budget now
    would cost two layouts of the whole model. A parked model returns with the layout that it had.
    """
    return asked >= worth(int(min(asked, 1 << 60)) + streamed)


def rounded(offer: int) -> int:
    """Return ``offer`` rounded down by at most 1/256.

    Offers differ by some bytes from prompt to prompt. Equal budgets lead to equal plans.
    """
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
    """Return a line of text for the node: how the model runs, its residency and, if measured, its stall.

    ``way``: "stream", "whole", or a text of its own; ``held``: bytes on the device, slots included; ``streamed``: bytes
    of weights that wait on the host; ``budget``: the budget in bytes; ``stall``: the share of the time that passes
    waited for weights; ``size``: bytes of all weights, each counted once (default: ``held`` + ``streamed``, which is
    right where there are no slots).
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
