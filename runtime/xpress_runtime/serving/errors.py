"""Why a request has no result."""

from __future__ import annotations

from xpress_runtime.errors import EnvironmentProblem, UserError, XpressError


class QueueFull(UserError):
    """``max_queue`` requests wait, as many as may. ``retry_after``: seconds after which there may be room."""

    def __init__(self, max_queue: int, retry_after: float) -> None:
        super().__init__(f"the queue is full: {max_queue} requests wait; send this one again later")
        self.retry_after = retry_after


class Draining(EnvironmentProblem):
    """The session takes no more requests."""


class RequestCancelled(XpressError):
    """The request was cancelled."""


class RequestTimedOut(XpressError):
    """The request took longer than it may."""


class SessionFailed(EnvironmentProblem):
    """The session's own thread ended; every request that it had is lost."""
