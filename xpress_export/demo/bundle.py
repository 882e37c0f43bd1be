"""The demo's bundle: built once per version of the code that builds it, then found again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import xpress_export
from xpress_export.demo.target import demo_drafter
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError
from xpress_runtime.version import VERSION

if TYPE_CHECKING:
    from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint

DEMO_CAPACITY = 1024
# Two passes bring nearly all that four do, for half of the time.
DEMO_NUM_PASSES = (2, 4, 1)
_BUILDERS = ("models", "graphs", "checkpoints", "build.py", "graph_set.py", "options.py")


def demo_bundle_folder(cache: Path) -> Path:
    """Where the bundle of this version of the building code lies in ``cache``."""
    return cache / f"demo-bundle-{VERSION}-{_code_digest()[:12]}"


def find_demo_bundle(folder: Path) -> Bundle | None:
    """The bundle in ``folder`` if it is whole; a damaged one counts as missing."""
    try:
        return Bundle.open(folder)
    except BundleError:
        return None


def open_demo_checkpoints(target: Path) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    """A downloaded target and the packaged drafter."""
    from xpress_export.checkpoints import open_pair

    return open_pair(str(target), str(demo_drafter()))


def build_demo_bundle(target: TargetCheckpoint, drafter: DrafterCheckpoint, folder: Path, report: Callable[[str], None]) -> Bundle:
    """Build the demo's bundle; replaces what lies in ``folder``."""
    from xpress_export.build import build_bundle
    from xpress_export.options import resolve_options

    options = resolve_options(target, drafter, num_passes=DEMO_NUM_PASSES, capacity=DEMO_CAPACITY)
    return build_bundle(target, drafter, folder, options, replace=True, report=report)


def _code_digest() -> str:
    package = Path(xpress_export.__file__).parent
    files = sorted(path for name in _BUILDERS for path in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py")))
    digest = hashlib.sha256()
    for path in [*files, *sorted(path for path in demo_drafter().iterdir() if path.suffix in (".json", ".safetensors"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()
