"""`xpress-export generate`: text from a prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from xpress_export.cli.options import (
    bundle_argument,
    chat_option,
    chat_variables,
    combined,
    generation_config,
    generation_options,
    json_option,
    session_options,
    thinking_option,
    warning_options,
)
from xpress_runtime.errors import PromptError


@click.command("generate")
@bundle_argument
@click.argument("prompt", required=False)
@combined(
    chat_option,
    thinking_option,
    click.option("--system", help="A system message before a chat prompt."),
    click.option("--tokens", help="The prompt as comma-separated token ids instead of text."),
    click.option("--stats", is_flag=True, help="Print acceptance and times to standard error."),
)
@generation_options
@session_options
@warning_options
@json_option
def command(
    bundle: Path,
    prompt: str | None,
    chat: bool | None,
    thinking: bool | None,
    system: str | None,
    tokens: str | None,
    stats: bool,
    as_json: bool,
    backend: str,
    threads: int | None,
    runtime_cache: Path | None,
    no_verify: bool,
    warn_acceptance: float,
    warn_round_ms: float,
    **generation: Any,
) -> None:
    """Generate from PROMPT, or from standard input, with BUNDLE. Text streams to standard output as it becomes final.

    With --json the tokens include the stop token, or those of the stop string; the text ends before it.
    """
    from xpress_export.cli.show import stats_lines
    from xpress_runtime.session import Session, WarningThresholds

    config = generation_config(generation)
    thresholds = WarningThresholds(warn_acceptance, warn_round_ms)
    with Session.open(
        bundle, backend, threads=threads, verify=not no_verify, thresholds=thresholds, runtime_cache=runtime_cache
    ) as session:
        given = _prompt(session, prompt, chat, system, tokens)
        stream = session.stream(given, config, chat_variables=chat_variables(session, thinking))
        for piece in stream:
            if not as_json and session.tokenizer is not None:
                click.echo(piece.text, nl=stream.finished)
        result = stream.result
        backend = session.backend.name
    if as_json:
        fields = {"text": result.text, "tokens": result.tokens, "finish_reason": result.finish_reason}
        click.echo(json.dumps({**fields, "backend": backend, "stats": result.stats.to_json()}))
        return
    if session.tokenizer is None:
        # There is no text, and the ids are the answer.
        click.echo(",".join(str(token) for token in result.tokens))
    if stats:
        for line in (f"backend: {backend}", *stats_lines(result)):
            click.echo(line, err=True)


def _prompt(session: Any, prompt: str | None, chat: bool | None, system: str | None, tokens: str | None) -> Any:
    if tokens is not None:
        if prompt is not None or system is not None or chat:
            raise PromptError("--tokens replaces the prompt; leave out PROMPT, --system and --chat")
        try:
            return [int(token) for token in tokens.split(",")]
        except ValueError:
            raise PromptError(f"--tokens is {tokens!r}, expected token ids such as 1,15,3") from None
    if prompt is None:
        # None: started with standard input closed.
        if sys.stdin is None or sys.stdin.isatty():
            raise PromptError("no prompt: give it as an argument or on standard input")
        try:
            # The newline that echo and editors put at the end is not part of what was meant.
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as problem:
            raise PromptError(f"standard input is not UTF-8 text: {problem.reason} at byte {problem.start}") from None
    if not prompt.strip():
        raise PromptError("the prompt is empty; give some text")
    has_template = session.tokenizer is not None and session.tokenizer.has_chat_template
    if chat is None:
        chat = has_template
    if not chat:
        if system is not None:
            raise PromptError("--system needs a chat prompt; leave out --raw, or use a bundle with a chat template")
        return prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]
