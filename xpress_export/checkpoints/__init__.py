"""Published checkpoint formats, read into one description and named tensors."""

from xpress_export.checkpoints.draft_model import DraftModelCheckpoint, open_draft_model
from xpress_export.checkpoints.drafter import DrafterCheckpoint, open_drafter
from xpress_export.checkpoints.locate import Location, locate
from xpress_export.checkpoints.pairing import check_pairing, open_pair
from xpress_export.checkpoints.target import TargetCheckpoint, open_target

__all__ = [
    "DraftModelCheckpoint",
    "DrafterCheckpoint",
    "Location",
    "TargetCheckpoint",
    "check_pairing",
    "locate",
    "open_draft_model",
    "open_drafter",
    "open_pair",
    "open_target",
]
