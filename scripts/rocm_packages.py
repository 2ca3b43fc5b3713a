"""The looking checks of packages and folders: copied libraries, comfy-aimdo, Carom, wheel, ComfyUI, ai-toolkit."""

from __future__ import annotations

import os
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from rocm_checks import (
    AIMDO,
    AIMDO_SPEC,
    Survey,
    check_driver,
    check_environment,
    check_memory,
    check_python,
    check_sdk,
    check_system,
    check_torch,
)
from rocm_env import damaged_files, distributions, owned, read_torch
from rocm_findings import BAD, OK, Finding

ASIDE = ".carom-aside"  # suffix of what --fix renamed
# What older guides had people copy about; harmful since torch brings its own.
COPIED = {
    True: ("amdhip64*.dll", "amd_comgr*.dll", "hiprtc*.dll", "aimdo*.dll"),
    False: ("libamdhip64.so*", "libamd_comgr.so*", "libhiprtc.so*", "aimdo*.so"),
}


def survey(s: Survey) -> list[Finding]:
    """All looking checks, in the order in which the first thing missing decides the exit code.

    What comes later usually follows from what comes earlier. Without an interpreter some are left out.
    """
    found = check_python(s) + check_system(s)
    if s.interp is not None:
        s.torch = read_torch(s.interp.site)
        s.dists = distributions(s.interp.site)
        s.stale = stale_copies(s)
        for check in (
            check_torch,
            check_sdk,
            check_driver,
            check_memory,
            check_stale,
            check_aimdo,
            check_carom,
        ):
            found += check(s)
    return found + check_environment(s) + check_wheel(s) + check_comfyui(s) + check_ai_toolkit(s)


def stale_copies(s: Survey) -> list[Path]:
    """Libraries copied by hand into places that are searched before torch's own."""
    i = s.interp
    assert i is not None
    folders = [i.executable.parent, i.prefix, i.scripts, s.host.root]
    folders += [s.comfyui] if s.comfyui else []
    for site in i.site:
        folders += [site, site / "comfy_aimdo"]
        if any(d.site == site for d in s.dists.get("torch", [])):
            folders.append(site / "torch" / "lib")
    found = []
    for folder in dict.fromkeys(folders):
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            continue
        for path in entries:
            matches = any(fnmatch(path.name.lower(), pattern) for pattern in COPIED[s.host.windows])
            if not matches or ASIDE in path.name or not path.is_file() or owned(path, i.site, s.dists):
                continue
            # A link beside the file it names (libamdhip64.so -> .so.7) is no copy.
            if not (path.is_symlink() and owned(path.resolve(), i.site, s.dists)):
                found.append(path)
    aimdo = s.dists.get("comfy-aimdo", [])
    # Without its RECORD nothing tells comfy-aimdo's own library from a copy: leave that to check_aimdo.
    known = [d for d in aimdo if (d.info / "RECORD").is_file()]
    return [p for p in found if known or p.parent.name != "comfy_aimdo"]


def check_stale(s: Survey) -> list[Finding]:
    if not s.stale:
        return [Finding("copies", OK, "no libraries copied by hand")]
    what = "Libraries copied by hand shadow torch's: {}.".format(", ".join(map(str, s.stale)))
    remedy = "Run again with --fix: they are renamed, not deleted."
    return [
        Finding(
            "copies", BAD, what, remedy, AIMDO.replace("issues", "pull") + "2", "stale_dlls", needs_fix=True
        )
    ]


def check_aimdo(s: Survey) -> list[Finding]:
    found = s.dists.get("comfy-aimdo", [])
    remedy = "An install run (without --check) installs it, or give a wheel with --wheel."
    if not found:
        return [
            Finding("aimdo", BAD, "comfy-aimdo is not installed.", remedy, exit="no_aimdo", repairable=True)
        ]
    dist = found[0]
    library = dist.site / "comfy_aimdo" / s.library
    name = f"comfy-aimdo {dist.version}"
    if len(found) > 1 and found[1].site == dist.site:
        what = f"{name} and {found[1].version} are both recorded: an update was broken off."
        return [Finding("aimdo", BAD, what, remedy, exit="aimdo_damaged", repairable=True)]
    if not library.is_file() or library in s.stale:
        recorded = any(line.endswith(s.library) for line in damaged_files(dist))
        exit_name = "aimdo_damaged" if recorded else "aimdo_no_library"
        what = "{} has no {}{}.".format(
            name, s.library,
            ", though its wheel brought one (a virus scanner?)" if recorded
            else ": it was installed from a wheel for no particular system, or is older than 0.3",
        )  # fmt: skip
        return [Finding("aimdo", BAD, what, remedy, exit=exit_name, repairable=True)]
    bad = damaged_files(dist)
    if bad:
        what = "{}: {} differ from what its wheel brought.".format(name, ", ".join(bad[:4]))
        return [Finding("aimdo", BAD, what, remedy, exit="aimdo_damaged", repairable=True)]
    return [Finding("aimdo", OK, f"{name}, {s.library} as its wheel brought it")]


def check_carom(s: Survey) -> list[Finding]:
    found = s.dists.get("carom", [])
    if not found:
        remedy = "An install run (without --check) builds and installs it from this checkout."
        what = "Carom is not installed in that Python."
        return [Finding("carom", BAD, what, remedy, exit="no_carom", repairable=True)]
    bad = damaged_files(found[0])
    if bad:
        what = "Carom {} is damaged: {}.".format(found[0].version, ", ".join(bad[:4]))
        return [Finding("carom", BAD, what, "An install run repairs it.", exit="no_carom", repairable=True)]
    return [Finding("carom", OK, f"Carom {found[0].version}")]


