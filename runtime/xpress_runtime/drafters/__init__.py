"""Where a round's drafts come from: a block drafter, an autoregressive one, or the text itself."""

from xpress_runtime.drafters.autoregressive import AutoregressiveDrafter
from xpress_runtime.drafters.base import Drafter
from xpress_runtime.drafters.block import BlockDrafter
from xpress_runtime.drafters.lookup import LookupDrafter

__all__ = ["AutoregressiveDrafter", "BlockDrafter", "Drafter", "LookupDrafter"]
