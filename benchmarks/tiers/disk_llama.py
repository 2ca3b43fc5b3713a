"""The model of `disk_gpu.py`: a Llama of transformers, a fast writer for its checkpoint, adapters, and plain direct
reads.

The file is a packed file (tools/pack/file_layout.py): in order of use, with every tensor on whole pages, and with
checksums. `carom pack FILE --verify` accepts it, and any safetensors reader opens it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn

from ...core.checkpoint.direct_io import ALIGN, aligned_buffer
from ...core.common.huge_pages import allocate_pages
from ...core.host.arena import HostArena, storage_bytes
from ...tools.pack.file_layout import WrittenTensor, packed_header, whole_pages

CHUNK = 8 << 20  # bytes of one write
WRITERS = 8
HEADER_ROOM = 1 << 20
RANK = 16


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama. The defaults are those of Llama 2 7B, except for the number of layers.

    ``kv_heads``: heads of keys and values, as many as ``heads`` if None.
    """

    width: int = 4096
    inner: int = 11008
    heads: int = 32
    vocab: int = 32000
    kv_heads: int | None = None


def build(shape: Shape, layers: int, device: str | torch.device) -> nn.Module:
    """Return a causal Llama of transformers in bf16; on a real device with random weights, as transformers draws
    them.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads or shape.heads, max_position_embeddings=4096,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if torch.device(device).type not in ("cpu", "meta"):
        # A GPU's rotary frequencies differ in the last bit from those of the CPU, which a streamed model uses.
        rotary = model.model.rotary_emb
        for name, buffer in type(rotary)(config=config).named_buffers():
            getattr(rotary, name).copy_(buffer)
    return model


def cut(model: Any, layers: int) -> None:
    """Keep the first ``layers`` blocks of a model of `build`, in place."""
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers


def in_order_of_use(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the (name, tensor) pairs of a checkpoint, in the order in which the forward uses them."""
    last = {"model.norm.weight": 1, "lm_head.weight": 2}
    return sorted(model.state_dict().items(), key=lambda item: last.get(item[0], 0))


