"""The recipe's command line: one command per stage, and ``all`` for the whole chain.

Errors that a user can cause end as one line; everything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from examples.distill.run_folder import RunFolder
from examples.distill.settings import Settings, read_settings
from xpress_export.cli.quiet import quiet_libraries
from xpress_runtime.errors import OptionError, OutputError, XpressError
from xpress_runtime.jobs.lock import Lock


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def recipe() -> None:
    """Train a drafter for your own target, from the target's own answers.

    CONFIG is a TOML file (see presets/), RUN the folder of the run: a stage goes on with what is there.
    """


Report = Callable[[str], None]
Stage = Callable[[Settings, RunFolder, Report], None]


def _prompts(settings: Settings, folder: RunFolder, report: Report) -> None:
    from examples.distill.prompts import write_prompts

    write_prompts(settings.prompts, folder, report)


def _generate(settings: Settings, folder: RunFolder, report: Report) -> None:
    from examples.distill.answers import generate_answers

    generate_answers(settings, folder, report)


def _features(settings: Settings, folder: RunFolder, report: Report) -> None:
    from examples.distill.features import cache_features

    cache_features(settings, folder, report)


def _train(settings: Settings, folder: RunFolder, report: Report) -> None:
    from examples.distill.draft_model import train_draft_model
    from examples.distill.train import train_drafter

    train_drafter(settings, folder, report)
    train_draft_model(settings, folder, report)


def _evaluate(settings: Settings, folder: RunFolder, report: Report) -> None:
    from examples.distill.evaluate import evaluate_drafter

    evaluate_drafter(settings, folder, report)


_COMMANDS: dict[str, tuple[str, tuple[Stage, ...]]] = {
    "prompts": ("Write the prompts to train on and those to measure on.", (_prompts,)),
    "generate": ("Let the target answer them.", (_generate,)),
    "features": ("Cache the target's hidden states over prompts and answers.", (_features,)),
    "train": ("Train the drafter, and an autoregressive one if asked for.", (_train,)),
    "evaluate": ("Build a bundle of the drafter and measure it with the real loop.", (_evaluate,)),
    "all": ("All stages one after the other.", (_prompts, _generate, _features, _train, _evaluate)),
}


def _run(config: Path, run: Path, stages: Sequence[Stage]) -> None:
    settings = read_settings(config)
    folder = RunFolder(run)
    if stages[0] is not _prompts and not run.exists():
        raise OptionError(f"{run} does not exist; run 'prompts' first")
    folder.make(run)
    try:
        # torchrun's other processes work for the first.
        lock = Lock(run) if os.environ.get("RANK", "0") == "0" else None
    except OSError as problem:
        raise OutputError(f"{run} cannot be locked: {problem.strerror or problem}") from None
    try:
        quiet_libraries()
        for stage in stages:
            stage(settings, folder, lambda line: click.echo(line, err=True))
    finally:
        if lock is not None:
            lock.release()


def _add(name: str, text: str, stages: Sequence[Stage]) -> None:
    # RUN is an argument and no option: torchrun would take an option of this name for its own.
    @recipe.command(name, help=text)
    @click.argument("config", type=click.Path(path_type=Path))
    @click.argument("run", type=click.Path(path_type=Path))
    def command(config: Path, run: Path) -> None:
        _run(config, run, stages)


for _name, (_text, _stages) in _COMMANDS.items():
    _add(_name, _text, _stages)


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
        click.echo("interrupted; what was written is kept, run the same command again to go on", err=True)
        sys.exit(130)
    except XpressError as problem:
        click.echo(f"error: {problem}", err=True)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
