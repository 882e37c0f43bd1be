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
    from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint

DEMO_CAPACITY = 1024
# Two passes bring nearly all that four do, for half of the time.
DEMO_NUM_PASSES = (2, 4, 1)
# The autoregressive drafter: the target's first layers with its final norm and head, without any training. It agrees with the target on one
# token in 40 (the first 10 layers on one in 22, 22 of the 30 on one in 4), so the cheapest is the best of a bad lot.
DEMO_DRAFT_LAYERS = tuple(range(4))
_BUILDERS = ("models", "graphs", "checkpoints", "build.py", "graph_set.py", "options.py", "demo/bundle.py")


def demo_bundle_folder(cache: Path) -> Path:
    """Where the bundle of this version of the building code lies in ``cache``."""
    return cache / f"demo-bundle-{VERSION}-{_code_digest()[:12]}"


def find_demo_bundle(folder: Path) -> Bundle | None:
    """The bundle in ``folder`` if it is whole; a damaged one counts as missing."""
    try:
        return Bundle.open(folder)
    except BundleError:
        return None


def open_demo_checkpoints(target: Path) -> tuple[TargetCheckpoint, DrafterCheckpoint, DraftModelCheckpoint]:
    """A downloaded target, the packaged drafter, and the draft model made of the target's layers."""
    from xpress_export.checkpoints import open_draft_model, open_pair

    opened, drafter = open_pair(str(target), str(demo_drafter()))
    return opened, drafter, open_draft_model(None, None, DEMO_DRAFT_LAYERS, opened)


def build_demo_bundle(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, draft_model: DraftModelCheckpoint, folder: Path, report: Callable[[str], None]
) -> Bundle:
    """Build the demo's bundle; replaces what lies in ``folder``."""
    from xpress_export.build import build_bundle
    from xpress_export.options import resolve_options

    options = resolve_options(target, drafter, num_passes=DEMO_NUM_PASSES, capacity=DEMO_CAPACITY)
    return build_bundle(target, drafter, folder, options, draft_model=draft_model, replace=True, report=report)


def _code_digest() -> str:
    package = Path(xpress_export.__file__).parent
    files = sorted(path for name in _BUILDERS for path in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py")))
    digest = hashlib.sha256()
    for path in [*files, *sorted(path for path in demo_drafter().iterdir() if path.suffix in (".json", ".safetensors"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()
