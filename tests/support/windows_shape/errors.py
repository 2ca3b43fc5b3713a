"""`windows_error`: OSErrors as Python raises them on Windows."""

from __future__ import annotations

import errno

# Code: (errno that Python derives from it, FormatMessage's text). Microsoft, "System Error Codes".
TEXTS = {
    2: (errno.ENOENT, "The system cannot find the file specified"),
    3: (errno.ENOENT, "The system cannot find the path specified"),
    5: (errno.EACCES, "Access is denied"),
    6: (errno.EBADF, "The handle is invalid"),
    32: (errno.EACCES, "The process cannot access the file because it is being used by another process"),
    38: (errno.EINVAL, "Reached the end of the file"),
    87: (errno.EINVAL, "The parameter is incorrect"),
    112: (errno.ENOSPC, "There is not enough space on the disk"),
    126: (errno.ENOENT, "The specified module could not be found"),
    183: (errno.EEXIST, "Cannot create a file when that file already exists"),
    487: (errno.EINVAL, "Attempt to access invalid address"),
    997: (errno.EINVAL, "Overlapped I/O operation is in progress"),
    1224: (
        errno.EINVAL,
        "The requested operation cannot be performed on a file with a user-mapped section open",
    ),
    1314: (errno.EINVAL, "A required privilege is not held by the client"),
    1455: (errno.EINVAL, "The paging file is too small for this operation to complete"),
}


def windows_error(code: int, path: object = None, path2: object = None) -> OSError:
    """Return the OSError (PermissionError, FileNotFoundError, ...) of a Windows error code, with its ``winerror``."""
    number, text = TEXTS.get(code, (errno.EINVAL, f"Windows error {code}"))
    base = type(OSError(number, text))

    def message(self: OSError) -> str:
        names = [repr(name) for name in (self.filename, self.filename2) if name is not None]
        return f"[WinError {code}] {text}" + (f": {' -> '.join(names)}" if names else "")

    kind = type(base.__name__, (base,), {"__str__": message, "__module__": "builtins"})
    error = kind(number, text, path, None, path2) if path is not None else kind(number, text)
    error.winerror = code
    return error
