"""No file of the package needs POSIX (or Windows) without asking first."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests_lacking import POSIX_MODULES, POSIX_ONLY, WINDOWS_MODULES, WINDOWS_ONLY

# Names by module that only some systems have.
ONLY_SOMEWHERE = {
    module: POSIX_ONLY.get(module, frozenset()) | WINDOWS_ONLY.get(module, frozenset())
    for module in {*POSIX_ONLY, *WINDOWS_ONLY}
}
POSIX_FOLDERS = ("/proc/", "/sys/", "/dev/", "/etc/", "/tmp/")
ASKS = {"hasattr", "getattr"}
ASKED = {"sys.platform", "os.name", "platform.system"}
CATCHES = {
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "Exception",
    "BaseException",
    "OSError",
    "FileNotFoundError",
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def named_after_a_system(name: str) -> bool:
    return any(system in name.lower() for system in ("windows", "posix", "linux"))


class Checker:
    """Findings of one file: uses that exist on one system only, outside any question about the system.

    A question is hasattr, getattr, sys.platform, os.name or platform.system, also through a name it
    was assigned to; in a condition around the use, in one before it that leaves the block, or a try
    that catches what its absence raises. Which branch answers to which system is not judged. A file,
    class or function named after a system (rawio_windows.py, PosixFile) is its own question: whoever
    uses it must ask, and the import test below sees to the rest.
    """

    def __init__(self, source: str, file: str = "") -> None:
        self.tree = ast.parse(source)
        self.file = file
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.modules: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self.modules.update({a.asname or a.name: a.name for a in node.names})
        self.answers: set[str] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, (ast.Assign, ast.AnnAssign))
                and node.value is not None
                and self.asks(node.value)
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.answers |= {dotted(t) for t in targets} - {""}

    def asks(self, test: ast.AST) -> bool:
        for node in ast.walk(test):
            name = dotted(node)
            if (
                name in ASKED
                or name in self.answers
                or (isinstance(node, ast.Call) and dotted(node.func) in ASKS)
            ):
                return True
        return False

    def leaves(self, statement: ast.stmt) -> bool:
        last = statement.body[-1] if isinstance(statement, ast.If) else None
        return (
            isinstance(statement, ast.If)
            and self.asks(statement.test)
            and isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))
        )

    def guarded(self, node: ast.AST) -> bool:
        if named_after_a_system(self.file):
            return True
        while (parent := self.parents.get(node)) is not None:
            if (
                isinstance(parent, (ast.If, ast.IfExp, ast.While))
                and node is not parent.test
                and self.asks(parent.test)
            ):
                return True
            if isinstance(parent, (ast.ClassDef, ast.FunctionDef)) and named_after_a_system(parent.name):
                return True
            values = parent.values if isinstance(parent, ast.BoolOp) and isinstance(node, ast.expr) else []
            if values and any(map(self.asks, values[: values.index(node)])):  # type: ignore[arg-type]
                return True
            if isinstance(parent, ast.Try) and node in parent.body:
                for handler in parent.handlers:
                    caught = (
                        {dotted(n).split(".")[-1] for n in ast.walk(handler.type)}
                        if handler.type
                        else {"Exception"}
                    )
                    if caught & CATCHES:
                        return True
            for block in ("body", "orelse", "finalbody"):
                siblings = getattr(parent, block, None)
                if (
                    isinstance(siblings, list)
                    and node in siblings
                    and any(map(self.leaves, siblings[: siblings.index(node)]))
                ):
                    return True
            node = parent
        return False

    def uses(self) -> Iterator[tuple[ast.AST, str]]:
        foreign = POSIX_MODULES | WINDOWS_MODULES
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, a.name) for a in node.names if a.name.split(".")[0] in foreign)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                if node.module.split(".")[0] in foreign:
                    yield node, node.module
                names = ONLY_SOMEWHERE.get(node.module, set())
                yield from ((node, f"{node.module}.{a.name}") for a in node.names if a.name in names)
            elif isinstance(node, ast.Attribute):
                module = self.modules.get(dotted(node.value), "")
                if node.attr in ONLY_SOMEWHERE.get(module, set()):
                    yield node, f"{module}.{node.attr}"
            elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name, first = dotted(node.func).split(".")[-1], node.args[0].value
                if name in ("get_context", "set_start_method") and first in ("fork", "forkserver"):
                    yield node, f"multiprocessing {first}"
                path = first if name in ("open", "Path", "CDLL") and isinstance(first, str) else ""
                if path.startswith(POSIX_FOLDERS) or (name == "CDLL" and ".so" in path):
                    yield node, path

    def findings(self) -> list[tuple[int, str]]:
        return [(getattr(n, "lineno", 0), what) for n, what in self.uses() if not self.guarded(n)]


def texts_without_encoding(source: str) -> list[int]:
    """Lines that open text in the system's own encoding, which on Windows is not UTF-8."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(k.arg in ("encoding", None) for k in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
        position = {"read_text": 0, "write_text": 1}.get(name)
        if position is not None and len(node.args) <= position:
            lines.append(node.lineno)
        if dotted(node.func) == "open":
            modes = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
            binary = any("b" in str(getattr(m, "value", "b")) for m in modes)
            if not binary and len(node.args) < 4:
                lines.append(node.lineno)
    return lines


