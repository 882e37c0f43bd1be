"""The lock beside a file of results: an empty file, ``OUT.lock``, that one process at a time holds and the last one removes.

The system lets go of it when the process ends, however that is; what stays then is an empty file, which the next run takes. Whatever else
has that name is somebody's own, so it is refused and stays as it is.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from xpress_runtime.errors import EnvironmentProblem, OptionError, OutputError


def lock_path(results: Path) -> Path:
    """Where the lock of a file of results lies: beside the file itself, so that all links to it share one."""
    real = Path(os.path.realpath(results))
    return real.parent / f"{real.name}.lock"


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, hard links among them, or will once it is made."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return one.samefile(other)
    except OSError:
        # One of them is not there.
        return False


class Lock:
    """The lock of ``guarded``, held until :meth:`release`.

    OptionError where another run holds it; OutputError where something else has its name, or where there is no locking; OSError.
    """

    def __init__(self, guarded: Path) -> None:
        try:
            import fcntl
        except ImportError:
            raise EnvironmentProblem("batch needs file locks of POSIX, which this system does not have") from None
        self.path = lock_path(guarded)
        while True:
            # Before it is opened: a pipe would wait, and a link would be followed to where the lock is to be made.
            self._refuse_foreign(guarded)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who held it before may have removed the file between the two calls, and others may have made another one.
                self._refuse_foreign(guarded)
                if self._is_in_place():
                    return
            except BlockingIOError:
                os.close(self._descriptor)
                raise OptionError(f"{guarded} is being written by another run; wait for it, or give another file") from None
            except OSError as problem:
                os.close(self._descriptor)
                raise OutputError(f"{guarded} cannot be locked: {problem.strerror}; give a place on another disk") from None
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)

    def release(self) -> None:
        """Let go of it and remove the file, unless it is no longer the lock."""
        if self._is_in_place() and not os.fstat(self._descriptor).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.lstat())
        except FileNotFoundError:
            return False

    def _refuse_foreign(self, guarded: Path) -> None:
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISREG(status.st_mode) and not status.st_size:
            return
        if stat.S_ISDIR(status.st_mode):
            kind = "a folder"
        elif stat.S_ISLNK(status.st_mode):
            kind = "a link"
        else:
            kind = f"a file of {status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "no regular file"
        raise OutputError(f"{self.path} is {kind}, and the lock of {guarded.name} goes there; move it away, or give results another name")
