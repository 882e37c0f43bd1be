"""What a rebuild replaces: whether the older bundle was built from the same checkpoints, by their identities.

Knows manifests and checkpoints; whether a bundle may be replaced at all is staging's question.
"""

from __future__ import annotations

import logging
from pathlib import Path

from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError

logger = logging.getLogger(__name__)


def compare_with_older(output: Path, target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    """Warn where ``output`` holds a bundle of another target or drafter than these; say so quietly where they are the same."""
    try:
        older = Bundle.open(output, verify=False).manifest
    except BundleError:
        # None there, or one that cannot be read: nothing to compare with.
        return
    for role, checkpoint, origin in (("target", target, older.target.origin), ("drafter", drafter, older.drafter.origin)):
        identity = checkpoint.identity()
        if identity == origin.identity:
            logger.info("the %s is the one of the bundle that is replaced: identity %s", role, identity[:12])
        else:
            logger.warning(
                "the %s is not the one of the bundle that is replaced: identity %s of %s then, %s of %s now",
                role,
                origin.identity[:12],
                origin.source,
                identity[:12],
                checkpoint.location.source,
            )
