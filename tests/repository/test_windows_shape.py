"""The Windows-shaped Python of the tests behaves as Windows does, where Carom's code can tell."""

from __future__ import annotations

import json
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the shape is made on Linux")

PROGRAM = r"""
import ctypes, importlib.util, json, mmap, os, platform, signal, subprocess, sys
from pathlib import Path

folder = Path(sys.argv[1])
seen = {"platform": [sys.platform, os.name, platform.system(), platform.machine()]}
seen["lacking"] = [hasattr(os, "preadv"), hasattr(os, "geteuid"), hasattr(signal, "SIGKILL"), hasattr(mmap, "MADV_HUGEPAGE")]
seen["only Windows'"] = [hasattr(os, "O_BINARY"), hasattr(signal, "CTRL_C_EVENT"), hasattr(ctypes, "WinDLL")]
seen["maps"] = Path("/proc/self/maps").exists()
try:
    import fcntl
except ModuleNotFoundError as error:
    seen["fcntl"] = error.name


def refusal(action, *arguments):
    try:
        action(*arguments)
    except PermissionError as error:
        return error.winerror


(folder / "text").write_text("é")
seen["code page"] = (folder / "text").read_bytes().hex()
with (folder / "text").open() as file:
    seen["open"] = [refusal(os.unlink, folder / "text"), refusal(os.replace, folder / "text", folder / "new")]
    (folder / "new").touch()
    seen["replaced while open"] = refusal(os.replace, folder / "new", folder / "text")
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
seen["mapped"] = refusal((folder / "text").unlink)
mapping.close()
seen["closed"] = refusal((folder / "text").unlink)
try:
    os.rename(folder / "new", folder / "new")
except FileExistsError as error:
    seen["rename"] = error.winerror

temporary = folder / "temporary"
handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TEMPORARY | os.O_BINARY)
os.write(handle, b"abc")
mapping = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
os.close(handle)
seen["temporary"] = [temporary.exists(), mapping.close(), temporary.exists()]
os.open(folder / "at exit", os.O_RDWR | os.O_CREAT | os.O_TEMPORARY)

try:
    mmap.mmap(-1, 65 << 20)
except OSError as error:
    seen["commit limit"] = error.winerror
kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
status = (ctypes.c_uint64 * 8)()
ctypes.c_uint32.from_buffer(status).value = 64
kernel32.GlobalMemoryStatusEx.argtypes = [ctypes.c_void_p]
seen["memory"] = [kernel32.GlobalMemoryStatusEx(ctypes.addressof(status)), status[1] >> 20, status[3] >> 20]

child = [sys.executable, "-c", "import sys; print(sys.platform)"]
seen["child"] = subprocess.run(child, capture_output=True, text=True, env={}).stdout.strip()
# Other people's code has the real modules.
import tempfile
seen["library"] = hasattr(tempfile._os, "preadv")
print(json.dumps(seen))
"""


def test_code_in_the_shape_sees_windows(windows_python, tmp_path):
    done = windows_python("-c", PROGRAM, str(tmp_path), memory="1024,512,2048,64")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("platform") == ["win32", "nt", "Windows", "AMD64"]
    assert seen.pop("memory") == [1, 1024, 2048]
    assert seen == {
        "lacking": [False] * 4, "only Windows'": [True] * 3, "maps": False, "fcntl": "fcntl", "code page": "e9",
        "open": [32, 32], "replaced while open": 5, "mapped": 32, "closed": None, "rename": 183,
        "temporary": [True, None, False], "commit limit": 1455, "child": "win32", "library": True,
    }  # fmt: skip
    assert not (tmp_path / "at exit").exists()


KILLED = """
import os, signal, sys
from pathlib import Path

handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_TEMPORARY)
assert Path(sys.argv[1]).exists()
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_file_that_is_deleted_when_closed_goes_with_a_killed_process(windows_python, tmp_path):
    assert windows_python("-c", KILLED, str(tmp_path / "with space")).returncode
    give_up = time.monotonic() + 10
    while (tmp_path / "with space").exists() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not (tmp_path / "with space").exists()


UNBUFFERED = """
import os, sys
from pathlib import Path
from carom.core.checkpoint.direct_io import aligned_buffer, open_raw

data = os.urandom(10000)
Path(sys.argv[1]).write_bytes(data)
buffer = aligned_buffer(8192)
file = open_raw(sys.argv[1])
assert [file.read_into(buffer, 4096), file.read_into(buffer, 12288), file.direct] == [5904, 0, True]
assert buffer[:5904] == data[4096:]
assert file.read_into(buffer[:512], 4096) == 512 and not file.direct, "unaligned: unbuffered reads are refused"
Path(sys.argv[1]).unlink()  # it was opened for others to delete
file.close()
"""


def test_unbuffered_reads_of_the_shape_follow_the_alignment_rules(windows_python, tmp_path):
    done = windows_python("-c", UNBUFFERED, str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
