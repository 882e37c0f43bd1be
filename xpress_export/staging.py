"""Writing a folder so that it is either complete under its name or not there at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from xpress_runtime.errors import OutputError
from xpress_runtime.graph_names import GRAPH_NAME
from xpress_runtime.manifest import MANIFEST_FILE


@dataclass(frozen=True)
class Written:
    """What a command writes into its folder, so that it may replace it: ``files`` match paths in the folder, ``what`` names it.

    ``listing`` is a JSON file and its field that names more of them; ``marked`` says that without it the others are somebody's own.
    """

    files: re.Pattern[str]
    what: str
    listing: tuple[str, str]
    marked: bool = False


_BUNDLE_FILES = re.compile(
    r"bundle\.json|\.bundle\.json\.partial|tokenizer/(tokenizer\.json|settings\.json|chat_template\.jinja)"
    rf"|(graphs/[^/]+/)?(weights\.bin|({GRAPH_NAME})\.onnx)"
    rf"|(engines/[^/]+/)?(engines\.json|({GRAPH_NAME})\.engine)"
)
BUNDLE_OR_GRAPHS = Written(_BUNDLE_FILES, "a bundle or of exported graphs", (MANIFEST_FILE, "files"))
_ANOTHER = "give another --output"


def refuse_existing(output: Path, *, replace: bool, advice: str = _ANOTHER, written: Written = BUNDLE_OR_GRAPHS) -> None:
    """OutputError when ``output`` cannot become a folder; a caller asks early, before minutes of work.

    ``replace`` allows it to be an empty folder, or to hold what is ``written`` already: a folder with anything else in it is never removed.
    ``advice`` is what an error tells the user to do.
    """
    with _disk_errors(output, advice):
        if output.name in ("", ".."):
            raise OutputError(f"'{output}' names no new folder; give --output a name of its own")
        if output.is_symlink():
            raise OutputError(f"{output} is a link; {advice}")
        _nearest_folder(output, advice)
        if not output.exists():
            return
        if not output.is_dir():
            raise OutputError(f"{output} is a file; {advice}")
        foreign = _foreign_file(output, written)
        if not replace:
            hint = ", or --force to replace it" if foreign is None else ""
            raise OutputError(f"{output} exists already; {advice}{hint}")
        if foreign is not None:
            raise OutputError(f"{output} holds {foreign}, which is not part of {written.what}, so it is not replaced; {advice}")


@contextmanager
def staged_folder(
    output: Path, *, needed_bytes: int, replace: bool, advice: str = _ANOTHER, written: Written = BUNDLE_OR_GRAPHS
) -> Iterator[Path]:
    """A fresh folder beside ``output``, renamed to it when the block ends without an exception and removed otherwise, Ctrl-C included.

    ``needed_bytes`` is compared with the free space first. An existing ``output`` is refused, or with ``replace`` exchanged at the end
    (see :func:`refuse_existing`). Raises OutputError.
    """
    refuse_existing(output, replace=replace, advice=advice, written=written)
    parent = output.absolute().parent
    with _disk_errors(output, advice):
        free = shutil.disk_usage(_nearest_folder(output, advice)).free
    if free < needed_bytes:
        raise OutputError(
            f"{output} needs about {needed_bytes / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; make room or {advice}"
        )
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    staging = None
    try:
        with _disk_errors(output, advice):
            parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=parent))
            # mkdtemp makes folders that only their owner may read.
            staging.chmod(0o777 & ~_umask())
            yield staging
            # Once more: something may have been put there in the meantime.
            refuse_existing(output, replace=replace, advice=advice, written=written)
            _exchange(staging, output)
    finally:
        try:
            if staging is not None:
                _remove(staging)
        finally:
            for folder in made:
                # Not empty once the output lies in it.
                with suppress(OSError):
                    folder.rmdir()


def _nearest_folder(output: Path, advice: str) -> Path:
    """The folder nearest to ``output`` that exists; OutputError where something else is in its place."""
    nearest = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not nearest.is_dir():
        raise OutputError(f"{output} cannot be written: {nearest} is not a folder; {advice}")
    return nearest


def _foreign_file(folder: Path, written: Written) -> str | None:
    """A file in ``folder`` that no command which writes this put there."""
    listing, field = written.listing
    is_ours = not written.marked or (folder / listing).is_file()
    try:
        listed = set(json.loads((folder / listing).read_text(encoding="utf-8"))[field])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        # None there, or a damaged one; the usual files are still known by name.
        listed = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_file = path.is_symlink() or not path.is_dir()
        if is_file and name not in listed and not (is_ours and written.files.fullmatch(name)):
            return name
    return None


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        # A second Ctrl-C, from someone who thinks that the first one had no effect.
        shutil.rmtree(folder, ignore_errors=True)
        raise


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
    _remove(retired)


@contextmanager
def _disk_errors(output: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(f"the disk of {output} filled up; nothing was left behind: make room or {advice}") from None
        if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise OutputError(f"{output} cannot be written: {problem.strerror}; {advice}") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
