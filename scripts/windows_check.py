#!/usr/bin/env python3
"""Tries on a Windows machine what Carom does there, and writes one JSON file to attach to an issue.

    python.exe scripts/windows_check.py

It needs no input. Start it with the Python that runs ComfyUI or ai-toolkit. It needs Carom's requirements, and room on the
drive for the files of the largest part (``--size``). Each part runs in a process of its own, so that one that
fails, hangs or crashes leaves its message and does not end the rest. It runs on other systems too.

Exit codes: 0 all parts passed, 1 a part failed (the JSON file is written), 2 bad use.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORMAT = 1
MIB = 1 << 20
RESULT = "result.json"
SECONDS = 900.0  # for a part; a demo on a slow CPU takes minutes


def of_carom(name: str = "") -> Any:
    """Return the module ``name`` of the Carom of this checkout, whatever its folder is called; without a name the package."""
    if "carom" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec and spec.loader
        package = importlib.util.module_from_spec(spec)
        sys.modules["carom"] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"carom.{name}" if name else "carom")


# -- the parts. Each takes a folder of its own and the size in bytes, and returns what is written to the file.


def check_system(folder: Path, size: int) -> dict[str, Any]:
    """The machine."""
    carom = of_carom()
    import torch

    host_memory = of_carom("core.host.probe").host_memory

    memory = host_memory()
    found: dict[str, Any] = {
        "system": platform.platform(), "python": sys.version, "executable": sys.executable, "torch": torch.__version__,
        "cuda": torch.version.cuda, "hip": torch.version.hip, "carom": carom.__version__,
        "memory": {key: str(value) for key, value in vars_of(memory).items()},
        "free_on_drive": shutil.disk_usage(folder).free, "code_page": io.text_encoding(None),
        "output_encoding": sys.stdout.encoding,
    }  # fmt: skip
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name, "total": properties.total_memory, "free": torch.cuda.mem_get_info(0)[0],
            "devices": torch.cuda.device_count(), "driver": nvidia_driver(),
        }  # fmt: skip
    return found


def check_pins(folder: Path, size: int) -> dict[str, Any]:
    """Pinned memory, in blocks until one is refused."""
    make_engine = of_carom("core.device.make_engine").make_engine
    tried_ways = of_carom("core.device.system_pinner").tried_ways
    HostArena = of_carom("core.host.arena").HostArena

    engine = make_engine(None)
    if engine.pinner is None:
        return {"skipped": f"{engine.device}: there is no driver to pin memory with"}
    limit = engine.pinner.limit(0)
    arena, step = HostArena(engine.pinner, None), min(64 * MIB, size)
    blocks: list[Any] = []
    start = time.perf_counter()
    while len(blocks) * step < size:
        block = arena.allocate(step)
        block.data.fill_(1)
        blocks.append(block)
        if not arena.pin(block):
            break
    seconds = time.perf_counter() - start
    return {
        "pinned": arena.pinned_bytes, "asked": size, "seconds": seconds, "notes": arena.notes,
        "limit": None if limit is None else vars_of(limit), "ways": [vars_of(trial) for trial in tried_ways(engine.device)],
    }  # fmt: skip


def check_reads(folder: Path, size: int) -> dict[str, Any]:
    """Unbuffered reads of a file."""
    open_raw = of_carom("core.checkpoint.direct_io").open_raw
    disk_reader = of_carom("core.checkpoint.disk_reader")
    DiskReader = disk_reader.DiskReader
    ReaderPolicy = disk_reader.ReaderPolicy
    open_index = of_carom("core.checkpoint.index").open_index

    size = min(size, 1 << 30)
    path, expected = folder / "m.safetensors", 0
    with path.open("wb") as file:
        write_header(file, {"w": ("U8", (size,))})
        for at in range(0, size, 16 * MIB):
            data = os.urandom(min(16 * MIB, size - at))
            expected = zlib.crc32(data, expected)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    raw = open_raw(str(path))
    opened = raw.direct
    raw.close()
    target, entry = bytearray(size), open_index(path)["w"]
    with DiskReader(ReaderPolicy()) as reader:
        start = time.perf_counter()
        reader.submit(entry, target).result(SECONDS)
        seconds = time.perf_counter() - start
        stats = reader.stats()
    assert zlib.crc32(target) == expected, "the bytes that were read are not those that were written"
    return {
        "bytes": size, "opened_unbuffered": opened, "read_unbuffered": stats.direct, "bytes_per_second": size / seconds,
        "retries": stats.retries,
    }  # fmt: skip


def check_spill(folder: Path, size: int) -> dict[str, Any]:
    """Weights that are spilled to a file, and the weights of a mapped file."""
    import torch

    MappedViews = of_carom("core.checkpoint.mapped_views").MappedViews
    spilling = of_carom("core.checkpoint.spill")
    from safetensors.torch import load_file, save_file

    nbytes = min(size // 4, 512 * MIB)
    kept = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    before = written_bytes()
    view = spilling.spill([kept], folder / "spilled")[0].view
    after = written_bytes()
    assert torch.equal(view, kept), "the mapped file has other bytes"
    written = None if before is None or after is None else after - before
    assert written is None or written < 1.5 * nbytes, (
        f"{written} bytes were written for {nbytes} bytes of weights"
    )
    spilled_is_found = MappedViews().find(view) is not None
    if torch.cuda.is_available():
        assert torch.equal(view.to("cuda").cpu(), kept), "the card has other bytes than the mapped file"
    read_only = spilling.allow_writes([view])
    if not read_only:
        view[: nbytes // 2].add_(1)
        assert torch.equal(view[: nbytes // 2], kept[: nbytes // 2] + 1), "a write to the mapped file is lost"
        assert torch.equal(view[nbytes // 2 :], kept[nbytes // 2 :])
    save_file({"w": kept}, folder / "m.safetensors")
    loaded = load_file(folder / "m.safetensors")["w"]
    # The process ends with its files mapped. What is left in the folder then is told by the program that started this one.
    return {
        "bytes": nbytes, "bytes_written": written,
        "files_before_exit": sorted(path.name for path in (folder / "spilled").iterdir()),
        "mapped_weights_are_found": MappedViews().find(loaded) is not None, "spilled_weights_are_found": spilled_is_found,
        "bytes_that_stay_read_only": read_only,
    }  # fmt: skip


def check_triton(folder: Path, size: int) -> dict[str, Any]:
    """Triton decodes packed weights on the GPU."""
    import torch

    try_triton = of_carom("tools.doctor.amd").try_triton

    if not torch.cuda.is_available():
        return {"skipped": "there is no GPU"}
    if importlib.util.find_spec("triton") is None:
        return {"skipped": "Triton is not installed"}
    reason, crashed = try_triton()
    return {"works": not reason, "reason": reason, "crashed": crashed}


def check_doctor(folder: Path, size: int) -> dict[str, Any]:
    """carom doctor."""
    return run_command("doctor")


def check_demo(folder: Path, size: int) -> dict[str, Any]:
    """carom demo: stream, train, compare bit for bit."""
    found = run_command(
        "demo", "--size", str(min(size, 512 * MIB)), "--out", str(folder / "out"), "--dir", str(folder)
    )
    assert found["bit_exact"] is True, "streamed and resident results differ"
    return found


def check_stream(folder: Path, size: int) -> dict[str, Any]:
    """A model that streams from RAM and from the drive.

    It has ``size`` bytes and gets a quarter of that. The results are compared with those of the same layers, one by one.
    """
    carom = of_carom()
    import torch
    from safetensors import safe_open
    from torch import nn

    width = 4096
    while size // (2 * width * width) < 16 and width > 64:
        width //= 2
    layers = max(16, size // (2 * width * width))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        write_header(file, {f"{number}.weight": ("BF16", (width, width)) for number in range(layers)})
        generator = torch.Generator().manual_seed(0)
        for _ in range(layers):
            weight = (torch.randn(width, width, generator=generator) / width**0.5).to(torch.bfloat16)
            file.write(weight.view(torch.uint8).numpy().data)
    x = torch.randn(16, width, generator=generator).to(device, torch.bfloat16)
    expected = x
    with safe_open(path, framework="pt") as weights, torch.inference_mode():
        for number in range(layers):
            expected = nn.functional.linear(expected, weights.get_tensor(f"{number}.weight").to(device))
    budget = max(size // 4, 6 * 2 * width * width)
    found: dict[str, Any] = {"layers": layers, "width": width, "device": str(device), "vram": budget}
    for name, ram in (("ram", "auto"), ("drive", max(64 * MIB, size // 8))):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            model = model.to(torch.bfloat16).requires_grad_(False)
        start = time.perf_counter()
        with carom.stream(model, device=device, vram=budget, ram=ram, weights=path) as session:
            ready, seconds = time.perf_counter() - start, []
            for _ in range(4):
                start = time.perf_counter()
                with torch.inference_mode():
                    result = model(x).cpu()
                seconds.append(time.perf_counter() - start)
                assert torch.equal(result, expected.cpu()), f"from {name}: the streamed result differs"
            report = session.report()
        found[name] = {
            "seconds_to_start": ready, "seconds_a_pass": seconds, "report": report.to_dict(),
            "summary": str(report.table()),
        }  # fmt: skip
    return found


PARTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "system": check_system, "doctor": check_doctor, "pins": check_pins, "reads": check_reads, "spill": check_spill,
    "triton": check_triton, "demo": check_demo, "stream": check_stream,
}  # fmt: skip


# -- what the parts share


def vars_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver, None if nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version,driver_model.current", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    return None


def written_bytes() -> int | None:
    """Return the bytes that this process has written by system calls, None where the system does not count them."""
    import psutil

    with contextlib.suppress(AttributeError, NotImplementedError, OSError):
        counters = psutil.Process().io_counters()
        return int(getattr(counters, "write_chars", counters.write_bytes))
    return None


def write_header(file: Any, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write the header of a safetensors file whose tensors follow in this order: {name: (dtype, shape)}."""
    bytes_of, header, end = {"U8": 1, "BF16": 2}, {}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = bytes_of[dtype]
        for length in shape:
            nbytes *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def run_command(*arguments: str) -> dict[str, Any]:
    """Run a command of Carom in this process and return the JSON that it printed. Raises RuntimeError if it failed."""
    main = of_carom("cli.main").main

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main([*arguments, "--json"])
    if code:
        raise RuntimeError(f"carom {arguments[0]} ended with exit code {code}: {text.getvalue()[-2000:]}")
    return json.loads(text.getvalue())


