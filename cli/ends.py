"""How both programs start and end: one line and an exit status for every failure of terminal, pipes or signals.

Other programs that import `refitd_cli` or call its commands are not affected.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from types import FrameType

EXIT_INTERRUPTED = 130  # a shell's exit status for a process ended by SIGINT
MODULES = {"refitd_cli.control": "refitctl", "refitd_cli.daemon": "refitd"}
_PROGRAMS = tuple(MODULES.values())
_OWNER = 0o700


def program() -> str:
    """Return which of the two programs this process runs, "" for any other."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    if name in _PROGRAMS:
        return name
    given = sys.orig_argv
    with contextlib.suppress(ValueError, IndexError):
        return MODULES.get(given[given.index("-m", 1) + 1], "")
    return ""


def begin() -> bool:
    """Repair descriptors, signals and the umask inherited from the caller, to prevent tracebacks.

    Return whether this process is one of the two programs; if not, it is not changed.
    """
    if not program():
        return False
    for fd in range(3):  # the next opened file or socket would get the number of a closed one
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  it stays open
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED or -u: the rest of a short write (a full disk, a pipe) would be lost without an error
        fd, encoding, errors = sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.errors
        sys.stdout = open(fd, "w", 1, encoding, errors, closefd=False)  # noqa: SIM115  it stays open
    os.umask(os.umask(0o077) & ~_OWNER)  # a umask under which a program can open its own files
    quiet()
    return True


def quiet() -> None:
    """Make Ctrl-C end the program immediately with one line: during imports, and after its work."""
    if program():
        signal.signal(signal.SIGINT, _interrupted)
        # The interpreter notes a KeyboardInterrupt that leaves an exec() of text, as every dataclass calls it, and ends
        # by SIGINT at the end of the program, even if the exception was handled; the next exec() resets that.
        exec("")


def _interrupted(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{program()}: interrupted\n".encode())
    os._exit(EXIT_INTERRUPTED)


def loud() -> None:
    """Make Ctrl-C raise KeyboardInterrupt: commands can then clean up."""
    if program():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def why(error: OSError) -> str:
    """Return the text of a system error that ends a command."""
    text = error.strerror or str(error)
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}{text}; raise `ulimit -n`"
    if not where and error.errno == errno.EPIPE:
        return "the reader of its output has ended"
    if not where and error.errno in (errno.EAGAIN, errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG, errno.EDQUOT):
        return f"its output cannot be written: {text}"
    return f"{where}{text}"


def drop_output() -> None:
    """Discard further output to stdout, which has failed already."""
    if program():
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)
