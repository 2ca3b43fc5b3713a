"""nvCOMP's ANS on the weights for which `codec_gpu.py` times Carom's decoder, if installed (`nvidia-nvcomp-cu13`)."""

# mypy: ignore-errors
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import torch

CHUNKS = (1 << 16, 1 << 18)  # bytes of independently packed chunks; the first is nvCOMP's default
KINDS = ("<f2", "|u1")  # 16-bit floats and bytes; nvCOMP has no bfloat16


def nvcomp_ans(
    weights: torch.Tensor, out: torch.Tensor, rate: Callable[[Callable[[], object], int], float]
) -> Iterator[dict]:
    """Yield rows of {what, kind, chunk, ratio, gb_per_s of decoded output}.

    ``weights`` and ``out``: bfloat16 tensors of the same size on the device. Raises SystemExit if the decoded bytes
    differ from the packed ones.
    """
    try:
        nvcomp = importlib.import_module("nvidia.nvcomp")
    except (ImportError, OSError) as error:
        print(f"nvCOMP is not here and is not timed: {type(error).__name__}: {str(error)[:120]}")
        return
    raw, target = weights.view(torch.uint8), out.view(torch.uint8)
    for kind in KINDS:
        for chunk in CHUNKS:
            codec = nvcomp.Codec(
                algorithm="ANS", data_type=kind, uncomp_chunk_size=chunk,
                cuda_stream=torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            packed = codec.encode(nvcomp.as_array(raw))
            place = nvcomp.as_array(target)
            target.zero_()
            try:
                decode = lambda c=codec, p=packed, o=place: c.decode(p, out=o)  # noqa: E731
                decode()
            except TypeError:  # older versions have no `out`
                decode = lambda c=codec, p=packed: c.decode(p)  # noqa: E731
                target.copy_(torch.from_dlpack(decode()).view(torch.uint8).flatten())
            torch.cuda.synchronize()
            if not torch.equal(target, raw):
                raise SystemExit(f"NOT EXACT: nvCOMP ANS {kind} {chunk}")
            ratio = round(packed.buffer_size / raw.numel(), 4)
            yield {
                "what": f"nvCOMP {nvcomp.__version__} ANS", "kind": kind, "chunk": chunk, "ratio": ratio,
                "gb_per_s": round(rate(decode, raw.numel()), 1),
            }  # fmt: skip
