"""Local paths, hub ids and everything that is neither. The hub itself is never reached here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from xpress_export.checkpoints import locate, open_target
from xpress_runtime.errors import CheckpointError, EnvironmentProblem, OptionError, XpressError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the download; answers with what a test puts into it as ``answers`` and records the calls."""
    calls: list[dict[str, Any]] = []

    def download(hub_id: str, **options: Any) -> str:
        calls.append({"id": hub_id, **options})
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    answers: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(download, "answers", answers, raising=False)
    return calls


def answer(*answers: Any) -> None:
    huggingface_hub.snapshot_download.answers.extend(answers)  # type: ignore[attr-defined]


def not_found() -> RepositoryNotFoundError:
    # Its own constructor wants an HTTP response.
    return RepositoryNotFoundError.__new__(RepositoryNotFoundError)


def test_local(tmp_path: Path, hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.gguf").write_bytes(b"")
    assert locate(str(tmp_path / "model")).path == tmp_path / "model/a.gguf"
    assert locate(str(tmp_path / "model/a.gguf")).folder == tmp_path / "model"
    (tmp_path / "model/config.json").write_text("{}")
    assert locate(str(tmp_path / "model")).path == tmp_path / "model"
    # A relative path that looks like a hub id is the folder when it is there.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    location = locate("org/name")
    assert (location.path, location.source, location.revision) == (Path("org/name"), "org/name", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/model").path == tmp_path / "model"
    assert not hub


@pytest.mark.parametrize(
    "reference",
    [
        "",
        " ",
        "a\0b",
        "./x",
        "../x",
        "/x",
        "~/nowhere-at-all",
        "x.gguf",
        "org/x.gguf",
        "org/name/",
        "a\\b",
        "name",
        "a/b/c",
        "org/",
        "/",
        "o rg/x",
        "-o/x",
    ],
)
def test_not_sent_to_the_hub(reference: str, hub: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        location = locate(reference)
        # "/" exists; it just holds no checkpoint.
        open_target(str(location.path))
    assert "\n" not in str(caught.value)
    assert not hub


def test_no_such_user(hub: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError):
        locate("~no-such-user-here/x")
    assert not hub


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        locate(str(tmp_path / "model.safetensors"))
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        locate(str(tmp_path))


def test_revision_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="main"):
        locate(str(tmp_path), "main")


def test_from_the_hub(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    answer(tmp_path / COMMIT)
    location = locate("org/name", "v1")
    assert (location.path, location.source, location.revision) == (tmp_path / COMMIT, "org/name", COMMIT)
    (call,) = hub
    assert (call["id"], call["revision"], call["local_files_only"]) == ("org/name", "v1", False)


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        *[(name, True) for name in ("config.json", "model.safetensors", "model-00001-of-2.safetensors", "model.safetensors.index.json")],
        *[(name, True) for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE", "LICENSE.txt", "README.md")],
        *[(name, False) for name in ("pytorch_model.bin", "x.pt", "modeling.py", "original/config.json", "consolidated.safetensors")],
        *[(name, False) for name in ("onnx/model.safetensors", "model.gguf", "x.pkl")],
    ],
)
def test_only_what_is_needed_is_fetched(file: str, wanted: bool, hub: list[dict[str, Any]], tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    answer(tmp_path / COMMIT)
    locate("org/name")
    kept = filter_repo_objects([file], allow_patterns=hub[0]["allow_patterns"], ignore_patterns=hub[0]["ignore_patterns"])
    assert list(kept) == ([file] if wanted else [])


@pytest.mark.parametrize("problem", [ConnectionError("down"), TimeoutError("slow"), OSError("proxy\nrefused")])
def test_falls_back_to_the_cache(problem: Exception, hub: list[dict[str, Any]], tmp_path: Path) -> None:
    answer(problem, tmp_path / COMMIT)
    assert locate("org/name").revision == COMMIT
    assert [call["local_files_only"] for call in hub] == [False, True]


def test_transport_errors_of_the_http_library_fall_back_too(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    httpx = pytest.importorskip("httpx2")
    answer(httpx.ProxyError("403 Forbidden"), tmp_path / COMMIT)
    assert locate("org/name").revision == COMMIT
    assert len(hub) == 2


@pytest.mark.parametrize(
    ("answers", "error", "named"),
    [
        ((not_found(),), CheckpointError, "neither a local folder nor a repository"),
        ((HFValidationError("bad\nid"),), CheckpointError, "cannot be read from the hub"),
        ((LocalEntryNotFoundError("gone"),), EnvironmentProblem, "the hub cannot be reached"),
        ((OSError("down"), LocalEntryNotFoundError("gone")), EnvironmentProblem, "the hub cannot be reached"),
    ],
)
def test_nothing_found(
    answers: tuple[Exception, ...],
    error: type[XpressError],
    named: str,
    hub: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer(*answers)
    with pytest.raises(error) as caught:
        locate("org/name")
    assert named in str(caught.value)
    assert "'org/name'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(hub) == len(answers)


def test_offline_and_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, told to stay offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvironmentProblem, match="org/name"):
        locate("org/name")
