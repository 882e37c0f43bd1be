"""``xpress-export package`` as a command: its options reach the model, and its output names what the server needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import Built
from xpress_export.cli.main import cli
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError, OptionError, OutputError


def test_options_reach_the_model(own: Bundle, tmp_path: Path) -> None:
    given = [str(own.folder), "--triton", str(tmp_path), "--name", "m", "--backend", "ort-cpu", "--slots", "3", "--threads", "2"]
    given += ["--instances", "2", "--max-queue", "5", "--max-tokens", "40", "--timeout", "9", "--link", "--json"]
    done = CliRunner().invoke(cli, ["package", *given], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output)
    assert shown["folder"] == str(tmp_path / "m") and shown["linked"]
    config = (tmp_path / "m" / "config.pbtxt").read_text()
    for name, value in {"backend": "ort-cpu", "slots": 3, "threads": 2, "max_queue": 5, "max_tokens": 40, "timeout": 9.0}.items():
        assert f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' in config
    assert "count: 2 kind: KIND_CPU" in config


def test_what_the_server_needs_is_shown(tiny: Built, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["package", str(tiny.bundle.folder), "--triton", str(tmp_path)], catch_exceptions=False)
    assert "pip install 'xpress-export[cpu]==" in done.output
    assert f"tritonserver --model-repository {tmp_path}" in done.output


def test_a_backend_that_does_not_exist_is_refused(tiny: Built, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="backend 'cpu' does not exist"):
        CliRunner().invoke(cli, ["package", str(tiny.bundle.folder), "--triton", str(tmp_path), "--backend", "cpu"], catch_exceptions=False)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="holds no bundle"):
        CliRunner().invoke(cli, ["package", str(tmp_path), "--triton", str(tmp_path / "r")], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_place_where_no_folder_can_be_made_is_refused(tiny: Built) -> None:
    for place in ("/proc", "/proc/repository"):
        given = [str(tiny.bundle.folder), "--triton", place, "--name", "m"]
        with pytest.raises(OutputError, match=f"{place}/m cannot be written: .*; give another --triton"):
            CliRunner().invoke(cli, ["package", *given, "--link"], catch_exceptions=False)
        # Copies need room, of which there is none either.
        with pytest.raises(OutputError, match=f"{place}/m "):
            CliRunner().invoke(cli, ["package", *given], catch_exceptions=False)
