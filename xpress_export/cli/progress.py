"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere, nothing with --json."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def progress(title: str, num_steps: int, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A function to call with each step's name as it begins; ``num_steps`` steps in all."""
    if quiet:
        yield lambda _step: None
    elif sys.stderr.isatty():
        with click.progressbar(length=num_steps, label=title, file=sys.stderr, item_show_func=lambda step: step or "") as bar:
            begun = 0

            def advance(step: str) -> None:
                nonlocal begun
                bar.update(1 if begun else 0, current_item=step)
                begun += 1

            yield advance
            bar.update(1, current_item="done")
    else:
        started = time.monotonic()

        def line(step: str) -> None:
            click.echo(f"{title}: {step} ({time.monotonic() - started:.0f} s)", err=True)

        yield line
