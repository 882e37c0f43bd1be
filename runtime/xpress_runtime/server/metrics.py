"""What a server counts, for Prometheus: requests, tokens, acceptance, and where the time goes.

Listens to the session on its thread, and asks it how it is when somebody reads. Every application has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xpress_runtime.serving import BatchSession, Request, RoundReport
from xpress_runtime.stats import Stage
from xpress_runtime.version import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics:
    """The registry of one application, and the observer that fills it."""

    def __init__(self, session: BatchSession) -> None:
        # When each series began: a line for every other line, and of no use here.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._num_proposals = session.bundle.manifest.drafter.num_proposals
        lengths = tuple(range(1, self._num_proposals + 2))
        self._requests = self._counter("requests", "Requests by how they ended or why they were refused.", "outcome")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens that were read.")
        self._output_tokens = self._counter("output_tokens", "Tokens that were generated.")
        self._rounds = self._counter("rounds", "Rounds of all rows together: speculative, or plain steps.", "kind")
        self._verified = self._counter("drafts_verified", "Drafted tokens that the target verified, by position in the block.", "position")
        self._accepted = self._counter("drafts_accepted", "Drafted tokens that it accepted, by position in the block.", "position")
        self._stages = self._counter("stage_seconds", "Seconds in each stage: prefill, draft, refine, verify.", "stage")
        self._http = self._counter("http_requests", "HTTP requests.", "path", "method", "status")
        self._lengths = self._histogram("acceptance_length", "Tokens kept per row and speculative round.", lengths)
        self._rows = self._histogram("batch_rows", "Rows that took part in a round.", (1, 2, 4, 8, 16, 32, 64, 128))
        self._queued = self._histogram("queue_seconds", "From arrival to a slot.", _SECONDS)
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = self._histogram("time_between_tokens_seconds", "Mean over a request's tokens after its first.", _TOKEN_SECONDS)
        self._total = self._histogram("request_seconds", "From arrival to the end.", _SECONDS)
        build = Gauge("xpress_build_info", "The version that runs.", ("version",), registry=self.registry)
        build.labels(VERSION).set(1)
        for outcome in ("finished", "cancelled", "timed_out", "failed", "queue_full", "draining", "invalid"):
            self._requests.labels(outcome)
        self.registry.register(_StatusCollector(session))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"xpress_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"xpress_{name}", text, buckets=buckets, registry=self.registry)

    def round(self, report: RoundReport) -> None:
        """A round took place. Called on the session's thread."""
        self._rounds.labels("speculative" if report.speculative else "plain").inc()
        self._rows.observe(report.rows)
        for stage, seconds in report.seconds.items():
            # A prompt's is known, whole, when its request ends.
            if stage is not Stage.PREFILL:
                self._stages.labels(stage.value).inc(seconds)
        if not report.speculative:
            return
        for kept in report.kept:
            self._lengths.observe(kept)
        for position in range(1, report.proposed + 1):
            self._verified.labels(str(position)).inc(len(report.accepted))
            self._accepted.labels(str(position)).inc(sum(accepted >= position for accepted in report.accepted))

    def finished(self, request: Request) -> None:
        """A request ended, in whatever way. Called on the session's thread."""
        self._requests.labels(request.state.replace(" ", "_")).inc()
        if request.queued_seconds is not None:
            self._queued.observe(request.queued_seconds)
        first, total, count = request.first_token_seconds, request.total_seconds, len(request.tokens)
        self._output_tokens.inc(count)
        if first is not None:
            self._first.observe(first)
            self._prompt_tokens.inc(request.prompt_tokens)
            self._stages.labels(Stage.PREFILL.value).inc(request.stats.prefill_seconds)
        if total is not None:
            self._total.observe(total)
        if first is not None and total is not None and count > 1:
            self._between.observe((total - first) / (count - 1))

    def refused(self, outcome: str) -> None:
        """A request never became one."""
        self._requests.labels(outcome).inc()

    def http(self, path: str, method: str, status: int) -> None:
        """An HTTP answer was given. ``path`` is a route's pattern."""
        self._http.labels(path, method, str(status)).inc()

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)


class _StatusCollector(Collector):
    """What only the session knows, at the moment of reading."""

    def __init__(self, session: BatchSession) -> None:
        self._session = session

    def collect(self) -> Iterator[Metric]:
        status = self._session.status()
        figures = {
            "slots": ("Requests that can run at a time.", status.slots),
            "slots_in_use": ("Requests that run or whose prompt is being read.", status.running + status.reading),
            "requests_running": ("Requests that generate.", status.running),
            "requests_reading": ("Requests whose prompt is being read.", status.reading),
            "requests_queued": ("Requests that wait for a slot.", status.queued),
            "draining": ("1 while the server takes no new requests.", int(status.draining)),
            "failed": ("1 once the server can no longer generate.", int(status.failed is not None)),
            "uptime_seconds": ("Since the session was opened.", status.uptime_seconds),
        }
        for name, (text, value) in figures.items():
            yield GaugeMetricFamily(f"xpress_{name}", text, value=value)

    def describe(self) -> Iterator[Metric]:
        # Registering asks for names, and need not ask the session.
        return iter(())
