"""How the server is: alive, ready, its metrics, and the page."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from xpress_runtime.server.description import UNREADY, answers
from xpress_runtime.server.metrics import CONTENT_TYPE
from xpress_runtime.server.problems import RETRY_SECONDS, ApiError
from xpress_runtime.server.schemas import State
from xpress_runtime.server.work import Service
from xpress_runtime.serving import Status

PAGE = "page.html"
# The page brings all that it needs, and may talk to this server alone.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def state_router(service: Service) -> APIRouter:
    """The routes over ``service``."""
    router = APIRouter(tags=["state"])
    page = resources.files("xpress_runtime.server").joinpath(PAGE).read_text(encoding="utf-8")

    @router.get(
        "/health",
        operation_id="health",
        summary="Whether the server is alive",
        responses=answers(State, "It is; it may be draining.", errors={503: "It can no longer generate and must be started again."}),
    )
    def health() -> Response:
        status = service.session.status()
        _check_alive(status)
        return JSONResponse(_state("alive", status))

    @router.get(
        "/ready",
        operation_id="ready",
        summary="Whether the server takes requests",
        responses=answers(State, "It does.", errors={503: UNREADY}),
    )
    def ready() -> Response:
        status = service.session.status()
        _check_alive(status)
        if status.draining:
            raise ApiError(503, "the server finishes what it has and takes no new requests", code="draining", retry_after=RETRY_SECONDS)
        return JSONResponse(_state("ready", status))

    @router.get(
        "/metrics",
        operation_id="metrics",
        summary="Figures for Prometheus",
        response_class=PlainTextResponse,
        responses=answers(str, "Prometheus' text format.", media_type="text/plain", errors={}),
    )
    def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @router.get(
        "/",
        operation_id="page",
        summary="A page to try the model",
        response_class=HTMLResponse,
        responses=answers(str, "The page.", media_type="text/html", errors={}),
    )
    def show_page() -> Response:
        headers = {
            "Content-Security-Policy": _PAGE_POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return HTMLResponse(page, headers=headers)

    return router


def _check_alive(status: Status) -> None:
    if status.failed is not None:
        message = f"the server has failed and must be started again: {status.failed}"
        raise ApiError(503, message, code="failed", retry_after=RETRY_SECONDS)


def _state(name: str, status: Status) -> dict[str, object]:
    figures = ("slots", "running", "reading", "queued", "uptime_seconds")
    return {"status": name, **{figure: getattr(status, figure) for figure in figures}}
