"""Every error that a user can cause, as one family with an exit code each.

A message is one line: what arrived, what was expected and what to do. The command line turns any :class:`XpressError` into that line and
its exit code in one place; everything else is a defect and keeps its traceback.
"""

from __future__ import annotations


class XpressError(Exception):
    """Root of the family. ``exit_code`` is what the command line ends with."""

    exit_code = 1


class CheckFailed(XpressError):
    """A check ran and did not pass: parity, a benchmark threshold."""

    exit_code = 1


class UserError(XpressError):
    """What the user gave cannot be used."""

    exit_code = 2


class OptionError(UserError):
    """An option or a generation setting is out of range or contradicts another."""


class CheckpointError(UserError):
    """A target or drafter folder is incomplete, damaged or asks for something that is not supported."""


class PairingError(UserError):
    """Target and drafter do not belong together."""


class BundleError(UserError):
    """A bundle is missing, damaged, foreign or of another format version."""


class PromptError(UserError):
    """A prompt is empty, too long, or cannot be turned into tokens."""


class OutputError(UserError):
    """The output folder cannot be written: it exists, is not writable, or the disk is too small."""


class EnvironmentProblem(XpressError):
    """The machine or the installation lacks something: an extra, a device, a network."""

    exit_code = 3


class MissingExtraError(EnvironmentProblem):
    """A package of an optional extra is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        # Two packages of the same import name would overwrite each other's files.
        apart = " in an environment without onnxruntime" if extra == "gpu" else ""
        super().__init__(f"{package} is not installed; install it with: pip install 'xpress-export[{extra}]'{apart}")
