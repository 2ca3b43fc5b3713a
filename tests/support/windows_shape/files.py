"""Windows' rules of files: what is open or mapped stays, text is code page 1252, POSIX's folders are not there.

- CreateFile: Python opens files without FILE_SHARE_DELETE, so DeleteFile and MoveFileEx fail with
  ERROR_SHARING_VIOLATION (32). A file that is mapped and no longer open: ERROR_ACCESS_DENIED (5). MoveFileEx with
  MOVEFILE_REPLACE_EXISTING onto an open file: ERROR_ACCESS_DENIED. Truncating a mapped file: ERROR_USER_MAPPED_FILE
  (1224), which the C runtime gives as EINVAL.
- FILE_FLAG_DELETE_ON_CLOSE (os.O_TEMPORARY): "The file is to be deleted immediately after all of its handles are
  closed". A mapping of Python's `mmap` holds a handle.
- "File Times": "The only guarantee about a file timestamp is that the file time is correctly reflected when the handle
  that makes the change is closed". So the time of a file that is open for deletion and writing changes with each look.
- os.rename does not replace; os.ftruncate writes zeros (the C runtime's _chsize_s); os.symlink needs a privilege.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import functools
import io
import os
import stat
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from .errors import windows_error
from .mapped_memory import posix_path

ERROR_SHARING_VIOLATION, ERROR_ACCESS_DENIED = 32, 5
# The end of a symbolic link's text where the link takes the part of a junction.
JUNCTION = "/."
_MOUNT_POINT = 0xA0000003  # IO_REPARSE_TAG_MOUNT_POINT
ERROR_ALREADY_EXISTS, ERROR_PRIVILEGE_NOT_HELD = 183, 1314
CODE_PAGE = "cp1252"
# Descriptors from here on were opened with FILE_SHARE_DELETE: other processes see it by the number. Those from DELETING
# on were also opened for deletion, so the file can only be opened with FILE_SHARE_DELETE meanwhile.
SHARED, DELETING = 512, 768
_HIDDEN = ("/proc", "/sys", "/dev/shm", "/etc")
# Files that no library maps, so that the deletion of a copied checkout does not read the list of mappings for each.
_NEVER_MAPPED = (".py", ".pyc", ".md", ".json", ".txt", ".toml", ".png", ".yaml", ".yml", ".bat", ".sh")
_STEP = 4096  # bytes that _chsize_s writes at a time

# Flags of os.open that exist on Windows only. Linux uses the numbers of Windows for other flags.
O_FLAGS = {"O_BINARY": 0, "O_TEXT": 0, "O_NOINHERIT": 0, "O_SEQUENTIAL": 0, "O_RANDOM": 0, "O_SHORT_LIVED": 1 << 41, "O_TEMPORARY": 1 << 40}  # fmt: skip
_OURS = (1 << 40) | (1 << 41)

ROOTS: list[str] = []
# Between code in the shape and the functions of `os`.
_BETWEEN = {"pathlib", "shutil", "contextlib", "tempfile", "os", "codecs", "genericpath", "posixpath", "fileinput"}  # fmt: skip
_open_real, _close_real, _write_real = os.open, os.close, os.write
_unlink, _rename, _replace, _symlink = os.unlink, os.rename, os.replace, os.symlink
_delete_on_close: dict[int, tuple[str, int, int]] = {}  # descriptor: path, device, inode
_closed: list[tuple[str, int, int]] = []
_unsettled: set[tuple[int, int]] = (
    set()
)  # device and inode of files whose time of the last write is not settled


@functools.cache
def in_shape(filename: str, main: bool) -> bool:
    """Return whether the code of this file sees Windows. ``main``: it is the program that was started."""
    if not filename or filename.startswith("<"):
        return main
    real = os.path.realpath(filename)
    library = f"{os.sep}site-packages{os.sep}" in real or real.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep + "lib"))  # fmt: skip
    if "windows_shape" + os.sep in real:
        return False
    return not library and (main or any(real.startswith(root) for root in ROOTS))


def sees_windows(names: dict[str, Any] | None) -> bool:
    """Return whether the module with these globals sees Windows."""
    return names is not None and in_shape(
        str(names.get("__file__") or ""), names.get("__name__") == "__main__"
    )


def _called_from_shape() -> bool:
    """Return whether code that sees Windows called the function of `os` or `open` that runs now."""
    frame: Any = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    return frame is not None and sees_windows(frame.f_globals)


# -- who has a file open


def _others() -> list[str]:
    """Return the /proc folders of this process and of the other ones in the shape, as of half a second ago."""
    return ["/proc/self", *_shaped(os.getpid(), int(2 * time.monotonic()))]


@functools.lru_cache(maxsize=1)
def _shaped(own: int, now: int) -> list[str]:
    numbers = (name for name in os.listdir("/proc") if name.isdigit() and int(name) != own)
    return [f"/proc/{name}" for name in numbers if _is_shaped(int(name), _started(name))]


def _started(number: str) -> float:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{number}").st_ctime
    return 0.0


@functools.lru_cache(maxsize=4096)
def _is_shaped(number: int, started: float) -> bool:
    with contextlib.suppress(OSError), _io_open(f"/proc/{number}/environ", "rb") as file:
        return b"CAROM_WINDOWS_SHAPE=1" in file.read()
    return False


def _is_open(status: os.stat_result, shared: bool = False, least: int = 0) -> bool:
    """Return whether a process has the file open without FILE_SHARE_DELETE (or, with ``shared``, at all).

    ``least``: the first descriptor that counts.
    """
    for folder in _others():
        with contextlib.suppress(OSError):
            for number in os.listdir(f"{folder}/fd"):
                if int(number) < least or (not shared and int(number) >= SHARED):
                    continue
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"{folder}/fd/{number}"), status):
                        return True
    return False


def _is_mapped(status: os.stat_result) -> bool:
    inode = f" {status.st_ino} ".encode()
    for folder in _others():
        with contextlib.suppress(OSError), _io_open(f"{folder}/maps", "rb") as maps:
            text = maps.read()
            if inode not in text:
                continue
            for line in text.splitlines():
                fields = line.split(None, 5)
                if len(fields) == 6 and int(fields[4]) == status.st_ino:
                    with contextlib.suppress(OSError):
                        if os.path.samestat(os.stat(os.fsdecode(fields[5])), status):
                            return True
    return False


def _check(path: Any, dir_fd: int | None, seen: Any, replaced: bool = False) -> None:
    """Raise the error of deleting or renaming ``path``, if it is open or mapped. ``seen``: the name for the message."""
    where = path if dir_fd is None else f"/proc/self/fd/{dir_fd}/{os.fsdecode(path)}"
    try:
        status = os.lstat(where)
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        return
    if _is_open(status):
        raise windows_error(ERROR_ACCESS_DENIED if replaced else ERROR_SHARING_VIOLATION, seen)
    if not os.fsdecode(path).endswith(_NEVER_MAPPED) and _is_mapped(status):
        raise windows_error(ERROR_ACCESS_DENIED, seen)


def _by_tempfile() -> bool:
    # `tempfile.TemporaryFile` deletes the file while it is open; on Windows it is another function.
    code = sys._getframe(2).f_code
    return code.co_name == "TemporaryFile" and code.co_filename.endswith("tempfile.py")


def unlink(path: Any, *, dir_fd: int | None = None) -> None:
    if _called_from_shape() and not _by_tempfile():
        _check(path, dir_fd, path)
    _unlink(path, dir_fd=dir_fd)


def rename(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    if _called_from_shape():
        if os.path.lexists(dst):
            raise windows_error(ERROR_ALREADY_EXISTS, src, dst)
        _check_tree(src)
    _rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def replace(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    # Each check looks through all processes of the shape: code that does not see Windows, such as pytest's deletion of
    # old folders, is not held up.
    if _called_from_shape():
        _check_tree(src)
        _check(dst, dst_dir_fd, dst, replaced=True)
        if os.path.isdir(dst):
            raise windows_error(ERROR_ACCESS_DENIED, src, dst)
    _replace(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def _descriptors(folder: str) -> list[tuple[int, str]]:
    """Return the descriptors of a process and the paths of their files."""
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(f"{folder}/fd"):
            with contextlib.suppress(OSError):
                found.append((int(number), os.readlink(f"{folder}/fd/{number}")))
    return found


def _check_tree(src: Any) -> None:
    """A folder in which a file is open cannot be renamed (ERROR_ACCESS_DENIED)."""
    if not os.path.isdir(src) or os.path.islink(src):
        return _check(src, None, src)
    below = os.path.realpath(src) + os.sep
    for folder in _others():
        if any(number < SHARED and path.startswith(below) for number, path in _descriptors(folder)):
            raise windows_error(ERROR_ACCESS_DENIED, src)
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            _io_open(f"{folder}/maps", "rb") as maps,
        ):
            if b" " + os.fsencode(below) in maps.read():
                raise windows_error(ERROR_ACCESS_DENIED, src)
    return None


def symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
    if os.environ.get("CAROM_WINDOWS_SHAPE_SYMLINKS") == "0" and _called_from_shape():
        raise windows_error(ERROR_PRIVILEGE_NOT_HELD, src, dst)
    _symlink(src, dst, target_is_directory, dir_fd=dir_fd)


# -- open files


def open_file(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    path = posix_path(path)
    temporary, kept = bool(flags & O_FLAGS["O_TEMPORARY"]), flags & ~_OURS
    if not temporary and _called_from_shape():
        _check_sharing(path)
    if kept & os.O_TRUNC:
        _check_truncate(path)
    handle = _open_real(path, kept, mode, dir_fd=dir_fd)
    return share(handle, path if temporary else None) if temporary else handle


def share(handle: int, delete: Any = None) -> int:
    """Return the descriptor as one that was opened with FILE_SHARE_DELETE. ``delete``: the path to delete when it closes."""
    import fcntl

    moved = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, SHARED if delete is None else DELETING)
    _close_real(handle)
    if delete is not None:
        status = os.fstat(moved)
        _delete_on_close[moved] = os.path.abspath(os.fspath(delete)), status.st_dev, status.st_ino
        _delete_after_death(_delete_on_close[moved][0], status.st_ino)
        _unsettled.add((status.st_dev, status.st_ino))
    return moved


# A process that reads "inode path" lines and deletes those files when the other end of its input is closed, however that
# happens: Windows closes the handles of a killed process. It is nobody's child, and does not end with a group.
_UNDERTAKER = """
{ while read -r inode path; do set -- "$@" "$inode" "$path"; done
  while [ $# -gt 0 ]; do [ "$(stat -c %i "$2" 2>/dev/null)" = "$1" ] && rm -f "$2"; shift 2; done; } <&3 3<&- &
"""


@functools.cache
def _undertaker(process: int) -> int:
    """Return the descriptor to which files are written that are deleted after the death of this process, ``process``."""
    read, write = os.pipe()
    command = ["sh", "-c", f"exec 3<&0; {_UNDERTAKER}"]
    quiet = subprocess.DEVNULL
    subprocess.run(command, stdin=read, stdout=quiet, stderr=quiet, start_new_session=True, check=True)
    _close_real(read)
    return write


def _delete_after_death(path: str, inode: int) -> None:
    _write_real(_undertaker(os.getpid()), f"{inode} {path}\n".encode())


def close(handle: int) -> None:
    pending = _delete_on_close.pop(handle, None)
    _close_real(handle)
    if pending:
        _unsettled.discard(pending[1:])
        _closed.append(pending)
        delete_closed()


def delete_closed(at_exit: bool = False) -> None:
    """Delete the files that were to be deleted when closed and of which no handle is left."""
    if at_exit:
        _closed.extend(_delete_on_close.values())
        _delete_on_close.clear()
    for pending in list(_closed):
        path, device, inode = pending
        try:
            status = os.stat(path)
        except OSError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != (device, inode):
            _closed.remove(pending)
        elif at_exit or not _is_open(status, shared=True):
            _closed.remove(pending)
            _unlink(path)


def ftruncate(handle: int, length: int) -> None:
    size = os.fstat(handle).st_size
    if length <= size or not _called_from_shape():
        return _ftruncate(handle, length)
    at = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, size, os.SEEK_SET)
    while size < length:
        size += os.write(handle, bytes(min(_STEP, length - size)))
    os.lseek(handle, at, os.SEEK_SET)
    return None


def _check_sharing(path: Any) -> None:
    """Raise the error of opening, without FILE_SHARE_DELETE, a file that is open for deletion ("CreateFileW function")."""
    try:
        status = os.stat(path)
    except OSError:
        return
    if _is_open(status, True, DELETING):
        raise windows_error(ERROR_SHARING_VIOLATION, path)


def _check_truncate(path: Any) -> None:
    with contextlib.suppress(TypeError):
        try:
            status = os.stat(path)
        except OSError:
            return
        if stat.S_ISREG(status.st_mode) and _is_mapped(status):
            raise OSError(errno.EINVAL, "Invalid argument", path)


# -- text


def _encoding(mode: str, encoding: str | None) -> str | None:
    return CODE_PAGE if "b" not in mode and encoding in (None, "locale") else encoding


def open_stream(
    file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
    newline: str | None = None, closefd: bool = True, opener: Any = None,
) -> Any:  # fmt: skip
    if not isinstance(file, int):
        file = posix_path(file)
        if isinstance(mode, str) and "w" in mode:
            _check_truncate(file)
        if _is_hidden(file) and _called_from_shape():
            raise windows_error(3, file)
        if _delete_on_close and _called_from_shape():
            _check_sharing(file)
    if not _utf8() and isinstance(mode, str) and _called_from_shape():
        encoding = _encoding(mode, encoding)
    return _io_open(file, mode, buffering, encoding, errors, newline, closefd, opener)


def _utf8() -> bool:
    """Return whether PYTHONUTF8 or -X utf8 asks for UTF-8. Linux's own choice of it, by the locale, does not count."""
    return os.environ.get("PYTHONUTF8") == "1" or sys._xoptions.get("utf8") in (True, "1")


# Programs of Windows that Carom starts.
_PROGRAMS = {"taskkill": "taskkill.py"}
_Popen = subprocess.Popen.__init__


def popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
    """`subprocess.Popen` as on Windows for code in the shape. The child is in the shape, whatever its environment is."""
    if isinstance(args, (list, tuple)) and args and str(args[0]) in _PROGRAMS:
        args = [
            sys.executable,
            os.path.join(os.path.dirname(__file__), "programs", _PROGRAMS[str(args[0])]),
            *args[1:],
        ]
    if _called_from_shape():
        if options.get("preexec_fn") is not None:
            raise ValueError("preexec_fn is not supported on Windows platforms")
        options.pop("creationflags", None)
        options.pop("startupinfo", None)
        text = options.get("text") or options.get("universal_newlines") or options.get("errors")
        if text and options.get("encoding") is None and not _utf8():
            options["encoding"] = CODE_PAGE
    if options.get("env") is not None:
        options["env"] = surroundings(options["env"])
    _Popen(self, args, *rest, **options)


def surroundings(env: Any) -> dict[str, str]:
    """Return a child's environment with the shape's variables."""
    found = dict(env)
    for name, value in os.environ.items():
        if name.startswith("CAROM_WINDOWS_SHAPE"):
            found.setdefault(name, value)
    start = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start")
    path = [start, *str(found.get("PYTHONPATH", "")).split(os.pathsep)]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(part for part in path if part))
    return found


# -- folders of POSIX


def _is_hidden(path: Any) -> bool:
    """Return whether the path is in a folder that Windows does not have."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    name = os.fspath(path)
    return isinstance(name, str) and name.startswith(_HIDDEN) and f"{name}/".startswith(tuple(f"{folder}/" for folder in _HIDDEN))  # fmt: skip


def _hiding(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(path: Any = ".", *args: Any, **options: Any) -> Any:
        if _is_hidden(path) and _called_from_shape():
            raise windows_error(3, path)
        return function(posix_path(path), *args, **options)

    return call


def keep_write_time(handle: int) -> None:
    """SetFileTime with 0xFFFFFFFF: operations through the handle do not change the time."""
    status = os.fstat(handle)
    _unsettled.discard((status.st_dev, status.st_ino))


def stat_(path: Any, *args: Any, **options: Any) -> Any:
    found = _stat(path, *args, **options)
    if _unsettled and not isinstance(path, int) and (found.st_dev, found.st_ino) in _unsettled:
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 100))
    return found


def _is_junction(path: Any, dir_fd: int | None = None) -> bool:
    try:
        return os.fsdecode(os.readlink(path, dir_fd=dir_fd)).endswith(JUNCTION)
    except OSError:
        return False


def lstat(path: Any, *, dir_fd: int | None = None) -> Any:
    """`os.lstat`: a junction is a folder with a reparse tag, no symbolic link."""
    found = _lstat(path, dir_fd=dir_fd)
    resolving = sys._getframe(1).f_code.co_name in ("_joinrealpath", "realpath", "call")
    if (
        not stat.S_ISLNK(found.st_mode)
        or resolving
        or not _called_from_shape()
        or not _is_junction(path, dir_fd)
    ):
        return found
    fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
    fields["st_mode"] = stat.S_IFDIR | 0o777
    return types.SimpleNamespace(**fields, st_reparse_tag=_MOUNT_POINT)


def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
    """`os.rmdir`: RemoveDirectory deletes a junction, not what it leads to."""
    if _is_junction(path, dir_fd):
        return _unlink(path, dir_fd=dir_fd)
    return _rmdir(path, dir_fd=dir_fd)


_stat, _lstat, _rmdir = os.stat, os.lstat, os.rmdir
_io_open = io.open
_ftruncate = os.ftruncate


def install() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    checkout = os.path.realpath(os.path.join(here, "..", "..", ".."))
    more = os.environ.get("CAROM_WINDOWS_SHAPE_ROOTS", "").split(os.pathsep)
    ROOTS.extend(os.path.realpath(root) + os.sep for root in [checkout, *more] if root)
    # `os.supports_dir_fd` decides whether shutil.rmtree uses the functions that were there before.
    for new, old in ((unlink, os.unlink), (unlink, os.remove)):
        if old in os.supports_dir_fd:
            os.supports_dir_fd.add(new)
    os.unlink = os.remove = unlink  # type: ignore[assignment]
    os.rename, os.replace, os.symlink = rename, replace, symlink  # type: ignore[assignment]
    os.open, os.close, os.ftruncate = open_file, close, ftruncate  # type: ignore[assignment]
    os.supports_dir_fd.add(open_file)
    os.stat, os.lstat, os.rmdir = stat_, lstat, rmdir  # type: ignore[assignment]
    os.supports_dir_fd.update((stat_, lstat, rmdir))
    os.supports_fd.add(stat_)
    os.supports_follow_symlinks.add(stat_)
    for name in ("stat", "lstat", "listdir", "scandir", "access"):
        old = getattr(os, name)
        new = _hiding(old)
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if old in supported:
                supported.add(new)
        setattr(os, name, new)
    builtins.open = io.open = open_stream  # type: ignore[assignment]
    subprocess.Popen.__init__ = popen  # type: ignore[method-assign]
    if not _utf8():
        for stream, how in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace"), (sys.stdin, "strict")):
            if stream is not None and not stream.isatty():
                stream.reconfigure(encoding=CODE_PAGE, errors=how)  # type: ignore[union-attr]
    # The first function that is registered runs last.
    atexit.register(delete_closed, at_exit=True)