def check_wheel(s: Survey) -> list[Finding]:
    if s.wheel is None:
        return []
    remedy = f"Get one with: pip download --no-deps {AIMDO_SPEC}"
    problem = wheel_problem(s.wheel, s.host.windows)
    if problem:
        what = f"--wheel {s.wheel}: {problem}."
        return [Finding("wheel", BAD, what, remedy, exit="bad_wheel")]
    return [Finding("wheel", OK, str(s.wheel))]


def wheel_problem(wheel: Path, windows: bool) -> str:
    """Why a file is no comfy-aimdo wheel with a ROCm library for this system; empty if it is one."""
    library = "comfy_aimdo/aimdo_rocm." + ("dll" if windows else "so")
    if not wheel.is_file():
        return "no such file"
    parts = wheel.name.split("-")
    if (
        not wheel.name.startswith("comfy_aimdo-")
        or not wheel.name.endswith(".whl")
        or len(parts) not in (5, 6)
    ):
        return "not named like a comfy-aimdo wheel"
    try:
        with zipfile.ZipFile(str(wheel)) as archive:
            names = set(archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError):
        return "not a readable zip file"
    if library not in names:
        return f"it holds no {library}: a wheel for another system, or older than 0.3"
    return ""


def comfyui_folder(given: Path) -> tuple[Path | None, str]:
    """(ComfyUI's own folder, "") for it or a portable package's folder; (None, why not)."""
    for folder in (given, given / "ComfyUI"):
        if (
            (folder / "main.py").is_file()
            and (folder / "custom_nodes").is_dir()
            and (folder / "comfy").is_dir()
        ):
            return folder, ""
    return None, "no main.py, comfy and custom_nodes in it" if given.is_dir() else "no such folder"


def check_comfyui(s: Survey) -> list[Finding]:
    if s.comfyui is None:
        return []
    folder, why = comfyui_folder(s.comfyui)
    if folder is None:
        remedy = "Name the folder that holds ComfyUI's main.py."
        return [Finding("comfyui", BAD, f"{s.comfyui} is not ComfyUI: {why}.", remedy, exit="bad_folder")]
    state, where = node_state(folder, s.host.root)
    if state == "foreign":
        what = f"{where} exists and is not this checkout."
        return [Finding("comfyui", BAD, what, "Move it away, or run the script in it.", exit="bad_folder")]
    if state == "absent":
        what = f"Carom's node is not in {folder / 'custom_nodes'}."
        return [
            Finding("comfyui", BAD, what, "An install run puts it there.", exit="no_carom", repairable=True)
        ]
    return [Finding("comfyui", OK, f"node in place: {where}")]


COPY_MARK = ".carom-copied-from"


# As `carom install-ai-toolkit` writes it (tools/ai_toolkit_folder.py), which needs a Carom that imports.
EXTENSION = "carom_offload"
EXTENSION_TEXT = """\
# Put here by `carom install-ai-toolkit`; `carom install-ai-toolkit DIR --uninstall` takes it away.
try:
    from PACKAGE.toolkit_ext import install
    install()
except Exception as error:
    print(f"WARNING: Carom is not active, ai-toolkit runs as without it ({type(error).__name__}: {error})")
""".replace("PACKAGE", "carom")


def node_state(folder: Path, root: Path) -> tuple[str, Path]:
    """("inside" | "linked" | "copied" | "absent" | "foreign", path) of Carom's node in ComfyUI."""
    nodes = folder / "custom_nodes"
    target = nodes / "carom"
    try:
        for entry in nodes.iterdir():
            if entry.is_dir() and entry.samefile(root):
                return ("linked" if entry.is_symlink() else "inside"), entry
    except OSError:
        pass
    if not os.path.lexists(str(target)):
        return "absent", target
    return ("copied" if (target / COPY_MARK).is_file() else "foreign"), target


def check_ai_toolkit(s: Survey) -> list[Finding]:
    if s.ai_toolkit is None:
        return []
    missing = [name for name in ("run.py", "toolkit", "extensions") if not (s.ai_toolkit / name).exists()]
    if missing:
        what = "{} is not ai-toolkit: it has no {}.".format(s.ai_toolkit, ", ".join(missing))
        return [Finding("ai-toolkit", BAD, what, "Name the folder that holds run.py.", exit="bad_folder")]
    state, place = extension_state(s.ai_toolkit)
    if state == "foreign":
        what = f"{place} is there already, and is not Carom's."
        return [Finding("ai-toolkit", BAD, what, "Rename or remove that folder.", exit="bad_folder")]
    if state == "absent":
        what = f"Carom's extension is not in {place.parent}."
        remedy = "An install run (without --check) puts it there."
        return [Finding("ai-toolkit", BAD, what, remedy, exit="no_extension", repairable=True)]
    return [Finding("ai-toolkit", OK, f"Carom's extension is in {place}")]


def extension_state(folder: Path) -> tuple[str, Path]:
    """("present" | "old" | "absent" | "foreign", path) of Carom's extension in ai-toolkit."""
    place = folder / "extensions" / EXTENSION
    if not os.path.lexists(str(place)):
        return "absent", place
    try:
        text = (place / "__init__.py").read_text("utf-8")
    except (OSError, ValueError):
        return "foreign", place
    if not text.startswith(EXTENSION_TEXT.splitlines()[0]):
        return "foreign", place
    return ("present" if text == EXTENSION_TEXT else "old"), place
