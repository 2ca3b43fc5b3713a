"""Compiles the Triton kernels for GPUs that are not there: `python tests/support/compile_kernels.py BACKEND ARCH WARP`.

A process of its own, because Triton's library prints what it leaks when the process ends. Each launch of the product
is recorded instead of run, for a GPU with WARP lanes in a warp, and then compiled. Prints a JSON list of
[kernel, 16-byte stores, registers that are spilled to memory].
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from carom.core.codec import kbit_triton, lossless_encode_triton, lossless_triton
from carom.core.codec.kbit import CODEBOOKS, DEFAULT_BLOCK, Layout
from carom.core.codec.lossless_format import DEFAULT_LANES, KINDS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

TYPES = {torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}  # fmt: skip
WIDE_STORES = re.compile(r"st\.global\.v2\.b64|global_store_b128|global_store_dwordx4")


class Recorder:
    """Stands in for a kernel, and keeps the arguments of its last launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, num_warps: int, **constants: Any) -> None:
        self.arguments, self.constants, self.warps = arguments, constants, num_warps

    def compile(self, target: GPUTarget) -> list[int]:
        """Compile the recorded launch; return the 16-byte stores and the spilled registers (0 for NVIDIA)."""
        given = [TYPES[a.dtype] if isinstance(a, torch.Tensor) else "i32" for a in self.arguments]
        signature = dict(zip(self.kernel.arg_names, given, strict=False))
        signature |= dict.fromkeys(self.constants, "constexpr")
        # A launch finds that the addresses of its tensors are multiples of 16.
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(given) if kind.startswith("*")}
        # Only Triton's interpreter rounds by integer arithmetic.
        constants = {**self.constants, **({"ROUND_BF16": False} if "ROUND_BF16" in self.constants else {})}
        source = ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        built = compile(source, target=target, options={"num_warps": self.warps})
        code = built.asm.get("ptx") or built.asm["amdgcn"]
        assert built.asm.get("cubin") or built.asm["hsaco"]
        spilled = re.findall(r"\.[sv]gpr_spill_count: *(\d+)", code)
        return [len(WIDE_STORES.findall(code)), sum(map(int, spilled))]


def main(target: GPUTarget) -> None:
    found = []
    for module in (lossless_triton, kbit_triton):
        module.lanes_of_a_warp = lambda device: target.warp_size  # type: ignore[assignment]
    decode = lossless_triton._decode = Recorder(lossless_triton._decode)  # type: ignore[assignment]
    buffer = torch.zeros(16, dtype=torch.uint8)
    table = torch.zeros(1, lossless_triton.ROW_FIELDS, dtype=torch.int64)
    asm, e4m3 = target.backend == "cuda", next(kind for kind in KINDS if kind.two_level)
    for kind, lanes, k in [
        *((kind, DEFAULT_LANES, min(kind.max_k, 4)) for kind in KINDS),
        *((KINDS[0], lanes, 4) for lanes in (64, 256)),
        *((e4m3, DEFAULT_LANES, k) for k in (1, 2)),
    ]:
        lossless_triton.decode_group(buffer, buffer, table, 1, kind.name, k, lanes, asm=asm)
        name = f"{kind.name} {lanes}" + (f" k={k}" if kind.two_level else "")
        found.append([name, *decode.compile(target)])

    dequantize = kbit_triton._dequantize = Recorder(kbit_triton._dequantize)  # type: ignore[assignment]
    for book in CODEBOOKS.values():
        layout = Layout(book, 1024, DEFAULT_BLOCK)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            out = torch.zeros(1024, dtype=dtype)
            kbit_triton.dequantize_triton(torch.zeros(layout.total, dtype=torch.uint8), layout, out)
            found.append([f"{book.name} {str(dtype)[6:]}", *dequantize.compile(target)])

    source, words, numbers = (
        torch.zeros(1, dtype=dtype) for dtype in (torch.int16, torch.int32, torch.int64)
    )
    for name, arguments in {
        "_split": (source, buffer, words, numbers, buffer, 1, 1, 1),
        "_escapes": (source, words, numbers, buffer, buffer),
    }.items():
        kernel = Recorder(getattr(lossless_encode_triton, name))
        kernel[(1,)](*arguments, num_warps=4, KIND="bf16", K=3, LANES=DEFAULT_LANES)
        found.append([f"encode{name} bf16", *kernel.compile(target)])
    print(json.dumps(found))


if __name__ == "__main__":
    backend, arch, warp = sys.argv[1:]
    main(GPUTarget(backend, int(arch) if arch.isdecimal() else arch, int(warp)))
