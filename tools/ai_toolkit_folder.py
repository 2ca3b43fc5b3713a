"""Installation and removal of the extension folder that loads Carom in an ai-toolkit checkout. Nothing here imports
torch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..core.common.errors import UnsupportedError
from ..core.common.held_files import retry_while_in_use, unlink, write_atomically

NAME = "carom_offload"
_UNFINISHED = ".__init__.*.py"  # a file whose writing was interrupted
MARK = "# Put here by `carom install-ai-toolkit`; `carom install-ai-toolkit DIR --uninstall` takes it away."
# The code catches every exception, because a job must run as without Carom whatever error Carom raises.
TEXT = f"""{MARK}
try:
    from {__package__.rpartition(".")[0]}.toolkit_ext import install
    install()
except Exception as error:
    text = f"WARNING: Carom is not active, ai-toolkit runs as without it ({{type(error).__name__}}: {{error}})"
    print(text.encode("ascii", "backslashreplace").decode())  # the code page of a log may lack letters of a path
"""


def check(folder: Path) -> Path:
    """Return the path of Carom's extension in the ai-toolkit checkout ``folder``.

    Raises ValueError if ``folder`` is not an ai-toolkit checkout.
    """
    missing = [name for name in ("run.py", "toolkit", "extensions") if not (folder / name).exists()]
    if missing:
        raise ValueError(
            f"{folder} is no ai-toolkit: it has no {', '.join(missing)}; name the folder that holds its run.py"
        )
    return folder / "extensions" / NAME


def install(folder: Path) -> Path:
    """Write the extension to the checkout ``folder`` and return the extension's folder. Idempotent.

    Raises ValueError if ``folder`` is not an ai-toolkit checkout, and UnsupportedError if other files are at the
    extension's path.
    """
    place = check(folder)
    _ours(place)
    place.mkdir(exist_ok=True)
    write_atomically(place / "__init__.py", lambda temporary: temporary.write_text(TEXT, encoding="utf-8"))
    return place


def uninstall(folder: Path) -> bool:
    """Remove the extension from the checkout ``folder``; return False if the extension was not installed.

    Raises ValueError if ``folder`` is not an ai-toolkit checkout, and UnsupportedError if other files are at the
    extension's path.
    """
    place = check(folder)
    if not place.exists():
        return False
    _ours(place)
    cache = place / "__pycache__"
    # The file with the mark last: what is left while a program has a file open is still known as Carom's.
    for file in cache.glob("*"):
        unlink(file)
    with contextlib.suppress(FileNotFoundError):
        cache.rmdir()
    for file in [*place.glob(_UNFINISHED), place / "__init__.py"]:
        unlink(file)
    with contextlib.suppress(FileNotFoundError):
        retry_while_in_use(place.rmdir)
    return True


def _ours(place: Path) -> None:
    """Raise UnsupportedError unless `install` created everything at ``place``."""
    if not place.exists() and not place.is_symlink():
        return
    strange = None
    if place.is_symlink() or not place.is_dir():
        strange = place
    else:
        for item in place.iterdir():
            mine = (
                item.name == "__pycache__"
                or item.match(_UNFINISHED)
                or (item.name == "__init__.py" and MARK in item.read_text(encoding="utf-8", errors="replace"))
            )
            if not mine:
                strange = item
    if strange is not None:
        raise UnsupportedError(f"{strange} is not Carom's; move it away first, nothing was changed")
