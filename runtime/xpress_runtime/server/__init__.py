"""A bundle over HTTP: OpenAI's routes, a native one, metrics and a page, over the batching of ``xpress_runtime.serving``.

Needs the extra ``serve``. The batching knows nothing of this package; this package knows nothing of graphs and backends.
"""

from __future__ import annotations

from xpress_runtime.server.app import create_app
from xpress_runtime.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
