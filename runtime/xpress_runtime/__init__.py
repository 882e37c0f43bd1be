"""Torch-free runtime for bundles: speculative decoding with a DFlash drafter and an xPress refiner, on fixed buffers.

from xpress_runtime import Session

with Session.open("bundle/") as session:
    print(session.generate("Explain rainbows.").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpress_runtime.version import VERSION

if TYPE_CHECKING:
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.errors import BundleError, EnvironmentProblem, OptionError, PromptError, UserError, XpressError
    from xpress_runtime.generation import GenerationConfig, GenerationResult, Piece
    from xpress_runtime.session import GenerationStream, Session, WarningThresholds
    from xpress_runtime.stats import GenerationStats

__version__ = VERSION

__all__ = [
    "Bundle",
    "BundleError",
    "EnvironmentProblem",
    "GenerationConfig",
    "GenerationResult",
    "GenerationStats",
    "GenerationStream",
    "OptionError",
    "Piece",
    "PromptError",
    "Session",
    "UserError",
    "WarningThresholds",
    "XpressError",
    "__version__",
]

_HOMES = {
    "Bundle": "bundle",
    "BundleError": "errors",
    "EnvironmentProblem": "errors",
    "GenerationConfig": "generation",
    "GenerationResult": "generation",
    "GenerationStats": "stats",
    "GenerationStream": "session",
    "OptionError": "errors",
    "Piece": "generation",
    "PromptError": "errors",
    "Session": "session",
    "UserError": "errors",
    "WarningThresholds": "session",
    "XpressError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing the package stays cheap for a program that only needs the errors."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'xpress_runtime' has no attribute '{name}'")
    return getattr(importlib.import_module(f"xpress_runtime.{_HOMES[name]}"), name)
