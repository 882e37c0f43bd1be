"""A server of a fake session in a process of its own: what signals do to it can be seen there alone."""

from __future__ import annotations

import sys
from typing import Any

from tests.server.conftest import app_of
from tests.server.fake import FakeSession, FakeTokenizer
from xpress_runtime.server import ServerSettings
from xpress_runtime.server.run import listen, serve, url_of


def main() -> None:
    """Arguments: seconds to drain, "hold" where requests are to wait for ever, settings such as head_seconds=1."""
    session = FakeSession(tokenizer=FakeTokenizer(), hold="hold" in sys.argv, slow="slow" in sys.argv)
    given: dict[str, Any] = {name: int(value) for name, found, value in (word.partition("=") for word in sys.argv) if found}
    with listen("127.0.0.1", 0) as listener:
        url = url_of("127.0.0.1", listener)
        app = app_of(session, ServerSettings(**given))
        serve(app, listener, drain_seconds=float(sys.argv[1]), on_listening=lambda: print(url, flush=True))  # noqa: T201
    print("ended", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
