"""Writing a folder so that it is either complete under its name or not there at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xpress_runtime.errors import OutputError


def refuse_existing(output: Path, *, replace: bool) -> None:
    """OutputError when ``output`` is in the way; a caller asks early, before minutes of work."""
    if output.is_symlink() or (output.exists() and not replace):
        raise OutputError(f"{output} exists already; give another --output, or --force to replace it")
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file, expected a folder to replace")


@contextmanager
def staged_folder(output: Path, *, needed_bytes: int, replace: bool) -> Iterator[Path]:
    """A fresh folder beside ``output``, renamed to it when the block ends without an exception and removed otherwise, Ctrl-C included.

    ``needed_bytes`` is compared with the free space first. An existing ``output`` is refused, or with ``replace`` exchanged at the end.
    Raises OutputError.
    """
    refuse_existing(output, replace=replace)
    parent = output.absolute().parent
    with _disk_errors(output):
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < needed_bytes:
            raise OutputError(
                f"{output} needs about {needed_bytes / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; "
                "make room or give another --output"
            )
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=parent))
    try:
        with _disk_errors(output):
            # mkdtemp makes folders that only their owner may read.
            staging.chmod(0o777 & ~_umask())
            yield staging
            _exchange(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _exchange(staging: Path, output: Path) -> None:
    if not output.exists():
        staging.rename(output)
        return
    retired = staging.with_name(f"{staging.name}.old")
    output.rename(retired)
    try:
        staging.rename(output)
    except BaseException:
        retired.rename(output)
        raise
    shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(f"the disk of {output} filled up; nothing was left behind: make room or give another --output") from None
        if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise OutputError(f"{output} cannot be written: {problem.strerror}; give another --output") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