def add_adapters(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    """Add PEFT's LoRA to all linears of the blocks and enable checkpointing of the blocks; return the model and the
    adapters.

    Models of the same shapes get the same values.
    """
    import peft

    config = peft.LoraConfig(
        r=RANK, lora_alpha=RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    adapted.train()
    generator = torch.Generator().manual_seed(1)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    with torch.no_grad():
        for (
            parameter
        ) in trained:  # PEFT initialises half of them to zero, which would hide errors of the first step
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return adapted, trained


def grow(nbytes: int) -> None:
    """Write to ``nbytes`` of memory once, because a virtual machine's memory grows slowly at first use."""
    parts = numpy.array_split(numpy.frombuffer(allocate_pages(nbytes), numpy.uint8), 16)
    workers = [threading.Thread(target=part.fill, args=(1,)) for part in parts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


# -- the file


def open_direct(path: str, flags: int) -> int:
    """Return a descriptor that bypasses the page cache, or a plain one where the file system does not support that
    (tmpfs).
    """
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


@dataclass(frozen=True)
class Stored:
    """A tensor to be written: its name, and its dtype, shape and ``data`` (1-D uint8, on any device) in the file.

    ``describe``: returns the codec's metadata of an encoded tensor from its bytes; None for an unchanged tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: torch.Tensor
    describe: Callable[[memoryview], dict[str, Any]] | None = None


def write_packed(path: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Write ``tensors`` (bf16, on any device) as one packed file, bypassing the page cache if possible; return its
    bytes.
    """
    return write_stored(
        path, (Stored(name, "BF16", tuple(t.shape), storage_bytes(t.detach())) for name, t in tensors), "raw"
    )


def write_stored(path: str, tensors: Iterable[Stored], codec: str) -> int:
    """Write ``tensors`` as one packed file that records ``codec`` (lossy unless it is "raw"); return its bytes."""
    with _Out(path) as out:
        written, at = [], 0
        for stored in tensors:
            nbytes = stored.data.numel()
            told = out.put(stored.data, HEADER_ROOM + at, stored.describe)
            written.append((replace(stored, data=torch.empty(0)), at, nbytes, told))
            at += whole_pages(nbytes)
        entries = [
            WrittenTensor(
                one.name,
                one.dtype,
                one.shape,
                begin,
                begin + nbytes,
                *(one_told.result() for one_told in told),
            )
            for one, begin, nbytes, told in written
        ]
        packed = codec != "raw"
        header = packed_header(entries, {"format": "pt"}, codec, True, lossy=packed, has_metadata=packed)
        text = header[8:].ljust(HEADER_ROOM - 8)
        if len(text) != HEADER_ROOM - 8:
            raise ValueError(f"the header takes {len(header)} bytes, {HEADER_ROOM} are kept")
        head = torch.frombuffer(bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8)
        out.put(head, 0)
    return HEADER_ROOM + at


class _Out:
    """A file written from two buffers: one is filled while several threads write the other."""

    def __init__(self, path: str) -> None:
        self._fd = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._pool = ThreadPoolExecutor(WRITERS)
        self._buffers: list[memoryview] = [aligned_buffer(ALIGN), aligned_buffer(ALIGN)]
        self._busy: list[list[Future]] = [[], []]
        self._turn = 0

    def put(
        self, data: torch.Tensor, at: int, describe: Callable[[memoryview], dict[str, Any]] | None = None
    ) -> tuple[Future[str], Future[dict[str, Any] | None]]:
        """Write the bytes of ``data`` at ``at``, with zeros up to the end of the page; return futures of their
        SHA-256 and of what ``describe`` returns for them.
        """
        turn = self._turn = 1 - self._turn
        for future in self._busy[turn]:
            future.result()
        nbytes = whole_pages(data.numel())
        if len(self._buffers[turn]) < nbytes:
            self._buffers[turn] = aligned_buffer(nbytes)
        buffer = self._buffers[turn]
        host = torch.frombuffer(buffer, dtype=torch.uint8)
        host[: data.numel()].copy_(data)
        host[data.numel() : nbytes].zero_()
        kept = buffer[: data.numel()]
        summed = self._pool.submit(lambda: hashlib.sha256(kept).hexdigest())
        described = self._pool.submit(lambda: None if describe is None else describe(kept))
        writes = [
            self._pool.submit(self._write, buffer[start : min(start + CHUNK, nbytes)], at + start)
            for start in range(0, nbytes, CHUNK)
        ]
        self._busy[turn] = [summed, described, *writes]
        return summed, described

    def _write(self, data: memoryview, at: int) -> None:
        if not hasattr(os, "pwrite"):
            raise SystemExit("this benchmark needs os.pwrite (Linux)")
        while len(data):
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    def __enter__(self) -> _Out:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for future in (*self._busy[0], *self._busy[1]):
                if kind is None:
                    future.result()
                else:
                    future.cancel()
            os.fsync(self._fd)
        finally:
            self._pool.shutdown()
            os.close(self._fd)


# -- plain direct reads


class PlainReads:
    """Plain reads as in fio: threads read blocks of a file, bypassing the page cache, into memory that was touched
    before.
    """

    def __init__(self, path: str, most: int = 16 * CHUNK) -> None:
        self._path, self._size = path, os.stat(path).st_size // ALIGN * ALIGN
        # Memory of the same kind as the RAM cache, because the kind of pages changes a rate by tens of percent.
        block = HostArena(None, None).allocate(most).data
        self._memory = memoryview(block.zero_().numpy())
        self._next = 0

    def rate(
        self, threads: int, block: int, nbytes: int, end: int | None = None, into: memoryview | None = None
    ) -> float:
        """Return the bytes/s of reading ``nbytes`` from the end of the last call on, in the first ``end`` bytes of
        the file (default: all).

        Reads continue at the start of the file after ``end``. Every thread reads into the same block of memory again,
        as in fio, and that block may stay in a CPU cache. With ``into``, successive blocks are read to successive
        places in that memory, as a program that keeps the data must do.
        """
        if not hasattr(os, "preadv"):
            raise SystemExit("this benchmark needs os.preadv (Linux)")
        fd = open_direct(self._path, os.O_RDONLY)
        blocks = max(1, min(self._size, end or self._size) // block)
        first, count = self._next // block % blocks, max(threads, nbytes // block)
        turn, lock, read = iter(range(first, first + count)), threading.Lock(), [0] * threads
        self._next = (first + count) % blocks * block

        def work(number: int) -> None:
            buffer = self._memory[number * block : (number + 1) * block]
            while True:
                with lock:
                    index = next(turn, None)
                if index is None:
                    return
                if into is not None:
                    at = index % (len(into) // block) * block
                    buffer = into[at : at + block]
                read[number] += os.preadv(fd, [buffer], index % blocks * block)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - began
        os.close(fd)
        return sum(read) / seconds

    def sweep(self, nbytes: int) -> list[dict[str, Any]]:
        """Return the better of two rates for every combination of threads and block sizes, ``nbytes`` each, the
        fastest first.
        """
        cases = [(t, b) for b in (1 << 20, 4 << 20, 8 << 20) for t in (2, 4, 8, 16)]
        rates = dict.fromkeys(cases, 0.0)
        for threads, block in (*cases, *reversed(cases)):
            rates[threads, block] = max(rates[threads, block], self.rate(threads, block, nbytes))
        found = [{"threads": t, "block": b, "bytes_per_second": rate} for (t, b), rate in rates.items()]
        return sorted(found, key=lambda case: -case["bytes_per_second"])
