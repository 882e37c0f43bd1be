"""Many requests at once on one bundle: in-flight batching with speculation, in the fixed slots of one plan."""

from xpress_runtime.serving.errors import Draining, QueueFull, RequestCancelled, RequestTimedOut, SessionFailed
from xpress_runtime.serving.observers import Observer, RoundReport
from xpress_runtime.serving.requests import Request, Step, StepToken
from xpress_runtime.serving.session import BatchSession, Limits, Status

__all__ = [
    "BatchSession",
    "Draining",
    "Limits",
    "Observer",
    "QueueFull",
    "Request",
    "RequestCancelled",
    "RequestTimedOut",
    "RoundReport",
    "SessionFailed",
    "Status",
    "Step",
    "StepToken",
]
