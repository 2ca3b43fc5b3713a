"""Fake environments on disk, and a runner that plays the interpreters and pip in them."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HIP_VERSION = "2.12.0+rocm7.14.0"


def load_setup():
    """scripts/rocm_setup.py, loaded by path as `carom doctor` loads it."""
    spec = importlib.util.spec_from_file_location("rocm_setup", ROOT / "scripts" / "rocm_setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = load_setup()
FINDINGS, HOST = sys.modules["rocm_findings"], sys.modules["rocm_host"]
Result = HOST.Result


def hashed(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def record(name: str, version: str, files: dict[str, bytes]) -> tuple[str, str]:
    info = f"{name}-{version}.dist-info"
    rows = [f"{path},{hashed(data)},{len(data)}" for path, data in files.items()]
    return info, "\n".join([*rows, f"{info}/RECORD,,", ""])


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, bytes], tag: str = "py3-none-any"
) -> Path:
    info, rows = record(name, version, files)
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/METADATA", meta)
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", rows)
    return wheel


class Tree:
    """One environment: ``kind`` is "venv", "portable" or "system"; Windows' layout unless ``windows`` is False."""

    def __init__(self, base: Path, kind: str = "venv", windows: bool = True, host: str = "ComfyUI") -> None:
        self.base, self.kind, self.windows = base, kind, windows
        self.comfyui = base / host
        for part in ("custom_nodes", "comfy", "models"):
            (self.comfyui / part).mkdir(parents=True)
        (self.comfyui / "main.py").write_text("")
        if kind == "system":
            self.prefix = base / "Python312"
        else:
            self.prefix = base / "python_embeded" if kind == "portable" else self.comfyui / "venv"
        flat = kind != "venv"
        self.python = self.prefix / (
            ("python.exe" if flat else "Scripts/python.exe") if windows else "bin/python"
        )
        self.site = self.prefix / ("Lib/site-packages" if windows else "lib/python3.12/site-packages")
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.write_bytes(b"")
        self.site.mkdir(parents=True)
        if kind == "portable":
            (self.prefix / "python312._pth").write_text("python312.zip\n.\n")
        self.dev = base / "dev"
        self.dev.mkdir()
        (self.dev / "kfd").write_bytes(b"")
        self.version, self.bits, self.machine = [3, 12, 4], 64, "AMD64" if windows else "x86_64"
        self.root = base / "checkout"
        self.root.mkdir()
        (self.root / "pyproject.toml").write_text("[project]\n")
        (self.root / "requirements.txt").write_text("# what Carom needs\nnumpy>=1.24\nsafetensors>=0.4.3\n")
        (self.root / "__init__.py").write_text("__version__ = '0.1.0'\n")
        self.host_facts: dict = {}
        self.aimdo_name = "aimdo_rocm." + ("dll" if windows else "so")

    def dist(self, name: str, version: str, files: dict[str, bytes]) -> None:
        info, rows = record(name, version, files)
        for path, data in {**files, f"{info}/RECORD": rows.encode()}.items():
            target = self.site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def torch(
        self, version: str = HIP_VERSION, hip: str | None = "7.14.60850", cuda: str | None = None
    ) -> None:
        text = f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\nhip = {hip!r}\n"
        self.dist("torch", version, {"torch/__init__.py": b"boom", "torch/version.py": text.encode()})

    def sdk(self, version: str = "7.14.0") -> None:
        place = "bin/amdhip64_7.dll" if self.windows else "lib/libamdhip64.so.7"
        self.dist("rocm_sdk_core", version, {f"_rocm_sdk_core/{place}": b"hip"})

    def aimdo_files(self) -> dict[str, bytes]:
        return {"comfy_aimdo/control.py": b"#", f"comfy_aimdo/{self.aimdo_name}": b"native"}

    def aimdo(self, version: str = "0.6.0") -> None:
        self.dist("comfy_aimdo", version, self.aimdo_files())

    def needs(self) -> None:
        self.dist("numpy", "2.1.0", {"numpy/__init__.py": b""})
        self.dist("safetensors", "0.5.0", {"safetensors/__init__.py": b""})

    def carom(self) -> None:
        self.dist("carom", "0.1.0", self.carom_files())

    def carom_files(self) -> dict[str, bytes]:
        return {"carom/__init__.py": (self.root / "__init__.py").read_bytes()}

    def bare(self) -> Tree:
        """An AMD environment before Carom."""
        self.torch()
        self.sdk()
        self.needs()
        return self

    def healthy(self) -> Tree:
        self.bare()
        self.aimdo()
        self.carom()
        return self

    def host(self):
        facts = {
            "system": "Windows" if self.windows else "Linux",
            "machine": self.machine,
            "root": self.root,
            "running": self.base / "other" / "python",
            "cwd": self.comfyui,
            "build": 26100 if self.windows else 0,
            "ram": 32 << 30,
            "env": {},
            "dev": self.dev,
        }
        return HOST.Host(**{**facts, **self.host_facts})

    def answer(self) -> dict:
        venv = self.kind == "venv"
        return {
            "executable": str(self.python), "version": self.version, "bits": self.bits, "machine": self.machine,
            "system": "", "prefix": str(self.prefix), "base_prefix": "elsewhere" if venv else str(self.prefix),
            "path": ["", str(self.site)], "scripts": str(self.python.parent), "purelib": str(self.site),
            "managed": False, "conda": False,
        }  # fmt: skip

    def snapshot(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.base)): p.read_bytes() for p in self.base.rglob("*") if p.is_file()}


