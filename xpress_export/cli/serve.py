"""`xpress-export serve`: a bundle over HTTP."""

from __future__ import annotations

import os
from pathlib import Path

import click

from xpress_export.cli.options import bundle_argument, combined, session_options
from xpress_runtime.errors import OptionError

KEY_VARIABLE = "XPRESS_API_KEY"


@click.command("serve")
@bundle_argument
@combined(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all of this machine's."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port to listen on; 0: a free one."),
    click.option("--slots", type=click.IntRange(1, 1024), help="Requests that run at a time. Default: what the bundle was planned for."),
    click.option(
        "--max-queue",
        type=click.IntRange(0, 1_000_000),
        default=64,
        show_default=True,
        help="Requests that wait for a slot; one more is answered with 429.",
    ),
    click.option("--max-tokens", type=click.IntRange(1), help="Tokens that a request may generate. Default: the bundle's capacity."),
    click.option("--max-prompt-tokens", type=click.IntRange(1), help="Tokens that a prompt may have. Default: the bundle's capacity."),
    click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds that a request may take, its wait included."),
    click.option(
        "--max-body", type=click.IntRange(1), default=1024 * 1024, show_default=True, help="Bytes that the body of a request may have."
    ),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        help=f"Take requests with one of the keys in this file only, one a line. {KEY_VARIABLE} may hold one as well.",
    ),
    click.option("--model-name", help="The model's name for clients. Default: the target's own."),
    click.option(
        "--drain-seconds",
        type=click.FloatRange(0),
        default=30.0,
        show_default=True,
        help="After SIGTERM or Ctrl-C, requests that run have this long to end; a second signal cancels them.",
    ),
)
@session_options
def command(
    bundle: Path,
    host: str,
    port: int,
    slots: int | None,
    max_queue: int,
    max_tokens: int | None,
    max_prompt_tokens: int | None,
    timeout: float | None,
    max_body: int,
    api_key_file: Path | None,
    model_name: str | None,
    drain_seconds: float,
    backend: str,
    threads: int | None,
    runtime_cache: Path | None,
    no_verify: bool,
) -> None:
    """Serve BUNDLE over HTTP: OpenAI's routes under /v1, /generate, /metrics, and a page at /. Requests are batched as they come."""
    from xpress_runtime.server import ServerSettings, create_app
    from xpress_runtime.server.run import is_loopback, listen, serve, url_of
    from xpress_runtime.serving import BatchSession, Limits

    settings = ServerSettings(api_keys=_keys(api_key_file), max_body_bytes=max_body, model_name=model_name)
    limits = Limits(max_queue=max_queue, max_new_tokens=max_tokens, max_prompt_tokens=max_prompt_tokens, timeout=timeout)
    # Before the bundle: a port that is taken should not cost the time that a model takes to load.
    with listen(host, port) as listener:
        url = url_of(host, listener)
        with BatchSession.open(
            bundle, backend, slots=slots, threads=threads, verify=not no_verify, runtime_cache=runtime_cache, limits=limits
        ) as session:
            if not settings.api_keys and not is_loopback(listener):
                click.echo(f"warning: {host} is open to other machines, and no API key is set; see --api-key-file", err=True)
            app = create_app(session, settings)
            ready = f"serving {app.state.service.model} at {url} ({session.slots} slots, {session.backend.name})"
            serve(app, listener, drain_seconds=drain_seconds, on_listening=lambda: click.echo(ready))


def _keys(file: Path | None) -> tuple[str, ...]:
    """Those of the file and the one of the environment; OptionError."""
    from xpress_runtime.server.settings import check_key, read_keys

    keys = read_keys(file) if file is not None else ()
    # Set and empty is a mistake that would leave the server open.
    if (key := os.environ.get(KEY_VARIABLE)) is not None:
        if not key.strip():
            raise OptionError(f"{KEY_VARIABLE} is empty, expected an API key; unset it to serve without")
        check_key(key.strip(), KEY_VARIABLE)
        keys = (*keys, key.strip())
    return keys
