"""The version of the distribution, and of the formats that it writes."""

from __future__ import annotations

VERSION = "0.1.0"
# Raised when a bundle of this format can no longer be read by an older runtime.
BUNDLE_FORMAT = 1
# The same for the engines of a kind, which are built and replaced on their own.
ENGINES_FORMAT = 1
