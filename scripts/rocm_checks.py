"""The looking checks of the machine: interpreter, system, torch, HIP runtime, driver, disk, RAM, variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from rocm_env import Distribution, Interpreter, Torch, numbers
from rocm_findings import BAD, OK, WARN, Finding
from rocm_host import Host, gib, pinned_cap

MIN_PYTHON = (3, 10)  # pyproject's requires-python
MIN_TORCH, MIN_ROCM, DEFAULT_ROCM = (2, 8), (7,), (7, 14)  # comfy-aimdo's README; ComfyUI's default switch
MIN_AIMDO = (0, 3, 0)  # the first release whose wheels hold the ROCm library
AIMDO_SPEC = "comfy-aimdo>=0.6,<0.7"
NEED_DISK, WANT_RAM = 1 << 30, 8 << 30
AIMDO = "https://github.com/Comfy-Org/comfy-aimdo/issues/"
AMD_DOCS = "https://rocm.docs.amd.com/en/latest/"
GUIDE = "docs/amd.md has the commands."


@dataclass
class Survey:
    """What the looking checks share. ``problem`` says why ``interp`` is None."""

    host: Host
    interp: Interpreter | None
    problem: str = ""
    comfyui: Path | None = None
    ai_toolkit: Path | None = None
    wheel: Path | None = None
    torch: Torch | None = None
    dists: dict[str, list[Distribution]] = field(default_factory=dict)
    stale: list[Path] = field(default_factory=list)

    @property
    def library(self) -> str:
        return "aimdo_rocm.dll" if self.host.windows else "aimdo_rocm.so"


def check_python(s: Survey) -> list[Finding]:
    i = s.interp
    if i is None:
        remedy = "Name the Python of ComfyUI or ai-toolkit with --python."
        return [Finding("python", BAD, f"No usable Python: {s.problem}.", remedy, exit="no_python")]
    name = "Python {}, {}".format(".".join(map(str, i.version)), i.executable)
    if i.version < MIN_PYTHON or i.bits != 64:
        what = f"{name} is {i.bits} bit; Carom needs 64 bit and Python 3.10 or newer."
        return [Finding("python", BAD, what, "Make a venv of a newer Python.", exit="platform")]
    found = [Finding("python", OK, "{} ({}{})".format(name, i.how, ", portable" if i.portable else ""))]
    if not i.isolated:
        remedy = "Make one (python -m venv venv) or name the right Python with --python."
        found.append(
            Finding("venv", WARN, "This is the system's own Python, not a virtual environment.", remedy)
        )
    return found


def check_system(s: Survey) -> list[Finding]:
    system, machine = s.host.system, (s.interp.machine if s.interp else s.host.machine)
    name = "{} {}, {}".format(system, s.host.build or "", machine)
    if system not in ("Windows", "Linux") or machine.lower() not in ("amd64", "x86_64"):
        what = f"{name}: ROCm's torch exists for 64-bit Intel/AMD Windows and Linux only."
        return [Finding("system", BAD, what, "Carom itself runs here; see carom doctor.", exit="platform")]
    if s.host.windows and s.host.build < 19041:
        what = f"{name} is too old for AMD's ROCm drivers."
        return [Finding("system", BAD, what, "Update to Windows 11.", exit="platform")]
    if s.host.windows and s.host.build < 22000:
        return [Finding("system", WARN, f"{name} is Windows 10; AMD and comfy-aimdo support Windows 11.")]
    if s.host.wsl:
        link = "https://github.com/ROCm/rocm-systems/issues/10453"
        return [
            Finding("system", WARN, f"{name} under WSL: VBAR allocation is known to fail there.", link=link)
        ]
    return [Finding("system", OK, name)]


def check_torch(s: Survey) -> list[Finding]:
    t = s.torch
    get = "Install AMD's torch first; this script never installs torch. " + GUIDE
    if t is None:
        return [Finding("torch", BAD, "torch is not installed in that Python.", get, AMD_DOCS, "no_torch")]
    if not t.version:
        return [
            Finding(
                "torch",
                BAD,
                f"torch is damaged: no readable version.py in {t.folder}.",
                get,
                exit="no_torch",
            )
        ]
    if not t.hip and (t.cuda or t.xpu or "+cu" in t.version):
        what = "torch {} is a build for {}, not for AMD.".format(
            t.version,
            "NVIDIA CUDA" if not t.xpu else "Intel XPU",
        )
        other = "On such a card this script is not needed: pip install comfy-aimdo and Carom. On AMD: " + get
        return [Finding("torch", BAD, what, other, AMD_DOCS, "torch_cuda")]
    if not t.hip:
        what = f"torch {t.version} is a CPU build: it can use no GPU."
        return [Finding("torch", BAD, what, "Replace it by AMD's build. " + GUIDE, AMD_DOCS, "torch_cpu")]
    if numbers(t.version) < MIN_TORCH or numbers(t.hip) < MIN_ROCM:
        what = f"torch {t.version} for ROCm {t.hip} is too old; 2.8 and ROCm 7 are the least that works."
        return [Finding("torch", BAD, what, "Update it. " + GUIDE, AMD_DOCS, "torch_old")]
    found = [Finding("torch", OK, f"torch {t.version} for ROCm {t.hip}")]
    rocm = numbers(t.version.split("+rocm", 1)[1]) if "+rocm" in t.version else numbers(t.hip)
    if rocm < DEFAULT_ROCM:
        what = "ROCm {}: ComfyUI turns its dynamic VRAM on by itself only from 7.14.".format(
            ".".join(map(str, rocm))
        )
        found.append(Finding("rocm", WARN, what, "Carom does not depend on it."))
    return found


def _hip_files(folder: Path, windows: bool) -> list[Path]:
    try:
        return sorted(folder.glob("amdhip64*.dll" if windows else "libamdhip64.so*"))
    except OSError:
        return []


def runtimes(s: Survey) -> list[Path]:
    """The HIP runtimes that belong to torch: those of the ROCm SDK wheel and of torch itself."""
    windows, found = s.host.windows, []
    for site in s.interp.site if s.interp else ():
        for folder in sorted(site.glob("_rocm_sdk_*")):
            found += _hip_files(folder / ("bin" if windows else "lib"), windows)
    if s.torch:
        # A copy in torch/lib that torch's wheel did not bring is not torch's.
        found += [p for p in _hip_files(s.torch.folder / "lib", windows) if p not in s.stale]
    return found


def check_sdk(s: Survey) -> list[Finding]:
    if s.torch is None or not s.torch.hip or s.interp is None:
        return []
    found = runtimes(s)
    if (
        not found
        and not s.host.windows
        and any(Path(p).is_dir() for p in ("/opt/rocm/lib", "/usr/lib64/rocm"))
    ):
        return [Finding("runtime", WARN, "torch brings no HIP runtime; the system's ROCm will be used.")]
    if not found:
        where = "_rocm_sdk_core" + ("\\bin" if s.host.windows else "/lib")
        what = f"The HIP runtime is missing: nothing like amdhip64 in {where}."
        return [
            Finding("runtime", BAD, what, "Reinstall rocm-sdk-core with torch. " + GUIDE, AMD_DOCS, "no_sdk")
        ]
    result = [Finding("runtime", OK, f"HIP runtime {found[0]}")]
    core = s.dists.get("rocm-sdk-core", [])
    if core and "+rocm" in s.torch.version:
        built = s.torch.version.split("+rocm", 1)[1]
        if numbers(core[0].version)[:2] != numbers(built)[:2]:
            what = f"rocm-sdk-core is {core[0].version}, torch was built for {built}."
            result.append(Finding("runtime", WARN, what, "Install both from one index, in one command."))
    others = _others_on_path(s)
    if others:
        what = "Other HIP runtimes on this system: {}.".format(", ".join(map(str, others[:3])))
        result.append(
            Finding(
                "runtimes", WARN, what, "Ordinary after a driver install; the proof tells which is loaded."
            )
        )
    return result


def _others_on_path(s: Survey) -> list[Path]:
    separator = ";" if s.host.windows else ":"
    variable = "PATH" if s.host.windows else "LD_LIBRARY_PATH"
    folders = [Path(p.strip('"')) for p in s.host.env.get(variable, "").split(separator) if p.strip('" ')]
    if s.host.windows and s.host.env.get("SystemRoot"):
        folders.append(Path(s.host.env["SystemRoot"]) / "System32")
    mine = {p.parent for p in runtimes(s)}
    return [f for d in dict.fromkeys(folders) if d not in mine for f in _hip_files(d, s.host.windows)[:1]]


def check_driver(s: Survey) -> list[Finding]:
    """Linux: the compute device of the kernel driver. Windows has no file to look at; the proof asks torch."""
    if s.host.windows or s.host.wsl or s.torch is None or not s.torch.hip:
        return []
    kfd = s.host.dev / "kfd"
    if not kfd.exists():
        remedy = "Load the amdgpu driver; in a container pass --device=/dev/kfd --device=/dev/dri."
        return [
            Finding("driver", BAD, f"No AMD compute device: {kfd} does not exist.", remedy, exit="driver")
        ]
    if not os.access(str(kfd), os.R_OK | os.W_OK):
        remedy = "sudo usermod -aG render,video $USER, then log in again."
        return [Finding("driver", BAD, f"{kfd} may not be opened by this user.", remedy, exit="driver")]
    return [Finding("driver", OK, str(kfd))]


def check_memory(s: Survey) -> list[Finding]:
    assert s.interp is not None
    free = s.host.free_disk(s.interp.purelib)
    found = []
    if free is not None and free < NEED_DISK:
        what = f"Only {gib(free)} free where packages are installed; 1 GiB is needed."
        found.append(Finding("disk", BAD, what, "Make room on that drive.", exit="no_space"))
    else:
        found.append(Finding("disk", OK, f"{gib(free)} free"))
    what = f"{gib(s.host.ram)} of RAM, of which Carom pins at most {gib(pinned_cap(s.host))}"
    if s.host.ram is not None and s.host.ram < WANT_RAM:
        found.append(Finding("ram", WARN, what, "Little: models larger than that stream from disk."))
    else:
        found.append(Finding("ram", OK, what))
    return found


def check_environment(s: Survey) -> list[Finding]:
    """Variables that turn the GPU or the native pool off without a word."""
    found = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in s.host.env.get(name, "").replace(" ", "").lower():
            what = f"{name} turns expandable_segments on: comfy-aimdo cannot see such allocations."
            found.append(
                Finding("variables", WARN, what, "Unset it; until then Carom uses its portable pool.")
            )
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if s.host.env.get(name, "0").strip() in ("", "-1"):
            found.append(Finding("variables", WARN, f"{name} hides every GPU.", "Unset it."))
    for name in ("PYTHONHOME", "PYTHONPATH"):
        if s.host.env.get(name):
            found.append(Finding("variables", WARN, f"{name} is set and may mix two Pythons.", "Unset it."))
    return found
