"""Checks and times the device decoders of Carom's codecs on one GPU, in under a minute.

Run by path from any folder. Only torch, triton and numpy must be installed:

    python benchmarks/tiers/codec_gpu.py [--mib 320] [--seconds 50] [--json FILE]

The checkout is loaded as the package ``carom`` for any folder name, as in tests/conftest.py. First every kind of
tensor is decoded by Triton (several tile sizes) and by plain torch, and compared byte for byte. A difference ends the
run with exit code 1. Then the decoders are timed, in GB/s of decoded output, as medians of CUDA events. The reference
is a plain device copy of the same output bytes, which reads and writes 2 bytes for each byte of output; the lossless
decoder reads and writes 1.7 for bf16, and 1.7 to 1.9 for e4m3, whose rows are "triton e4m3". With TRITON_INTERPRET=1 and no GPU only the checks run, on a few small tensors.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]


def load_checkout():
    """Return the checkout's codec package, imported as carom.core.codec."""
    if "carom" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["carom"] = module
        spec.loader.exec_module(module)
    return {
        name: importlib.import_module(f"carom.core.codec.{name}")
        for name in ("lossless", "lossless_format", "lossless_host", "unit_decoder", "kbit", "registry")
    }


def hard_tensors(small: bool):
    """Yield (label, tensor) of every dtype with odd sizes, escapes of both widths, NaN, infinities, subnormals and
    constants.
    """
    generator = torch.Generator().manual_seed(0)
    count = 2203 if small else 1_000_003
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        plain = torch.randn(count, generator=generator) * 0.02
        yield f"gaussian {dtype}", plain.to(dtype)
        rare = plain.clone()
        rare[::997] = 0
        rare[5::3001] *= 1e-9
        rare[7::5003] = float("nan")
        rare[11::7001] = float("inf")
        rare[13::911] = 1e-40
        yield f"rare values {dtype}", rare.to(dtype)
        yield f"constant {dtype}", torch.full((count // 3,), -1.5).to(dtype)
        bits = torch.randint(0, 256, (count // 9 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        bits[: count // 20 * dtype.itemsize] = 0
        yield f"random bits {dtype}", bits.view(dtype)
    count = 4000 if small else count
    normal = torch.randn(count, generator=generator)
    yield "cast e4m3", (normal * 0.02).to(torch.float8_e4m3fn)  # first codes of 1 bit
    yield "scaled e4m3", (normal * 90).to(torch.float8_e4m3fn)  # first codes of 2 bits
    exponents = torch.randint(
        16, 72, (count,), generator=generator, dtype=torch.uint8
    )  # first codes of 3 bits
    exponents[::131] = torch.randint(0, 256, (len(exponents[::131]),), generator=generator, dtype=torch.uint8)
    yield "seven exponents e4m3", exponents.view(torch.float8_e4m3fn)


def real_tensors(file: Path):
    """Yield (label, tensor) of the tensors in a safetensors file, unchanged and as bfloat16."""
    for name, tensor in importlib.import_module("safetensors.torch").load_file(file).items():
        tensor = tensor.flatten()
        yield f"{file.name}: {name} {tensor.dtype}", tensor
        if tensor.dtype == torch.float32:
            yield f"{file.name}: {name} as bfloat16", tensor.bfloat16()


def packed_unit(modules, tensors, device, lanes, code=None):
    """Return (entries, wire buffer on the device, raw bytes per entry, bytes of the slot) of tensors packed one after
    another.
    """
    entries, blobs, raws, wire_at, out_at = [], [], [], 0, 0
    for _, tensor in tensors:
        blob = modules["lossless"].encode(tensor, lanes=lanes, code=code)
        if blob is None:
            continue
        header = modules["lossless_format"].parse_header(blob.numpy().data, "benchmark")
        entries.append(modules["unit_decoder"].LosslessEntry(header, wire_at, out_at))
        blobs.append(blob)
        raws.append(tensor.view(torch.uint8))
        wire_at += blob.numel()
        out_at += modules["lossless_format"].align(header.raw_nbytes)
    return entries, torch.cat(blobs).to(device), raws, out_at


def with_plain(modules, entries, wire, raws, size, device):
    """Return the result of `packed_unit` with unencoded tensors inserted: empty, small, large, and of odd sizes."""
    raw_entry, align = modules["unit_decoder"].RawEntry, modules["lossless_format"].align
    pieces, at = [wire], wire.numel()
    entries, raws = list(entries), list(raws)
    for count in (0, 1, 7, 16, 6144, 70_003):
        plain = torch.randint(0, 256, (align(count),), dtype=torch.uint8)
        entries.append(raw_entry(count, at, size))
        pieces.append(plain.to(device))
        raws.append(plain[:count])
        at, size = at + plain.numel(), size + align(count)
    return entries, torch.cat(pieces), raws, size


def decoder(modules, entries, method, tiles=1, warps=None):
    unit = modules["unit_decoder"]
    return unit.UnitDecoder(entries, method=method, tuning=unit.Tuning(tiles=tiles, warps=warps))


def differences(modules, device, small, file=None) -> list[str]:
    """Return the labels of all tensors that decode to other bytes than were packed."""
    wrong = []
    tensors = list(hard_tensors(small)) + ([] if file is None else list(real_tensors(file)))
    for lanes, tiles in ((128, 1), (32, 3)):  # the other settings are compared when they are timed
        found = packed_unit(modules, tensors, device, lanes)
        entries, wire, raws, size = with_plain(modules, *found, device)
        for method in ("triton", "torch"):
            out = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
            decoder(modules, entries, method, tiles)(wire, out)
            host = out.cpu()
            for entry, raw in zip(entries, raws, strict=True):
                header = getattr(entry, "header", None)
                kind = "plain" if header is None else header.kind.name
                if not torch.equal(host[entry.out_at : entry.out_at + raw.numel()], raw):
                    wrong.append(f"{method} lanes={lanes} {kind} of {raw.numel()} bytes")
                after = host[entry.out_at + raw.numel() : entry.out_at + -(-raw.numel() // 16) * 16]
                if not bool((after == 0xA5).all()):
                    wrong.append(f"{method} lanes={lanes} {kind} wrote beyond its tensor")
    from_triton = importlib.import_module("carom.core.codec.kbit_triton").dequantize_triton
    kbit, get = modules["kbit"], modules["registry"].get
    for name in kbit.CODEBOOKS:
        for dtype in kbit.DTYPES:
            tensor = (torch.randn(1003 if small else 1_000_003) * 0.02).to(dtype)
            packed = get(name).encode(tensor)
            layout = get(name).layout(packed)
            want = torch.empty_like(tensor)
            kbit.dequantize_torch(packed.blob, layout, want)
            got = torch.empty_like(tensor, device=device)
            from_triton(packed.blob.to(device), layout, got)
            if not torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)):
                wrong.append(f"{name} {dtype}")
    return wrong + quantised_differences(modules, device, small)


def quantised_differences(modules, device: str, small: bool) -> list[str]:
    """Return what differs where one launch of each kind decodes several quantised tensors of a unit, with plain ones
    between them.
    """
    unit, get = modules["unit_decoder"], modules["registry"].get
    wrong: list[str] = []
    for counts in (
        (64, 1000, 4096),
        (8, 1003, 5, 4104),
    ):  # whole groups of 8, and tensors that end within one
        entries, parts, at, out_at = [], [], 0, 0
        for number, count in enumerate(counts if small else [1000 * n for n in counts]):
            for name in ("nf4", "nf2", "nf3"):
                value = (torch.randn(count) * 0.02).to(torch.bfloat16 if number % 2 else torch.float32)
                packed = get(name).encode(value)
                layout = get(name).layout(packed)
                entries += [unit.KbitEntry(layout, value.dtype, at, out_at)]
                out_at += -(-value.nbytes // 16) * 16
                plain = torch.randint(0, 255, (48,), dtype=torch.uint8)
                at += -(-layout.total // 16) * 16
                entries += [unit.RawEntry(48, at, out_at)]
                parts += [packed.blob, torch.zeros(-layout.total % 16, dtype=torch.uint8), plain]
                at, out_at = at + 48, out_at + 48
        wire, found = torch.cat(parts).to(device), []
        for method in ("triton", "torch"):
            out = torch.full((out_at + 16,), 0xA5, dtype=torch.uint8, device=device)
            decode = unit.UnitDecoder(entries, method=method)
            decode(wire, out)
            found.append(out.cpu())
            decode(wire, out.fill_(0xA5))  # by the cached launches, where there are any
            if not torch.equal(out.cpu(), found[-1]):
                wrong.append(f"quantised unit of {counts} by cached launches, {method}")
        if not torch.equal(*found):
            wrong.append(f"quantised unit of {counts}")
    return wrong


def gigabytes_per_second(call, nbytes, repeats=15) -> float:
    """Return the median rate of ``call`` on the device in GB/s, for ``nbytes`` bytes a call."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return nbytes / statistics.median(times) / 1e9


def timings(modules, mib: int, deadline: float, device: str = "cuda") -> list[dict]:
    """Return rows of {what, lanes, tiles, warps, ratio, gb_per_s}; stop without error at ``deadline``
    (time.monotonic).
    """
    rows: list[dict] = []

    def add(what, call, nbytes, **more):
        row = {"what": what, **more, "gb_per_s": round(gigabytes_per_second(call, nbytes), 1)}
        rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    count = mib << 19
    weights = (torch.randn(count, device=device) * 0.02).bfloat16()
    copy = torch.empty_like(weights)
    add("device copy", lambda: copy.copy_(weights), 2 * count)
    parts = [("", part) for part in weights.cpu().chunk(8)]
    raw = weights.view(torch.uint8)
    out = copy.view(torch.uint8)
    for k, lanes in ((3, 128), (4, 128), (3, 64), (3, 32), (3, 256), (4, 64), (4, 32), (4, 256)):
        if time.monotonic() > deadline:
            return rows
        lossless, kinds = modules["lossless"], modules["lossless_format"].KIND_BY_DTYPE
        counts = lossless.count_exponents(
            kinds[torch.bfloat16], parts[0][1].view(torch.int16).numpy().view("u2")
        )
        code = lossless.choose_code(counts, kinds[torch.bfloat16], 32 * lanes, (k,))
        start = time.perf_counter()
        entries, wire, _, _ = packed_unit(modules, parts, device, lanes, code)
        encoded = 2 * count / (time.perf_counter() - start) / 1e9
        ratio = round(wire.numel() / (2 * count), 4)
        print(
            f"-- k={code.k} lanes={lanes}: {ratio} of the bytes, packed at {encoded:.2f} GB/s (with the copy)"
        )
        variants = [("triton", 1, None), ("triton", 4, None)]
        if lanes == 128:
            variants += [
                ("triton", 2, None),
                ("triton", 12, None),
                ("triton", 1, 2),
                ("triton", 1, 8),
                ("torch", 1, None),
            ]
        for method, tiles, warps in variants:
            decode = decoder(modules, entries, method, tiles, warps)
            out.zero_()
            decode(wire, out)
            if not torch.equal(out, raw):
                raise SystemExit(f"NOT EXACT: k={k} lanes={lanes} tiles={tiles} warps={warps} {method}")
            add(method, lambda d=decode, w=wire: d(w, out), 2 * count, k=code.k, lanes=lanes, tiles=tiles,
                warps=warps or lanes // 32, ratio=ratio)  # fmt: skip
    for label, part in e4m3_weights(mib, device):
        if time.monotonic() > deadline:
            return rows
        entries, wire, raws, _ = packed_unit(modules, [("", one) for one in part.cpu().chunk(8)], device, 128)
        result, k, ratio = out[: part.numel()], entries[0].header.k, round(wire.numel() / part.numel(), 4)
        for method, tiles, warps in (
            ("triton", 1, None), ("triton", 2, None), ("triton", 4, None), ("triton", 1, 2), ("triton", 2, 2),
            ("triton", 1, 1), ("torch", 1, None),
        ):  # fmt: skip
            decode = decoder(modules, entries, method, tiles, warps)
            result.zero_()
            decode(wire, result)
            if not torch.equal(result, part.view(torch.uint8)):
                raise SystemExit(f"NOT EXACT: e4m3 {label} tiles={tiles} warps={warps} {method}")
            add(f"{method} e4m3, {label}", lambda d=decode, w=wire, o=result: d(w, o), part.numel(), k=k, lanes=128,
                tiles=tiles, warps=warps or 4, ratio=ratio)  # fmt: skip
    from_triton = importlib.import_module("carom.core.codec.kbit_triton").dequantize_triton
    by_torch = modules["kbit"].dequantize_torch  # what decodes where Triton does not run
    for name in modules["kbit"].CODEBOOKS:
        packed = modules["registry"].get(name).encode(weights)
        layout = modules["registry"].get(name).layout(packed)
        for warps in (1, 2, 4, 8):
            if time.monotonic() > deadline:
                return rows
            add(
                name,
                lambda b=packed.blob, y=layout, w=warps: from_triton(b, y, copy, w),
                2 * count,
                warps=warps,
            )
        add(f"{name}, torch", lambda b=packed.blob, y=layout: by_torch(b, y, copy), 2 * count)
    from_peers = importlib.import_module("carom.benchmarks.tiers.codec_peers")
    for row in from_peers.nvcomp_ans(weights, copy, gigabytes_per_second):
        rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    try:
        functional = importlib.import_module("bitsandbytes.functional")
    except ImportError:
        print("bitsandbytes is not installed: its NF4 is not timed")
        return rows
    quantised, state = functional.quantize_4bit(weights, quant_type="nf4", blocksize=64)
    add("bitsandbytes nf4", lambda: functional.dequantize_4bit(quantised, state, out=copy), 2 * count)
    return rows


def e4m3_weights(mib: int, device: str):
    """Yield (label, weights) of ``mib`` MiB of e4m3: cast as they are, and with every 128 x 128 block scaled to 448."""
    normal = torch.randn(mib << 10, 1024, device=device)
    yield "cast", (normal * 0.02).to(torch.float8_e4m3fn).flatten()
    blocks = normal.view(-1, 128, 8, 128)
    scaled = blocks * (448 / blocks.abs().amax((1, 3), keepdim=True))
    yield "scaled", scaled.to(torch.float8_e4m3fn).flatten()


def encoder_rows(modules, mib: int) -> list[dict]:
    """Return the CPU encoder's rates in GB/s of raw bf16, by threads, and the CPU decoder's on one thread: the best
    of five. Then both for e4m3 on one thread.
    """
    weights = (torch.randn(mib << 19) * 0.02).bfloat16()
    rows: list[dict] = []

    def add(what, threads, call, nbytes=weights.nbytes):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        row = {"what": what, "threads": threads, "gb_per_s": round(nbytes / min(times) / 1e9, 2)}
        rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    for threads in (1, 2, 4, 8):
        if threads > modules["lossless"].cores():
            break
        add("cpu encoder", threads, lambda t=threads: modules["lossless"].encode(weights, threads=t))
    blob = modules["lossless"].encode(weights).numpy()
    header = modules["lossless_format"].parse_header(blob.data, "benchmark")
    out = np.empty(weights.nbytes, np.uint8)
    add("cpu decoder", 1, lambda: modules["lossless_host"].decode_bytes(blob, header, 0, out))
    for label, part in e4m3_weights(mib, "cpu"):
        blob = modules["lossless"].encode(part).numpy()
        header = modules["lossless_format"].parse_header(blob.data, "benchmark")
        out = np.empty(part.nbytes, np.uint8)
        add(
            f"cpu encoder e4m3, {label}",
            1,
            lambda p=part: modules["lossless"].encode(p, threads=1),
            part.nbytes,
        )
        add(f"cpu decoder e4m3, {label}", 1,
            lambda b=blob, h=header, o=out: modules["lossless_host"].decode_bytes(b, h, 0, o), part.nbytes)  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=320, help="MiB of bf16 weights that are timed")
    parser.add_argument("--seconds", type=float, default=50, help="no new timing is begun after this")
    parser.add_argument("--file", type=Path, help="a safetensors file whose tensors are checked as well")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        parser.error(
            "Triton is not installed, and its decoder is what is checked: python -m pip install triton"
        )
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("torch sees no GPU; TRITON_INTERPRET=1 in the environment runs the checks without one")
    start = time.monotonic()
    modules = load_checkout()
    record = importlib.import_module("carom.benchmarks.engines.record")
    kept = record.new_record("carom codec", sys.argv[1:]) if arguments.json else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = differences(modules, device, device == "cpu", arguments.file)
    print(
        f"exact: {'no: ' + '; '.join(wrong) if wrong else 'yes'} ({time.monotonic() - start:.0f} s)",
        flush=True,
    )
    if wrong:
        return 1
    rows = encoder_rows(modules, min(arguments.mib, 64))
    if device == "cpu":
        print("no GPU here: no decoder is timed")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows += timings(modules, arguments.mib, start + arguments.seconds)
    if arguments.json:
        record.write_record(kept | {"rows": rows}, arguments.json)
    print(f"done in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
