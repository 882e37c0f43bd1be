"""The `xpress-export` program: its commands, loaded when called, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from xpress_runtime.errors import EnvironmentProblem, MissingExtraError, UserError, XpressError
from xpress_runtime.version import VERSION

# name → (module, one line of help). The help is here so that listing the commands imports none of them.
COMMANDS = {
    "build": ("build", "Build a bundle from a target and a drafter."),
    "export": ("export", "Export the ONNX graphs alone, without tokenizer and manifest."),
    "convert": ("convert", "Write a drafter of any format in the serving format."),
    "engine": ("engine", "Build TensorRT engines into a bundle."),
    "parity": ("parity", "Compare a bundle with PyTorch and transformers."),
    "generate": ("generate", "Generate from a prompt with a bundle."),
    "chat": ("chat", "Talk to a bundle."),
    "serve": ("serve", "Serve a bundle over HTTP: OpenAI's API, metrics, a page."),
    "batch": ("batch", "Run a file of jobs on a bundle, resumable."),
    "package": ("package", "Lay a bundle out for another server."),
    "inspect": ("inspect", "Show what a bundle holds and needs, or what a checkpoint is."),
    "doctor": ("doctor", "Show what is installed and which backends run here."),
    "bench": ("bench", "Measure what speculation gains, and what of it."),
    "demo": ("demo", "Build the demo bundle and show what speculation gains."),
}

# What a command may find missing, and the extra that brings it.
_EXTRAS = {
    "accelerate": "export",
    "cuda": "gpu",
    "fastapi": "serve",
    "gguf": "export",
    "huggingface_hub": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxruntime": "cpu",
    "onnxscript": "export",
    "polygraphy": "rtx",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "pydantic_core": "serve",
    "safetensors": "export",
    "sse_starlette": "serve",
    "starlette": "serve",
    "tensorrt": "gpu",
    "tensorrt_rtx": "rtx",
    "torch": "export",
    "transformers": "export",
    "uvicorn": "serve",
}

# What every installation has.
_BASE = ("jinja2", "numpy", "tokenizers")

LOG_LEVELS = ("debug", "info", "warning", "error")

# What the system refuses: not the user's input, and no defect either.
_SYSTEM_ERRORS = (errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS)


class _ReaderGone(Exception):
    """Standard output or error is a pipe that nobody reads any more."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _broken_pipes():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _broken_pipes():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"xpress_export.cli.{COMMANDS[cmd_name][0]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_module, help_line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="xpress-export")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True, help="What to log to standard error.")
def cli(log_level: str) -> None:
    """Diffusion-drafted speculative decoding: checkpoints to ONNX bundles, and bundles to tokens.

    Exit codes: 0 done, 1 a check failed, 2 the user's input, 3 the environment, 130 and 143 interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for name in ("xpress_export", "xpress_engines", "xpress_runtime"):
        logging.getLogger(name).setLevel(log_level.upper())


def main() -> NoReturn:
    """Run the program and exit; a known error is one line on standard error."""
    for name in ("SIGTERM", "SIGHUP"):
        # Not every system has both; one that is ignored (nohup) stays so.
        if (signum := getattr(signal, name, None)) is not None and signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _terminate)
    if sys.stderr is None:
        # Started with it closed. Its number must be taken, or the next file that is opened gets it and what is printed there.
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a character is no reason to lose the rest of a text.
        sys.stdout.reconfigure(errors="backslashreplace")
    interrupted = _note_interrupts()
    try:
        cli.main(prog_name="xpress-export", standalone_mode=False)
    except XpressError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _BASE:
            _fail(f"{package} is not installed; install it with: pip install xpress-export", EnvironmentProblem.exit_code)
        if package not in _EXTRAS:
            raise
        missing = MissingExtraError(package, _EXTRAS[package])
        _fail(str(missing), missing.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(UserError.exit_code)
    except click.UsageError as error:
        hint = f" (see: {error.ctx.command_path} --help)" if error.ctx else ""
        _fail(f"{error.format_message()}{hint}", UserError.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), UserError.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except _ReaderGone:
        _discard_output()
        sys.exit(141)
    except OSError as error:
        if error.errno not in _SYSTEM_ERRORS:
            raise
        _discard_output()
        _fail(f"{error.strerror}: {error.filename or 'standard output'}", EnvironmentProblem.exit_code)
    except Exception:
        # A library that is interrupted while it is imported may make an error of its own of it.
        if not interrupted.is_set():
            raise
        _fail("interrupted", 130)
    sys.exit(0)


def _note_interrupts() -> threading.Event:
    """Ctrl-C as before, and an event that tells afterwards that it was pressed."""
    interrupted = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
        interrupted.set()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    return interrupted


def _fail(message: str, exit_code: int) -> NoReturn:
    click.echo(f"xpress-export: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)


@contextmanager
def _broken_pipes() -> Iterator[None]:
    # Under another name: click makes exit code 1 of it, which is a failed check here.
    try:
        yield
    except BrokenPipeError:
        raise _ReaderGone from None


def _discard_output() -> None:
    """What is still buffered has nowhere to go, and must not fail once more when the interpreter ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError):
        return


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    # As an exception, so that half-written output is removed on the way out.
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()