# -- the program


def run_part(name: str, folder: Path, size: int) -> int:
    """Run a part in this process and write its result into ``folder``."""
    try:
        found: dict[str, Any] = {"result": PARTS[name](folder, size)}
    except BaseException as error:
        found = {
            "error": type(error).__name__, "message": str(error), "winerror": getattr(error, "winerror", None),
            "traceback": traceback.format_exc()[-6000:],
        }  # fmt: skip
    (folder.parent / RESULT).write_text(json.dumps(found, default=str), "utf-8")
    return 0


def start_part(name: str, parent: Path, size: int, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own, and return its result, with ``ok`` and the seconds that it took."""
    folder = parent / name / "files"
    folder.mkdir(parents=True)
    options = ["-s"] if sys.flags.no_user_site else []
    command = [
        sys.executable,
        *options,
        str(Path(__file__).resolve()),
        "--part",
        name,
        str(folder),
        "--size",
        str(size),
    ]
    start, code = time.monotonic(), None
    # To files: a process that the part started cannot hold this one up by keeping a pipe open.
    with (parent / name / "out").open("wb+") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(seconds)
        except BaseException as error:
            process.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        out.seek(0)
        said = out.read().decode("utf-8", "replace")[-4000:]
    try:
        found = json.loads((folder.parent / RESULT).read_text("utf-8"))
    except (OSError, ValueError):
        reason = f"no answer within {seconds:g} s" if code is None else f"the process ended with exit code {code} (0x{code & 0xFFFFFFFF:08X})"  # fmt: skip
        found = {"error": "Ended", "message": reason}
    if name == "spill" and "result" in found:
        found["result"]["files_after_exit"] = sorted(path.name for path in folder.glob("spilled/*"))
        if found["result"]["files_after_exit"]:
            found.update(error="LeftBehind", message="spilled files are left after the process ended")
    shutil.rmtree(parent / name, ignore_errors=True)
    return {"ok": "error" not in found, "seconds": round(time.monotonic() - start, 2), **found, "said": said}


def parse_size(text: str) -> int:
    """Return the bytes of "2GB", "512MiB" or a plain number. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgG]?)(i?)[bB]?", text.strip())
    if not found:
        raise ValueError(text)
    power = " kmg".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def without_home(value: Any) -> Any:
    """Return the value with the user's folder as "~" in all texts: it has the user's name."""
    if isinstance(value, dict):
        return {key: without_home(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_home(one) for one in value]
    return (
        value.replace(str(Path.home()), "~")
        if isinstance(value, str) and len(str(Path.home())) > 1
        else value
    )


def show(line: str, end: str = "\n") -> None:
    """Print a line, with letters that the terminal's code page lacks in escaped form."""
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Try on this machine what Carom does on Windows, and write one JSON file to attach to an issue.",
        epilog="Exit codes: 0 all parts passed, 1 a part failed, 2 bad use.",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("carom-windows-check.json"), metavar="FILE", help="default: ./%(default)s"
    )  # fmt: skip
    parser.add_argument(
        "--size", default="2GB", help="bytes of the largest file and model (default: %(default)s)"
    )
    parser.add_argument(
        "--dir", type=Path, help="a folder on the drive with the models (default: the temporary folder)"
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each part (default: %(default)g)")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        size = parse_size(args.size)
    except ValueError:
        parser.error(f"--size {args.size}: give bytes, as in 2GB or 512MiB")
    if args.part:
        return run_part(args.part[0], Path(args.part[1]), size)
    names = [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    report: dict[str, Any] = {
        "format": FORMAT, "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "size": size, "parts": {},
    }  # fmt: skip
    try:
        parent = Path(tempfile.mkdtemp(prefix="carom-check-", dir=args.dir))
        args.json.write_text("{}", "utf-8")
    except OSError as error:
        parser.error(str(error))
    try:
        for number, name in enumerate(names, 1):
            show(f"{number}/{len(names)} {name}: {(PARTS[name].__doc__ or '').splitlines()[0]} ", end="")
            part = start_part(name, parent, size, args.seconds)
            report["parts"][name] = part
            skipped = part.get("result", {}).get("skipped") if part["ok"] else None
            state = f"skipped ({skipped})" if skipped else "ok" if part["ok"] else f"FAILED: {part['error']}: {part['message']}"  # fmt: skip
            show(f"{state} ({part['seconds']:.0f} s)")
            # After each part: what is known is kept if this is interrupted.
            args.json.write_text(json.dumps(without_home(report), indent=1), "utf-8")
    except KeyboardInterrupt:
        show("interrupted")
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    failed = [name for name in names if not report["parts"].get(name, {}).get("ok")]
    show(f"{args.json}: attach this file to an issue" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
