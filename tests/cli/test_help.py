"""Help: what the program can do and what each command takes."""

from __future__ import annotations

import importlib

import click
import pytest

from tests.cli.invoke import invoke
from xpress_export.cli.main import COMMANDS


def test_program_lists_its_commands() -> None:
    shown = invoke("--help").assert_done().out
    listed = shown.partition("Commands:\n")[2].splitlines()
    assert [line.split(maxsplit=1) for line in listed] == [[name, help_line] for name, (_module, help_line) in COMMANDS.items()]
    assert "--log-level" in shown
    assert "--version" in shown


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", COMMANDS)
def test_command_lists_its_options(name: str, flag: str) -> None:
    shown = invoke(name, flag).assert_done().out
    assert shown.startswith(f"Usage: xpress-export {name} ")
    command = importlib.import_module(f"xpress_export.cli.{COMMANDS[name][0]}").command
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert [option for option in (*parameter.opts, *parameter.secondary_opts) if option not in shown] == []
        else:
            assert parameter.make_metavar(click.Context(command)) in shown


def test_version() -> None:
    assert invoke("--version").assert_done().out.startswith("xpress-export, version ")


def test_without_a_command() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert result.out == ""
    assert result.err.startswith("Usage: xpress-export ")
    assert "  build " in result.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("bogus",), "bogus"),
        (("--bogus",), "--bogus"),
        (("--log-level", "loud", "doctor"), "loud"),
        (("build",), "--target"),
        (("build", "--target", "t", "--drafter", "d"), "--output"),
        (("inspect",), "PATH"),
        (("doctor", "extra"), "extra"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], named: str) -> None:
    invoke(*arguments).assert_refused(2, named, "--help")
