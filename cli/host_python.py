"""The Python of a host program, found in its folder."""

from __future__ import annotations

from pathlib import Path

ENVIRONMENTS = ("venv", ".venv", "env")  # "env" is Pinokio's


def host_python(folder: Path) -> list[str] | None:
    """Return how the Python of the host program in ``folder`` is started; None where none is found.

    A portable package has its Python in `python_embeded` (spelt so), in or beside the program's folder. It starts with
    ``-s``, as in the package's own scripts, so that packages in the user's folder are not used.
    """
    for parent in (folder, folder.parent):
        embedded = parent / "python_embeded" / "python.exe"
        if embedded.is_file():
            return [str(embedded), "-s"]
    for name in ENVIRONMENTS:
        for python in (folder / name / "bin" / "python", folder / name / "Scripts" / "python.exe"):
            if python.is_file():
                return [str(python)]
    return None
