"""Handling of the destination of `carom pack`: checks before writing, copies of small files, and texts of OS
errors.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat

from ...core.checkpoint.index import Index
from ...core.common.held_files import why_denied
from ...core.common.sizes import format_size
from .journal import PackError

_SIDE_SUFFIXES = (
    ".json", ".txt", ".model", ".md", ".jinja", ".tiktoken", ".yaml", ".yml", ".vocab", ".merges", ".py",
)  # fmt: skip
_SIDE_BYTES = 256 << 20


def file_stem(index: Index) -> str:
    """Return the file name, without suffix, under which transformers or diffusers look for this checkpoint."""
    names = [os.path.basename(index.path), *(os.path.basename(f.path) for f in index.files)]
    return (
        "diffusion_pytorch_model" if any(n.startswith("diffusion_pytorch_model") for n in names) else "model"
    )


def copy_side_files(source: str, folder: str) -> None:
    """Copy configs and tokenizers from the source's folder to ``folder``, so that the packed folder loads
    like the source.

    Existing files are not overwritten, and files of more than 256 MiB are not copied.
    """
    base = source if os.path.isdir(source) else os.path.dirname(os.path.abspath(source))
    if not os.path.isdir(source) and not source.endswith(".json"):
        return  # the source is a single file, and other files in its folder may not belong to the model
    for name in sorted(os.listdir(base)):
        path, copy = os.path.join(base, name), os.path.join(folder, name)
        if not name.endswith(_SIDE_SUFFIXES) or name.endswith(".index.json") or os.path.lexists(copy):
            continue
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode) and found.st_size <= _SIDE_BYTES:
            shutil.copyfile(path, copy)


def check_destination(target: str) -> None:
    """Raise PackError unless ``target`` can be created: nothing exists at that path, and its parent folder
    exists.
    """
    if os.path.lexists(target):
        raise exists_error(target)
    parent = os.path.dirname(target)
    try:
        if not stat.S_ISDIR(os.stat(parent).st_mode):
            raise PackError(f"{parent}: not a folder; choose another destination")
        os.lstat(target)
    except FileNotFoundError:
        if not os.path.isdir(parent):
            raise PackError(f"{parent}: no such folder; create it first") from None
    except (OSError, ValueError) as error:
        raise explain_os_error(error, target, 0) from error


def exists_error(target: str) -> PackError:
    """Return the error that says that ``target`` exists already."""
    return PackError(
        f"{target}: exists already, and nothing is overwritten; move it away or choose another name"
    )


def explain_os_error(error: OSError | ValueError, target: str, needed: int) -> PackError:
    """Return a PackError that describes the operating system's ``error`` and says what to do.

    ``needed``: total bytes that packing writes.
    """
    number = getattr(error, "errno", 0)
    advice = {
        errno.ENOSPC: f"the drive became full; packing needs {format_size(needed)} in all. Free some space and run the "
        "same command again: it goes on where it stopped (the unfinished part is the folder .carom-pack-* beside it)",
        errno.EFBIG: "the file system takes no file that large; pack to a folder with --shard-size 2GiB",
        errno.EROFS: "the file system is read-only; choose another destination",
        errno.EACCES: "no permission to write there; change the folder's permissions or choose another destination",
        errno.EPERM: "no permission to write there; change the folder's permissions or choose another destination",
        errno.ENAMETOOLONG: "the name or path is too long for this file system; choose a shorter one",
    }
    if (denied := why_denied(error)) is not None:
        again = "then run the same command again: it goes on where it stopped"
        return PackError(f"{target[:300]}: {denied}, or choose another destination, {again}")
    if hasattr(errno, "EDQUOT"):
        advice[errno.EDQUOT] = advice[errno.ENOSPC].replace("drive became full", "quota is used up")
    return PackError(f"{target[:300]}: {advice.get(number or 0, f'cannot be written: {error}')}")