def package_files(root: Path) -> list[Path]:
    skip = {"tests", "docs", "build", "dist", "venv", "shared"}
    found = [
        p
        for p in root.rglob("*.py")
        if not any(part in skip or part.startswith((".", "venv")) for part in p.relative_to(root).parts)
    ]
    assert root / "core" / "common" / "errors.py" in found
    return found


def test_no_file_needs_one_system_without_asking(root: Path):
    found = [
        f"{path.relative_to(root)}:{line}: {what}"
        for path in package_files(root)
        for line, what in Checker(path.read_text("utf-8"), path.stem).findings()
    ]
    assert not found, "guard these by hasattr, sys.platform or try:\n" + "\n".join(found)


def test_every_text_is_opened_with_its_encoding(root: Path):
    found = [
        f"{path.relative_to(root)}:{line}"
        for path in package_files(root)
        for line in texts_without_encoding(path.read_text("utf-8"))
    ]
    assert not found, "pass encoding='utf-8':\n" + "\n".join(found)


def test_every_module_imports_where_posix_calls_and_triton_are_absent(root: Path, tmp_path: Path):
    """What an import on Windows would stumble over, found on Linux: the names are taken away first."""
    (tmp_path / "carom").symlink_to(root, target_is_directory=True)
    names = []
    for path in package_files(root):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1].endswith("_triton"):  # kernels: imported only where Triton is
            continue
        if "comfy_api" in path.read_text("utf-8"):  # node classes: imported by ComfyUI alone
            continue
        if (path.parent == root or (path.parent / "__init__.py").is_file()) and parts[-1] != "__main__":
            names.append(".".join(("carom", *[p for p in parts if p != "__init__"])))
    code = f"""
import importlib, sys, os, signal, mmap, time
import torch, numpy, safetensors.torch, psutil, subprocess, multiprocessing, ctypes, tempfile, shutil, concurrent.futures
gone = {[(m, n) for m in ("os", "mmap", "signal") for n in sorted(ONLY_SOMEWHERE[m]) if n not in ("sysconf", "waitpid")]!r}
for module, name in gone:
    if hasattr(sys.modules[module], name): delattr(sys.modules[module], name)
for name in {sorted(POSIX_MODULES)!r} + ["triton"]: sys.modules[name] = None
for name in {sorted(names)!r}: importlib.import_module(name)
print("imported")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.strip().endswith("imported"), done.stderr[-3000:]


FLAGGED = [
    "import fcntl",
    "from resource import getrusage",
    "import os\nos.preadv(1, [], 0)",
    "import os as system\nflags = system.O_DIRECT",
    "from os import pread",
    "import os, signal\nos.kill(1, signal.SIGKILL)",
    "import mmap\nm = mmap.MAP_PRIVATE",
    "import sys\nsys.getwindowsversion()",
    "import ctypes\nctypes.windll.kernel32",
    "import multiprocessing\nmultiprocessing.get_context('fork')",
    "open('/proc/meminfo')",
    "import ctypes\nctypes.CDLL('libc.so.6')",
    "import os\nif os.path.exists('x'):\n    os.fork()",
    "import os\ntry:\n    os.fork()\nexcept KeyError:\n    pass",
    "import os\ntry:\n    pass\nexcept AttributeError:\n    os.fork()",
    "import os\ndef f():\n    os.fork()\n    if not hasattr(os, 'fork'):\n        return",
    "import os\nx = os.fork() and hasattr(os, 'fork')",
]
ALLOWED = [
    "import os\nif hasattr(os, 'preadv'):\n    os.preadv(1, [], 0)",
    "import os\nflags = os.O_DIRECT if hasattr(os, 'O_DIRECT') else 0",
    "import os\nflags = getattr(os, 'O_DIRECT', 0)",
    "import os\nx = hasattr(os, 'fork') and os.fork()",
    "import sys\nif sys.platform != 'win32':\n    import fcntl",
    "try:\n    import resource\nexcept ImportError:\n    resource = None",
    "import os\nWINDOWS = os.name == 'nt'\ndef f():\n    return None if WINDOWS else os.getuid()",
    "import os\ndef f():\n    if not hasattr(os, 'fork'):\n        raise OSError\n    return os.fork()",
    "import platform\nif platform.system() == 'Linux':\n    open('/proc/meminfo')",
    "try:\n    open('/proc/meminfo')\nexcept OSError:\n    pass",
    "import os\nos.open('x', os.O_RDONLY)",
    "from .store import preadv",
    "import os\nclass PosixFile:\n    def read(self):\n        return os.preadv(1, [], 0)",
]


@pytest.mark.parametrize("source", FLAGGED)
def test_the_checker_flags_a_use_without_a_question(source: str):
    assert Checker(source).findings()


@pytest.mark.parametrize("source", ALLOWED)
def test_the_checker_lets_a_guarded_use_pass(source: str):
    assert Checker(source).findings() == []


def test_the_encoding_check_tells_text_from_bytes():
    flagged = ["open('x')", "open('x', 'w')", "p.read_text()", "p.write_text(t)", "open('x', mode='r')"]
    allowed = ["open('x', 'rb')", "open('x', encoding='utf-8')", "p.read_text('utf-8')", "p.write_text(t, 'utf-8')",
               "p.read_text(encoding='utf-8')", "os.open('x', 0)", "open('x', mode)", "open(**how)"]  # fmt: skip
    assert [s for s in flagged if not texts_without_encoding(s)] == []
    assert [s for s in allowed if texts_without_encoding(s)] == []
