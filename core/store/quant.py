"""PURE: which tensors of a checkpoint `carom pack --quant` quantises, and how: decided by name, dtype and shape.

As quantisers of the field do (bitsandbytes' Linear4bit, QLoRA), only the matrices of linear layers: embeddings, output
heads, norms, biases, convolutions, routers and adapters keep every bit. `carom plan --quant` counts the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CODEBOOKS = ("nf4", "nf3", "nf2")
DTYPES = ("BF16", "F16", "F32")
LEAST_ELEMENTS = 4096  # smaller matrices save nothing that a page of 4 KiB would show

_EXPERT = re.compile(r"(?:^|\.)experts?\.")
_KEPT = re.compile(
    r"embed|(?:^|\.)(?:wte|wpe|lm_head|head|output|router|gate|shared_expert_gate|embed_out)\.weight$"
    r"|norm|lora_|(?:^|\.)bias$|scale|absmax|pos_|(?:^|\.)adaln?_single",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Scheme:
    """A codebook's name for ``dense`` weights (what every token uses) and for routed ``experts``; None leaves them exact."""

    dense: str | None
    experts: str | None

    @property
    def text(self) -> str:
        """How it is written: "nf4" for both alike, else "dense=nf4,experts=nf2"."""
        if self.dense == self.experts:
            return str(self.dense)
        given = (("dense", self.dense), ("experts", self.experts))
        return ",".join(f"{key}={value}" for key, value in given if value is not None)

    def codebook(self, name: str, dtype: str, shape: tuple[int, ...]) -> str | None:
        """The codebook for a tensor (``dtype``: the format's code), None where it keeps every bit."""
        count = 1
        for size in shape:
            count *= size
        if dtype not in DTYPES or count < LEAST_ELEMENTS or _KEPT.search(name):
            return None
        if _EXPERT.search(name):
            return self.experts if len(shape) in (2, 3) else None
        # Tables, embeddings of positions and the like are parameters of other names.
        return self.dense if len(shape) == 2 and name.endswith(".weight") else None


def parse_scheme(asked: str) -> Scheme:
    """ "nf4", "dense=nf4,experts=nf2" (either may be left out) or, as `carom plan` has it, "nf4+nf2" (dense + experts).

    Raises ValueError that shows the forms.
    """
    text = asked.strip().lower()
    found: dict[str, str] = {}
    if "=" in text:
        for part in text.split(","):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key not in ("dense", "experts") or key in found:
                raise _unknown(asked)
            found[key] = value
    else:
        parts = [part.strip() for part in text.split("+")]
        if len(parts) > 2:
            raise _unknown(asked)
        found = {"dense": parts[0], "experts": parts[-1]}
    if not all(value in CODEBOOKS for value in found.values()):
        raise _unknown(asked)
    return Scheme(found.get("dense"), found.get("experts"))


def _unknown(asked: str) -> ValueError:
    return ValueError(
        f"--quant {asked[:80]!r}: write one of {', '.join(CODEBOOKS)}, or DENSE+EXPERTS as in nf4+nf2, or name them: "
        "dense=nf4,experts=nf2 (one of the two alone quantises only that)"
    )
