"""The order in which a forward needs a checkpoint's tensors, guessed from their names or read from a file.

A forward begins with the embeddings, goes through the numbered blocks in ascending order and ends with the
output head. In every published model family the tensor names show these parts. A wrong guess costs drive
seeks, never a wrong result.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterable, Sequence

from ...core.checkpoint.header import show
from ...core.common.errors import WeightsError

_DIGITS = re.compile(r"([0-9]+)")
_MIDDLE, _LAST = 50, 90

# (pattern, rank) pairs for the parts of a dotted name outside numbered blocks. The first pattern that matches
# a part gives the part's rank; parts of a lower rank are used earlier.
_OUTER = [
    (re.compile(p), rank)
    for p, rank in (
        (r"(cond_stage_model|conditioner|text_encoders?|text_model|t5|clip).*", 10),
        (r"(shared|wte|.*(tok|word)_?embed.*|embed_tokens|conv_in|img_in|x_embedder|patch_embed.*)", 20),
        (r"(.*(embed|wpe|embd).*|.*_in|patch.*|time_.*|t_block|pe_embedder|mask_token|pos_.*)", 25),
        (r"(encoder|input_blocks|down|down_blocks|double_blocks|transformer_blocks|noise_refiner|context_refiner)", 40),
        (r"(mid|mid_block|middle_block)", 60),
        (r"(decoder|output_blocks|up|up_blocks|single_blocks|single_transformer_blocks)", 70),
        (r"(norm|ln_f|final.*|norm_out|norm_f|last_.*|conv_norm_out|ln_post|post_layernorm|pooler)", 80),
        (r"(lm_head|head|proj_out|conv_out|out|output|score|classifier|embed_out|cls|qa_outputs)", _LAST),
        (r"(first_stage_model|vae|quant_conv|post_quant_conv)", 95),
    )
]  # fmt: skip
# The same for the parts of a name inside a numbered block.
_INNER = [
    (re.compile(p), rank)
    for p, rank in (
        (r"(input_layernorm|ln_1|norm1.*|attn_norm|attention_norm|self_attn_layer_norm|adaln.*|img_mod|txt_mod|modulation)", 10),
        (r"(self_attn|attn1?|self_attention|attention|img_attn|txt_attn|resnets|in_layers)", 20),
        (r"(norm2.*|cross_attn_norm|post_attention_layernorm|ln_2|ffn_norm|mlp_norm)", 35),
        (r"(attn2|cross_attn|crossattention|encoder_attn|attentions|emb_layers)", 30),
        (r"(mlp|ffn?|feed_forward|intermediate|block_sparse_moe|moe|img_mlp|txt_mlp|out_layers)", 60),
        (r"(output|norm3|final_layer_norm|post_.*|downsamplers|upsamplers)", 70),
        (r"(gate|router|qkv|qkv_proj|q|q_proj|to_q|query|wq|norm|in_proj.*)", 41),
        (r"(k|k_proj|to_k|key|wk)", 42),
        (r"(v|v_proj|to_v|value|wv)", 43),
        (r"(o|o_proj|to_out|dense|wo|out_proj|proj)", 52),
        (r"(gate_proj|gate_up_proj|w1|fc1|c_fc|linear1|experts)", 45),
        (r"(up_proj|w3)", 46),
        (r"(down_proj|w2|fc2|c_proj|linear2)", 58),
        (r"(shared_expert.*)", 59),
    )
]  # fmt: skip


def natural_key(name: str) -> tuple:
    """Return a sort key for ``name`` that compares numbers by value, so that block 2 comes before block 10."""
    # Numbers are compared by their length and then digit by digit. That compares by value without int(),
    # whose input is limited in length.
    pieces = enumerate(_DIGITS.split(name))
    return tuple((0, len(p.lstrip("0")), p.lstrip("0")) if i % 2 else (1, 0, p) for i, p in pieces if p)


def use_key(name: str) -> tuple:
    """Return a sort key for ``name`` by the guessed order of use."""
    key: list[tuple] = []
    inside = False
    for part in name.split("."):
        if part.isdigit() and part.isascii():
            inside = True
            key.append((_MIDDLE, natural_key(part)))
            continue
        lower = part.lower()
        table = _INNER if inside else _OUTER
        rank = next((rank for pattern, rank in table if pattern.fullmatch(lower)), _MIDDLE)
        if part in ("weight", "bias"):
            rank = _MIDDLE if part == "weight" else _MIDDLE + 1
        key.append((rank, natural_key(part)))
    return tuple(key)


def order_of_use(names: Iterable[str]) -> list[str]:
    """Sort ``names`` by the guessed order of use; the result does not depend on the order of the input."""
    return sorted(names, key=lambda name: (use_key(name), name))


def order_from_file(path: str | os.PathLike[str], names: Sequence[str]) -> list[str]:
    """Sort ``names`` by the order in the file ``path``: one name or glob ("model.layers.0.*") a line, or a
    JSON list of them.

    Tensors that the file does not name follow in `order_of_use`. Raises WeightsError for a line that matches
    no tensor.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(1 << 26)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: the order cannot be read: {error}") from error
    try:
        lines = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        lines = [line.strip() for line in lines]
    except (ValueError, AttributeError, RecursionError):
        raise WeightsError(
            f"{path}: neither a list of names, one a line, nor a JSON list of strings"
        ) from None
    left = dict.fromkeys(order_of_use(names))
    chosen: list[str] = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        if line in left:
            found = [line]
        elif any(c in line for c in "*?["):
            found = [name for name in left if fnmatch.fnmatchcase(name, line)]
        else:
            found = []
        if not found and line not in chosen:
            raise WeightsError(
                f"{path}: {show(line)} fits no tensor that an earlier line left; correct the line"
            )
        for name in found:
            del left[name]
        chosen.extend(found)
    return chosen + list(left)
