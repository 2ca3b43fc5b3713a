"""A Python process on Linux that looks like Windows' to Carom's code and to its tests: the *Windows shape*.

    python tests/support/windows_shape/run.py [--memory ...] [python's own arguments: -m pytest ..., script.py, -c ...]

What code sees depends on where the code is. Modules below the checkout (and below the folders of
CAROM_WINDOWS_SHAPE_ROOTS) and programs started by their path get *views* of `os`, `sys`, `platform`, `signal`, `mmap`,
`ctypes`, ... when they import them (`views.py`): what Windows lacks is hidden there, `sys.platform` is "win32", and
`ctypes.WinDLL` loads the fakes of `calls.py`. The standard library, torch, numpy and pytest get the real modules, so they
work as on Linux.

For the same code the rules of files are Windows' (`files.py`): a file that is open or mapped, by this process or another
one in the shape, cannot be deleted or renamed; the text encoding is code page 1252. `memory.py` has the machine's memory
and its commit limit.

Child processes started through `subprocess` are in the shape too. Paths stay POSIX paths, and the exit code of
a process that was killed stays that of Linux.

The settings are environment variables, which `run.environment` writes.
"""

from __future__ import annotations


def install() -> None:
    """Bring this process into the shape. Called once, by `start/sitecustomize.py`, before other modules are imported."""
    from . import files, memory, views

    memory.install()
    files.install()
    views.install()
