"""Finds the Python to set up, and reads its packages from disk without importing any of them."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rocm_host import Host, Result, Runner

MARK = "@carom "
QUERY = (
    "import json,os,platform,struct,sys,sysconfig;"
    "p=sysconfig.get_paths();"
    "print('\\n" + MARK + "'+json.dumps(dict(executable=sys.executable,version=list(sys.version_info[:3]),"
    "bits=struct.calcsize('P')*8,machine=platform.machine(),system=platform.system(),prefix=sys.prefix,"
    "base_prefix=sys.base_prefix,path=sys.path,scripts=p['scripts'],purelib=p['purelib'],"
    "managed=os.path.exists(os.path.join(p['stdlib'],'EXTERNALLY-MANAGED')),"
    "conda=os.path.isdir(os.path.join(sys.prefix,'conda-meta')))))"
)


@dataclass(frozen=True)
class Interpreter:
    """The Python that is set up. ``site``: its package folders, in import order."""

    executable: Path
    how: str
    version: tuple[int, ...]
    bits: int
    machine: str
    system: str
    prefix: Path
    base_prefix: Path
    site: tuple[Path, ...]
    scripts: Path
    purelib: Path
    managed: bool
    conda: bool = False

    @property
    def portable(self) -> bool:
        """An embeddable Python: a ._pth file beside it fixes its search path."""
        return any(self.executable.parent.glob("python*._pth"))

    @property
    def isolated(self) -> bool:
        """Its own environment: venv, conda or portable; not the system's Python."""
        return self.prefix != self.base_prefix or self.conda or self.portable


@dataclass(frozen=True)
class Torch:
    """What torch/version.py says. ``hip``/``cuda`` are version strings or None."""

    folder: Path
    version: str
    hip: str | None
    cuda: str | None
    xpu: str | None = None


@dataclass(frozen=True)
class Distribution:
    name: str
    version: str
    info: Path

    @property
    def site(self) -> Path:
        return self.info.parent


def python_in(folder: Path, host: Host) -> Path | None:
    """The interpreter of an environment folder, or None."""
    names = ["Scripts/python.exe", "python.exe"] if host.windows else ["bin/python", "bin/python3"]
    return next((folder / n for n in names if (folder / n).is_file()), None)


def _environments(folder: Path) -> list[Path]:
    """Where the hosts keep their Python, seen from the host program's folder."""
    return [
        folder / "venv",
        folder / ".venv",
        folder / "env",
        folder / "python_embeded",  # spelt so by ComfyUI's portable package
        folder.parent / "python_embeded",
        folder.parent / "venv",
        folder.parent / ".venv",
    ]


def host_folders(host: Host) -> list[Path]:
    """Host programs the checkout may lie in, and the folder the user stands in."""
    root = host.root
    inside = [root.parent.parent] if root.parent.name in ("custom_nodes", "extensions") else []
    return [*inside, root.parent, host.cwd]


def find_python(host: Host, named: str | None, folders: list[Path]) -> tuple[Path | None, str]:
    """(interpreter, how it was found); (None, why not).

    ``named`` is --python; ``folders`` those of --comfyui and --ai-toolkit. Then the active venv, the
    running Python if it is a venv's or portable, and without ``folders`` the places around the checkout.
    """
    if named:
        path = Path(named)
        if path.is_dir():
            inside = python_in(path, host)
            return (inside, "--python") if inside else (None, f"--python {path} holds no Python")
        return (path, "--python") if path.is_file() else (None, f"--python {path} does not exist")
    found = _first(folders, host) or _active("VIRTUAL_ENV", host)
    if found:
        return found
    if host.isolated:
        return host.running, "the Python this script runs on"
    # conda activates its base by itself, so it says less than an environment beside the checkout.
    found = (None if folders else _first(host_folders(host), host)) or _active("CONDA_PREFIX", host)
    if found:
        return found
    if folders:
        return None, f"no venv, .venv or python_embeded in or beside {folders[0]}"
    return host.running, "the Python this script runs on"


def _first(folders: list[Path], host: Host) -> tuple[Path, str] | None:
    for env in (e for folder in folders for e in _environments(folder)):
        found = python_in(env, host)
        if found:
            return found, f"found in {env}"
    return None


def _active(variable: str, host: Host) -> tuple[Path, str] | None:
    found = python_in(Path(host.env[variable]), host) if host.env.get(variable) else None
    return (found, f"the active environment ({variable})") if found else None