def events(*steps, last: str = "end") -> str:
    """What a probe writes when all goes well, but for the events given."""
    changed = {e["step"]: e for e in steps}
    names = ["aimdo_init", "torch", "gpu", "tensor", "hip_runtime", "pinned", "carom", "stream",
             "aimdo_device", "vbar", "address_space", "end"]  # fmt: skip
    extra = {
        "gpu": {"name": "AMD Radeon RX 9070 XT", "arch": "gfx1201", "vram_bytes": 16 << 30},
        "hip_runtime": {"loaded": []},
        "vbar": {"kept": True},
        "address_space": {"reservations": 4, "reserved_bytes": 64 << 30},
    }
    lines = []
    for name in names:
        if name != "end":
            lines.append({"step": name, "state": "start"})
        if name == last and last != "end":
            break
        lines.append(changed.get(name) or {"step": name, "state": "ok", **extra.get(name, {})})
    return "noise\n" + "\n".join("@carom " + json.dumps(line) for line in lines) + "\nmore noise\n"


def failed(step: str, kind: str, message: str = "why") -> dict:
    return {"step": step, "state": "fail", "kind": kind, "message": message}


class FakeRunner:
    """Plays the tree's interpreter. ``probe`` and ``pip`` (by verb) replace what it answers."""

    def __init__(self, tree: Tree, probe=None, pip: dict | None = None) -> None:
        self.tree, self.probe, self.pip, self.calls = tree, probe or Result(0, events(), ""), pip or {}, []

    def run(self, argv, timeout, cwd=None):
        self.calls.append(argv)
        if argv[0] != str(self.tree.python):
            return Result(None, "", "", failed_to_start="[WinError 193] not a valid Win32 application")
        if "-c" in argv:
            return Result(0, "\n@carom " + json.dumps(self.tree.answer()) + "\n", "")
        if any(a.endswith("rocm_probe.py") for a in argv):
            return self.probe
        assert argv[1:3] == ["-m", "pip"], argv
        words = [a for a in argv[3:] if a not in ("--disable-pip-version-check", "--no-input")]
        verb = "stage" if "--target" in words else words[0]
        if verb in self.pip:
            return self.pip[verb]
        return getattr(self, "_" + verb.lstrip("-"))(words) or Result(0, "ok", "")

    def _version(self, words):
        return None

    def _wheel(self, words):
        make_wheel(Path(words[words.index("-w") + 1]), "carom", "0.1.0", self.tree.carom_files())

    def _download(self, words):
        tag = "cp39-abi3-win_amd64" if self.tree.windows else "cp39-abi3-manylinux2014_x86_64"
        make_wheel(Path(words[words.index("-d") + 1]), "comfy_aimdo", "0.6.0", self.tree.aimdo_files(), tag)

    def _stage(self, words):
        assert "--no-deps" in words

    def _install(self, words):
        for word in words:
            if word.endswith(".whl"):
                assert "--no-deps" in words, "a wheel's dependencies could bring another torch"
                name, version = Path(word).name.split("-")[:2]
                with zipfile.ZipFile(word) as archive:
                    archive.extractall(self.tree.site)
            elif word.startswith(("numpy", "safetensors")):
                constraint = Path(words[words.index("--constraint") + 1]).read_text()
                assert constraint == f"torch=={HIP_VERSION}\n"
                self.tree.needs()

    def _uninstall(self, words):
        assert "torch" not in words

    def pip_verbs(self) -> list[str]:
        pip = [c for c in self.calls if c[1:3] == ["-m", "pip"]]
        return ["stage" if "--target" in c else c[5] for c in pip]
