"""The application: routes, what stands before them, and their description, over one session."""

from __future__ import annotations

from fastapi import FastAPI

from xpress_runtime.server.description import describe
from xpress_runtime.server.generate import generate_router
from xpress_runtime.server.limits import BodyLimit, HeadAsGet, KeyRequired, Observed
from xpress_runtime.server.openai_routes import openai_router
from xpress_runtime.server.problems import install_handlers
from xpress_runtime.server.settings import ServerSettings
from xpress_runtime.server.state_routes import state_router
from xpress_runtime.server.work import Service
from xpress_runtime.serving import BatchSession
from xpress_runtime.version import VERSION


def create_app(session: BatchSession, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI application that serves ``session``, which stays the caller's to close. ``app.state.service`` is what its routes share.

    Without settings: open to all, under the target's own name.
    """
    service = Service(session, settings or ServerSettings())
    # No documentation pages: they fetch their scripts from elsewhere.
    app = FastAPI(title="xpress-export", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for router in (state_router(service), generate_router(service), openai_router(service)):
        app.include_router(router)
    install_handlers(app)
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit, max_bytes=service.settings.max_body_bytes, seconds=service.settings.body_seconds)
    app.add_middleware(KeyRequired, keys=service.settings.api_keys)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Observed, metrics=service.metrics)
    app.openapi = describe(app, service)  # type: ignore[method-assign]
    return app