def ask(executable: Path, how: str, runner: Runner, timeout: float = 60) -> tuple[Interpreter | None, Result]:
    """Ask an interpreter about itself, in a child; None if it does not answer sensibly."""
    result = runner.run([str(executable), "-B", "-c", QUERY], timeout)
    line = next((x for x in reversed(result.out.splitlines()) if x.startswith(MARK)), "")
    try:
        told = json.loads(line[len(MARK) :])
        sites = [Path(p) for p in told["path"] if p and Path(p).is_dir()]
        purelib = Path(told["purelib"])
        if purelib.is_dir() and purelib not in sites:
            sites.append(purelib)
        return (
            Interpreter(
                executable=executable,  # not sys.executable: through a venv's link it stays the venv's
                how=how,
                version=tuple(int(n) for n in told["version"]),
                bits=int(told["bits"]),
                machine=str(told["machine"]),
                system=str(told["system"]),
                prefix=Path(told["prefix"]),
                base_prefix=Path(told["base_prefix"]),
                site=tuple(sites),
                scripts=Path(told["scripts"]),
                purelib=purelib,
                managed=bool(told["managed"]),
                conda=bool(told.get("conda")),
            ),
            result,
        )
    except (ValueError, KeyError, TypeError, OSError):
        return None, result


def read_torch(site: tuple[Path, ...]) -> Torch | None:
    """torch/version.py, parsed and never run. None: no torch. Empty version: unreadable."""
    for folder in site:
        package = folder / "torch"
        if not (package / "__init__.py").is_file() and not (package / "version.py").is_file():
            continue
        values: dict[str, str | None] = {}
        try:
            text = (package / "version.py").read_text("utf-8", "replace")[: 1 << 16]
            for node in ast.parse(text).body:
                targets = node.targets if isinstance(node, ast.Assign) else []
                if isinstance(node, ast.AnnAssign):
                    targets = [node.target]
                value = getattr(node, "value", None)
                if isinstance(value, ast.Constant) and isinstance(value.value, (str, type(None))):
                    values.update({t.id: value.value for t in targets if isinstance(t, ast.Name)})
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return Torch(package, "", None, None)
        hip = values.get("hip") or values.get("rocm")
        version = values.get("__version__") or ""
        if not hip and "+rocm" in version:  # some nightlies leave hip unset
            hip = version.split("+rocm", 1)[1]
        return Torch(package, version, hip, values.get("cuda"), values.get("xpu"))
    return None


def numbers(version: str) -> tuple[int, ...]:
    """(2, 10, 0) of "2.10.0a1+rocm7.13": the leading release numbers, compared as integers."""
    match = re.match(r"\s*v?(\d{1,9}(?:\.\d{1,9}){0,5})", version or "")
    return tuple(int(n) for n in match[1].split(".")) if match else ()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(site: tuple[Path, ...]) -> dict[str, list[Distribution]]:
    """Installed distributions by normalised name, in import order; two of one name are a broken install."""
    found: dict[str, list[Distribution]] = {}
    for folder in site:
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            continue
        for info in entries:
            if info.name.endswith(".dist-info") and "-" in info.name:
                name, version = info.name[: -len(".dist-info")].split("-", 1)
                found.setdefault(normal(name), []).append(Distribution(normal(name), version, info))
    return found


def record_rows(dist: Distribution) -> Iterator[tuple[str, str, str]]:
    """(path relative to the package folder, hash, size) of each line of RECORD."""
    try:
        with open(str(dist.info / "RECORD"), encoding="utf-8", errors="replace", newline="") as file:
            for row in csv.reader(file):
                if len(row) == 3:
                    yield row[0].replace("\\", "/"), row[1], row[2]
    except (OSError, csv.Error):
        return


def digest(path: Path) -> str:
    """The file's hash as RECORD writes it."""
    total = hashlib.sha256()
    with open(str(path), "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            total.update(block)
    return "sha256=" + base64.urlsafe_b64encode(total.digest()).rstrip(b"=").decode()


def damaged_files(dist: Distribution) -> list[str]:
    """Files of the distribution that are absent or differ from RECORD; ["RECORD"] if it has none."""
    rows = list(record_rows(dist))
    if not rows:
        return ["RECORD"]
    bad = []
    for name, expected, _ in rows:
        if not expected.startswith("sha256=") or ".." in name.split("/"):
            continue
        path = dist.site / name
        try:
            if digest(path) != expected:
                bad.append(name)
        except OSError:
            bad.append(name)
    return bad


def owned(path: Path, site: tuple[Path, ...], dists: dict[str, list[Distribution]]) -> bool:
    """Whether some installed distribution brought this file."""
    for folder in site:
        try:
            wanted = os.path.relpath(str(path), str(folder)).replace("\\", "/").lower()
        except ValueError:  # another drive
            continue
        for dist in (d for group in dists.values() for d in group if d.site == folder):
            if any(name.lower() == wanted for name, _, _ in record_rows(dist)):
                return True
    return False
