"""Errors for inputs that are not a safetensors checkpoint: pickles, other formats, unreadable paths, and
hostile JSON.
"""

from __future__ import annotations

import errno
import json

from ..common.errors import UnsupportedError, WeightsError
from ..common.held_files import why_denied

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def refuse_pickle_name(path: str) -> None:
    """Raise UnsupportedError for a file name with a suffix of pickle checkpoints."""
    if path.lower().endswith(PICKLE_SUFFIXES):
        raise pickle_error(path)


def refuse_other_formats(start: bytes, path: str) -> None:
    """Raise UnsupportedError or WeightsError if a file's first bytes are those of another format."""
    if start[:4] == b"PK\x03\x04" or (
        start[:1] == b"\x80" and 1 < start[1] < 6 and start[2:3] in (b"\x8a", b"}", b"c", b"\x95", b"]")
    ):
        raise pickle_error(path)
    if start[:4] == b"GGUF":
        raise UnsupportedError(
            f"{path}: a GGUF file, and weights= reads safetensors. Load the model with a GGUF library, then stream it "
            "without weights= and with disk=FOLDER, or disk='auto' if the library keeps the file mapped"
        )
    if start.startswith(b"version "):
        raise WeightsError(f"{path}: a Git LFS pointer, not the weights; fetch them with `git lfs pull`")


def pickle_error(path: str) -> UnsupportedError:
    """Return the error for a pickle checkpoint, with a command that converts the file to safetensors."""
    # Double quotes mean the same in bash, cmd and PowerShell, except around what a shell would replace. repr would double
    # the backslashes of Windows.
    plain = path.isprintable() and not set(path) & set('"$`%!')
    argument = f'"{path}"' if plain else repr(path)
    return UnsupportedError(
        f"{path}: a pickle checkpoint. Loading one can run any code, so Carom never opens it. Convert it once, on a "
        'machine you trust it on: python -c "import sys, torch, safetensors.torch as s; w = torch.load(sys.argv[1], '
        "map_location='cpu', weights_only=True); w = w.get('state_dict', w); s.save_file({k: v.clone().contiguous() "
        f"for k, v in w.items() if torch.is_tensor(v)}}, sys.argv[2], {{'format': 'pt'}})\" {argument} model.safetensors"
    )


def unreadable_error(path: str, error: Exception) -> WeightsError:
    """Return the error for a path that the operating system could not open, with advice for the common
    causes.
    """
    number = getattr(error, "errno", None)
    advice = {
        errno.ENOENT: "no such file or folder; check the path",
        errno.EACCES: "no permission to read it; change its permissions or run as its owner",
        errno.EPERM: "no permission to read it; change its permissions or run as its owner",
        errno.ENAMETOOLONG: "the path is too long for this system; move it to a shorter one",
        errno.ELOOP: "its symbolic links go in a circle; name the file they should lead to",
        errno.ENOTDIR: "part of the path is a file, not a folder; check the path",
        errno.EIO: "the drive reports an input/output error; check the drive (dmesg) and copy the file again",
    }.get(number or 0, f"cannot be read: {error}")
    return WeightsError(f"{path[:300]}: {why_denied(error) or advice}")


def parse_strict_json(text: str, where: str) -> dict:
    """Parse a JSON object; raise WeightsError naming ``where`` for repeated keys, deep nesting and integers
    above 20 digits.
    """

    def unique_pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(items)
        if len(found) != len(items):
            raise WeightsError(f"{where}: a key stands twice")
        return found

    def bounded_integer(digits: str) -> int:
        if len(digits) > 20:
            raise ValueError("an integer of more than 20 digits")
        return int(digits)

    try:
        value = json.loads(text, object_pairs_hook=unique_pairs, parse_int=bounded_integer)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where}: not valid JSON ({str(error)[:100]}); download it again") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{where}: not a JSON object")
    return value
