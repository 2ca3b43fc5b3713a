"""The names that a system lacks: what POSIX has and Windows has not, and the reverse."""

from __future__ import annotations

POSIX_MODULES = frozenset(
    ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "crypt", "spwd", "curses", "readline")
)  # fmt: skip
WINDOWS_MODULES = frozenset(("msvcrt", "winreg", "_winapi", "winsound", "nt"))

# Names in modules of the standard library, as the "Availability" lines of their documentation say.
POSIX_ONLY: dict[str, frozenset[str]] = {
    "os": frozenset((
        "preadv", "pwritev", "pread", "pwrite", "readv", "writev", "fork", "forkpty", "getuid", "geteuid", "getgid", "getegid",
        "getpgid", "setpgid", "setsid", "killpg", "mkfifo", "mknod", "posix_fadvise", "posix_fallocate", "posix_spawn", "sysconf",
        "statvfs", "fstatvfs", "uname", "getloadavg", "memfd_create", "sendfile", "copy_file_range", "splice", "chown", "fchown",
        "lchown", "chroot", "nice", "wait", "wait3", "wait4", "waitid", "sync", "fdatasync", "eventfd", "sched_getaffinity",
        "sched_setaffinity", "sched_yield", "O_DIRECT", "O_CLOEXEC", "O_NOATIME", "O_NONBLOCK", "O_SYNC", "O_DSYNC", "O_TMPFILE",
        "O_PATH", "RWF_NOWAIT", "RWF_HIPRI", "POSIX_FADV_DONTNEED", "POSIX_FADV_WILLNEED", "POSIX_FADV_SEQUENTIAL",
        "POSIX_FADV_RANDOM",
    )),
    "signal": frozenset((
        "SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGSTOP", "SIGCONT", "SIGQUIT", "SIGTSTP",
        "alarm", "setitimer", "pthread_kill", "pthread_sigmask", "sigwait", "siginterrupt", "pause",
    )),
    "mmap": frozenset((
        "MAP_PRIVATE", "MAP_SHARED", "MAP_POPULATE", "MAP_ANONYMOUS", "MAP_ANON", "PROT_READ", "PROT_WRITE", "PROT_EXEC",
        "MADV_WILLNEED", "MADV_SEQUENTIAL", "MADV_RANDOM", "MADV_DONTNEED", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE",
    )),
    "time": frozenset((
        "clock_gettime", "CLOCK_MONOTONIC", "CLOCK_MONOTONIC_RAW", "CLOCK_REALTIME", "pthread_getcpuclockid", "tzset",
    )),
    "socket": frozenset(("AF_UNIX", "SO_REUSEPORT")),
}  # fmt: skip
WINDOWS_ONLY: dict[str, frozenset[str]] = {
    "os": frozenset(("startfile", "add_dll_directory", "O_BINARY", "O_TEMPORARY", "O_NOINHERIT", "O_SEQUENTIAL", "O_RANDOM", "O_SHORT_LIVED")),
    "signal": frozenset(("CTRL_C_EVENT", "CTRL_BREAK_EVENT", "SIGBREAK")),
    "ctypes": frozenset(("windll", "WinDLL", "oledll", "OleDLL", "WinError", "WINFUNCTYPE", "GetLastError", "FormatError")),
    "sys": frozenset(("getwindowsversion", "winver")),
}  # fmt: skip
