"""The recipe's command line: one command per stage, and ``all`` for the whole chain.

Errors that a user can cause end as one line; everything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from examples.distill.run_folder import RunFolder
from examples.distill.settings import Settings, read_settings
from xpress_export.cli.quiet import quiet_libraries
from xpress_runtime.errors import XpressError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def recipe() -> None:
    """Train a drafter for your own target, from the target's own answers.

    CONFIG is a TOML file (see presets/), RUN the folder of the run: a stage goes on with what is there.
    """


def _report(line: str) -> None:
    click.echo(line, err=True)


def _opened(config: Path, run: Path) -> tuple[Settings, RunFolder]:
    settings = read_settings(config)
    folder = RunFolder(run)
    folder.make(run)
    quiet_libraries()
    return settings, folder


_config = click.argument("config", type=click.Path(path_type=Path))
# An argument and no option: torchrun would take an option of this name for its own.
_run = click.argument("run", type=click.Path(path_type=Path))


@recipe.command()
@_config
@_run
def prompts(config: Path, run: Path) -> None:
    """Write the prompts to train on and those to measure on."""
    from examples.distill.prompts import write_prompts

    settings, folder = _opened(config, run)
    write_prompts(settings.prompts, folder, _report)


@recipe.command()
@_config
@_run
def generate(config: Path, run: Path) -> None:
    """Let the target answer them."""
    from examples.distill.answers import generate_answers

    settings, folder = _opened(config, run)
    generate_answers(settings, folder, _report)


@recipe.command()
@_config
@_run
def features(config: Path, run: Path) -> None:
    """Cache the target's hidden states over prompts and answers."""
    from examples.distill.features import cache_features

    settings, folder = _opened(config, run)
    cache_features(settings, folder, _report)


@recipe.command()
@_config
@_run
def train(config: Path, run: Path) -> None:
    """Train the drafter, and an autoregressive one if asked for."""
    from examples.distill.draft_model import train_draft_model
    from examples.distill.train import train_drafter

    settings, folder = _opened(config, run)
    train_drafter(settings, folder, _report)
    train_draft_model(settings, folder, _report)


@recipe.command()
@_config
@_run
def evaluate(config: Path, run: Path) -> None:
    """Build a bundle of the drafter and measure it with the real loop."""
    from examples.distill.evaluate import evaluate_drafter

    settings, folder = _opened(config, run)
    evaluate_drafter(settings, folder, _report)


@recipe.command("all")
@_config
@_run
@click.pass_context
def everything(context: click.Context, config: Path, run: Path) -> None:
    """All stages one after the other."""
    for stage in (prompts, generate, features, train, evaluate):
        context.invoke(stage, config=config, run=run)


def main(words: Sequence[str] | None = None) -> None:
    """Run a command line (default: the process's own) and exit."""
    try:
        recipe.main(args=words, prog_name="python -m examples.distill", standalone_mode=False)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except XpressError as problem:
        click.echo(f"error: {problem}", err=True)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
