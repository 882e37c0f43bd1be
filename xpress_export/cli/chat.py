"""`xpress-export chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from xpress_export.cli.options import (
    bundle_argument,
    chat_variables,
    generation_config,
    generation_options,
    session_options,
    thinking_option,
)
from xpress_runtime.errors import PromptError


@click.command("chat")
@bundle_argument
@click.option("--system", help="A system message before the conversation.")
@thinking_option
@click.option("--stats", is_flag=True, help="Print acceptance and times after each answer.")
@generation_options
@session_options
def command(
    bundle: Path,
    system: str | None,
    thinking: bool | None,
    stats: bool,
    backend: str,
    threads: int | None,
    runtime_cache: Path | None,
    no_verify: bool,
    **generation: Any,
) -> None:
    """Talk to BUNDLE. /reset begins anew, /quit or the end of input leaves, Ctrl-C stops an answer."""
    from xpress_export.cli.show import stats_lines
    from xpress_runtime.session import Session

    config = generation_config(generation)
    opening = [{"role": "system", "content": system}] if system is not None else []
    with Session.open(bundle, backend, threads=threads, verify=not no_verify, runtime_cache=runtime_cache) as session:
        if session.tokenizer is None or not session.tokenizer.has_chat_template:
            raise PromptError(f"{bundle} has no chat template; use: xpress-export generate {bundle} --raw")
        variables = chat_variables(session, thinking)
        messages = list(opening)
        while (line := _read_line()) is not None:
            if line == "/quit":
                break
            if line == "/reset":
                messages = list(opening)
                continue
            if line.startswith("/"):
                click.echo(f"{line.split()[0]} is no command; there are /reset and /quit", err=True)
                continue
            if not line:
                continue
            question = {"role": "user", "content": line}
            try:
                stream = session.stream([*messages, question], config, chat_variables=variables)
            except PromptError as problem:
                click.echo(f"{problem}; /reset begins anew", err=True)
                continue
            answer = ""
            try:
                for piece in stream:
                    answer += piece.text
                    click.echo(piece.text, nl=stream.finished)
            except KeyboardInterrupt:
                click.echo(" [stopped]")
            if stats and stream.finished:
                for text in stats_lines(stream.result):
                    click.echo(text, err=True)
            messages += [question, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    # None: started with standard input closed.
    if sys.stdin is None:
        return None
    try:
        line = input("> ") + "\n" if sys.stdin.isatty() else sys.stdin.readline()
    except EOFError:
        return None
    except UnicodeDecodeError as problem:
        raise PromptError(f"standard input is not UTF-8 text: {problem.reason} at byte {problem.start}") from None
    return line.strip() if line else None
