"""The description of one benchmark case: its settings, its sizes in bytes, and the budget that Carom gets for the
case.

The module is pure: it touches no device.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

ENGINES = ("none", "carom", "ramtorch", "diffusers", "accelerate", "ai-toolkit", "musubi")
MODES = ("infer", "train")
KINDS = ("step", "link", "touch", "host")
ADAPTER_DTYPES = ("bfloat16", "float32")
CODECS = ("raw", "lossless", "auto")
CHECKPOINTS = ("outside", "inside", "off")
WEIGHT_BYTES = 2  # bfloat16
BLOCK_SQUARES = 18  # modulation 6, qkv 3, projection 1, feed-forward 4 + 4, each d x d
ADAPTED = ((1, 3), (1, 1), (1, 4), (4, 1))  # (in, out) of the four adapted linears, in units of d
CHANNELS = 64
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """The settings of one worker process.

    `d`: number of features; `tokens`: tokens of a sample; `resident`: number of blocks kept on the device; `slots`:
    number of slots in the region (RamTorch: blocks in its window); `ring`: number of musubi's buffers; `vram`: budget in
    bytes, instead of the budget that `resident` and `slots` imply;
    `repeat`: how often each block is called in a row; `limit_s`: time limit of the process in seconds.

    `kind`: "step" times the model, "link" times the pinned copy of one block, "touch" only makes the virtual
    machine's memory grow, "host" alternates with no offloading where the host limits the speed.
    """

    engine: str = "none"
    mode: str = "infer"
    kind: str = "step"
    d: int = 256
    depth: int = 6
    tokens: int = 64
    batch: int = 1
    rank: int = 16
    heads: int = 0
    resident: int = 0
    slots: int = 3
    ring: int = 2
    vram: int | None = None
    steps: int = 8
    warmup: int = 3
    device: str = "cpu"
    codec: str = "raw"
    repeat: int = 1
    granularity: str = "auto"
    adapter_dtype: str = "bfloat16"
    checkpoint: str = "outside"
    seed: int = 0
    verify: bool = True
    touch_bytes: int = 0
    limit_s: float = 300.0

    def __post_init__(self) -> None:
        choices = {"engine": ENGINES, "mode": MODES, "kind": KINDS, "codec": CODECS,
                   "adapter_dtype": ADAPTER_DTYPES, "checkpoint": CHECKPOINTS}  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; choose from {', '.join(allowed)}")
        bounds = {"d": (16, 1 << 15), "depth": (1, 4096), "tokens": (1, 1 << 20), "batch": (1, 4096),
                  "rank": (0, 4096), "heads": (0, 1024), "slots": (1, 4096), "ring": (2, 4096), "steps": (0, 1_000_000),
                  "warmup": (0, 100_000), "resident": (0, self.depth), "repeat": (1, 4096), "touch_bytes": (0, 1 << 40)}  # fmt: skip
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{name}={value!r} must be a whole number from {low} to {high}")
        if self.d % self.head_count:
            raise ValueError(f"d={self.d} is not divisible by heads={self.head_count}")
        if self.mode == "train" and self.rank == 0:
            raise ValueError("rank=0 leaves nothing to train; give a rank of at least 1")
        if self.vram is not None and (not isinstance(self.vram, int) or self.vram < 0):
            raise ValueError(f"vram={self.vram!r} must be a number of bytes")
        if not self.limit_s > 0:
            raise ValueError(f"limit_s={self.limit_s!r} must be more than 0 seconds")

    @property
    def head_count(self) -> int:
        """The number of attention heads: 128 features a head (64 for narrow models) unless `heads` is given."""
        if self.heads:
            return self.heads
        return next((self.d // width for width in (128, 64, 16) if self.d % width == 0), 1)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block's frozen weights."""
        return BLOCK_SQUARES * self.d * self.d * WEIGHT_BYTES

    @property
    def outside_bytes(self) -> int:
        """The bytes of frozen weights outside the blocks (input and output projection)."""
        return 2 * CHANNELS * self.d * WEIGHT_BYTES

    @property
    def weight_bytes(self) -> int:
        """The bytes of all frozen weights."""
        return self.depth * self.block_bytes + self.outside_bytes

    @property
    def streamed(self) -> int:
        """The number of blocks that are streamed."""
        return self.depth - self.resident

    @property
    def budget_bytes(self) -> int:
        """The VRAM in bytes for `resident` blocks, `slots` slots in one region, and the weights outside the blocks.

        Each resident block, the region and the rest are rounded up to the page of the device's allocator: 2 MiB on
        CUDA and ROCm, 64 KiB (more than any alignment) on the host.
        """
        if self.vram is not None:
            return self.vram
        page = 64 << 10 if self.device == "cpu" else 2 * MIB
        region = _round_up(min(self.slots, self.streamed) * self.block_bytes, page)
        return (
            self.resident * _round_up(self.block_bytes, page) + region + _round_up(self.outside_bytes, page)
        )

    @property
    def by_bytes(self) -> bool:
        """Whether the budget is given in bytes, and not as numbers of blocks and slots."""
        return self.vram is not None and not self.resident

    @property
    def place(self) -> str:
        """A short text: the resident blocks of all blocks, or the budget that decides which blocks stay."""
        return f"in {(self.vram or 0) / 1e9:.3g} GB" if self.by_bytes else f"{self.resident}/{self.depth}"

    def label(self) -> str:
        """Return a short description of the case, for progress lines."""
        if self.kind == "host":
            return f"host time, {self.mode}, {self.resident}/{self.depth} resident, each block {self.repeat} times"
        if self.kind != "step":
            return self.kind
        where = "all resident" if self.resident == self.depth else f"{self.resident}/{self.depth} resident"
        if self.engine == "none":
            where = "no offloading"
        elif self.engine == "carom":
            where = (
                f"{self.place}, {self.codec}"
                if self.by_bytes
                else f"{where}, {self.slots} slots, {self.codec}"
            )
        elif self.engine == "musubi":
            where = f"{where}, ring of {self.ring}"
        return f"{self.engine} {self.mode} d={self.d} {self.tokens} tokens, {where}"

    def to_json(self) -> str:
        """Return one line of JSON that `from_json` can read."""
        return json.dumps(asdict(self))

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Return the case that ``text`` describes. Raises ValueError, which names the error, for an invalid text."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the case is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError("the case must be a JSON object")
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown options in the case: {', '.join(sorted(unknown))}")
        return cls(**data)

    def but(self, **changes: Any) -> Case:
        """Return a copy with ``changes``."""
        return replace(self, **changes)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
