"""nvCOMP's ANS over the weights that `codec_gpu.py` times its own decoder with, where it is installed (`nvidia-nvcomp-cu13`)."""

# mypy: ignore-errors
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import torch

CHUNKS = (1 << 16, 1 << 18)  # bytes that are packed independently; the first is nvCOMP's default
KINDS = ("<f2", "|u1")  # as 16-bit floats and as bytes; it has no bfloat16


def nvcomp_ans(
    weights: torch.Tensor, out: torch.Tensor, rate: Callable[[Callable[[], object], int], float]
) -> Iterator[dict]:
    """Rows of {what, kind, chunk, ratio, gb_per_s of decoded output}; ``weights`` and ``out``: bfloat16, the same size, on the device.

    Ends the run with SystemExit where what is decoded is not what was packed.
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
            except TypeError:  # versions before `out`
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
