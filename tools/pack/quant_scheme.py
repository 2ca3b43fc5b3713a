"""The rule by which `carom pack --quant` chooses a quantisation for each tensor, from the tensor's name,
dtype and shape.

Only the matrices of linear layers are quantised, as in bitsandbytes' Linear4bit and QLoRA. Embeddings, output
heads, norms, biases, convolutions, routers and adapters keep every bit. `carom plan --quant` counts bytes by
the same rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CODEBOOKS = ("nf4", "nf3", "nf2")
DTYPES = ("BF16", "F16", "F32")
LEAST_ELEMENTS = 4096  # quantising smaller matrices would not save a page of 4 KiB

_EXPERT = re.compile(r"(?:^|\.)experts?\.")
_KEPT = re.compile(
    r"embed|(?:^|\.)(?:wte|wpe|lm_head|head|output|router|gate|shared_expert_gate|embed_out)\.weight$"
    r"|norm|lora_|(?:^|\.)bias$|scale|absmax|pos_|(?:^|\.)adaln?_single",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class QuantScheme:
    """The codebooks of a quantisation: one for ``dense`` weights, which every token uses, and one for routed
    ``experts``.

    Each is a name in CODEBOOKS, or None for weights that keep every bit.
    """

    dense: str | None
    experts: str | None

    @property
    def text(self) -> str:
        """The scheme as text: "nf4" where both codebooks are the same, else for example
        "dense=nf4,experts=nf2".
        """
        if self.dense == self.experts:
            return str(self.dense)
        given = (("dense", self.dense), ("experts", self.experts))
        return ",".join(f"{key}={value}" for key, value in given if value is not None)

    def codebook(self, name: str, dtype: str, shape: tuple[int, ...]) -> str | None:
        """Return the codebook for a tensor, or None where the tensor keeps every bit.

        ``dtype``: name of the dtype in safetensors, such as "BF16".
        """
        count = 1
        for size in shape:
            count *= size
        if dtype not in DTYPES or count < LEAST_ELEMENTS or _KEPT.search(name):
            return None
        if _EXPERT.search(name):
            return self.experts if len(shape) in (2, 3) else None
        # The weight of a linear layer is called "weight"; position tables and similar parameters have other
        # names.
        return self.dense if len(shape) == 2 and name.endswith(".weight") else None


def parse_scheme(asked: str) -> QuantScheme:
    """Parse a scheme written as "nf4", as "dense=nf4,experts=nf2" (either part may be left out), or as
    "nf4+nf2".

    The last form gives dense + experts, as in `carom plan`. Raises ValueError, which shows the accepted
    forms.
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
    return QuantScheme(found.get("dense"), found.get("experts"))


def _unknown(asked: str) -> ValueError:
    """Return the error for a scheme that cannot be parsed."""
    return ValueError(
        f"--quant {asked[:80]!r}: write one of {', '.join(CODEBOOKS)}, or DENSE+EXPERTS as in nf4+nf2, or name them: "
        "dense=nf4,experts=nf2 (one of the two alone quantises only that)"
    )
