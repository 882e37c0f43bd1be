"""The public face: prompts of every kind, streams that are abandoned or overtaken, and what is refused."""

from __future__ import annotations

import json
import logging
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Built, build
from tests.runtime.tiny_tokenizers import CHATML, byte_level
from tests.tiny import write_drafter, write_target
from xpress_runtime import GenerationConfig, Session, WarningThresholds
from xpress_runtime.errors import BundleError, EnvironmentProblem, OptionError, PromptError
from xpress_runtime.plan import Plan

MESSAGES = [{"role": "user", "content": "Hello 🎉 world"}]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A random target with a byte-level tokenizer and a chat template, and a drafter for it."""
    folder = tmp_path_factory.mktemp("spoken")
    tokenizer = byte_level()
    write_target(folder / "target", "llama", vocab_size=tokenizer.get_vocab_size(), eos_token_id=None)
    tokenizer.save(str(folder / "target" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    write_drafter(folder / "drafter", folder / "target")
    return build(folder / "target", folder / "drafter", folder / "bundle", num_passes=(2,), capacity=96, prefill_chunk=16)


@pytest.fixture(scope="module")
def session(spoken: Built) -> Any:
    with Session.open(spoken.bundle.folder, threads=1) as opened:
        yield opened


def test_prompts_of_every_kind(session: Session) -> None:
    assert session.tokenizer is not None
    text = "<|im_start|>user\nHello 🎉 world<|im_end|>\n<|im_start|>assistant\n"
    assert session.encode(MESSAGES) == session.tokenizer.encode(text)
    assert session.encode([5, 6, 7]) == [5, 6, 7]
    config = GenerationConfig(12)
    assert session.generate(MESSAGES, config).tokens == session.generate(session.encode(MESSAGES), config).tokens


@pytest.mark.parametrize(
    "prompt, complaint",
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, -1], "prompt item 1 is -1"),
        ([10**9], "prompt item 0 is 1000000000"),
        ([1, 2.0], "prompt item 1 is 2.0"),
        ([True], "prompt item 0 is True"),
        ([{"role": "user"}], "message 0"),
        ([{"role": "user", "content": 3}], "message 0"),
        ([{"role": "user", "content": "a"}, "b"], "prompt item 0"),
        ("x " * 400, "capacity is 96"),
        (5, "the prompt is a int"),
        (None, "the prompt is a NoneType"),
        (b"ab", "the prompt is a bytes"),
        ({"role": "user", "content": "a"}, "the prompt is a dict"),
    ],
)
def test_prompts_that_are_refused(session: Session, prompt: Any, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        session.generate(prompt)


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"max_new_tokens": math.nan}, "max_new_tokens is nan"),
        ({"speculation": "maybe"}, "speculation is 'maybe'"),
        ({"stop": "abc"}, "stop is 'abc'"),
        ({"stop": [""]}, "stop is"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is"),
        ({"stop": None}, "stop is None"),
        ({"stop": 5}, "stop is 5"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": [True]}, "stop_token_ids is"),
        ({"num_passes": True}, "num_passes is True"),
        ({"num_passes": "2"}, "num_passes is '2'"),
        ({"num_passes": 1}, "built for 0, 2"),
        ({"num_passes": 2, "speculation": "off"}, "speculation is off"),
    ],
)
def test_settings_that_are_refused(session: Session, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        session.generate("Hello", GenerationConfig(**fields))


def test_pieces_are_the_text(session: Session) -> None:
    for config in (GenerationConfig(60), GenerationConfig(60, speculation="off"), GenerationConfig(60, num_passes=0)):
        stream = session.stream("Hello", config)
        pieces = list(stream)
        assert session.tokenizer is not None
        assert "".join(piece.text for piece in pieces) == stream.result.text == session.tokenizer.decode(list(stream.result.tokens))
        assert [token for piece in pieces for token in piece.tokens] == list(stream.result.tokens)


def test_all_modes_agree(session: Session) -> None:
    results = [session.generate(MESSAGES, GenerationConfig(70, speculation="off"))]
    results += [session.generate(MESSAGES, GenerationConfig(70, num_passes=passes)) for passes in (0, 2)]
    assert len({result.tokens for result in results}) == 1
    assert len({result.finish_reason for result in results}) == 1


def test_stop_string_cuts_text_and_tokens(session: Session) -> None:
    whole = session.generate("Hello", GenerationConfig(60))
    stop = whole.text[7:9]
    for fields in ({}, {"speculation": "off"}, {"num_passes": 0}):
        result = session.generate("Hello", GenerationConfig(60, stop=[stop], **fields))  # type: ignore[arg-type]
        assert result.text == whole.text[: whole.text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.tokens == whole.tokens[: len(result.tokens)]
        assert session.tokenizer is not None
        assert stop in session.tokenizer.decode(list(result.tokens))
        assert stop not in session.tokenizer.decode(list(result.tokens[:-1]))


def test_stop_token_is_the_last_token_and_not_in_the_text(session: Session) -> None:
    whole = session.generate("Hello", GenerationConfig(60))
    stop = whole.tokens[20]
    first = whole.tokens.index(stop)
    result = session.generate("Hello", GenerationConfig(60, stop_token_ids=[stop]))
    assert result.tokens == whole.tokens[: first + 1]
    assert session.tokenizer is not None
    assert result.text == session.tokenizer.decode(list(whole.tokens[:first]))


def test_an_abandoned_stream_leaves_the_session_usable(session: Session) -> None:
    expected = session.generate(MESSAGES, GenerationConfig(40)).tokens
    for pieces in (1, 2, 5):
        stream = session.stream("Something else entirely", GenerationConfig(40))
        for _ in range(pieces):
            next(stream)
        assert session.generate(MESSAGES, GenerationConfig(40)).tokens == expected


def test_an_overtaken_stream_ends_with_a_clear_error(session: Session) -> None:
    stream = session.stream("Hello", GenerationConfig(40))
    next(stream)
    session.generate("Other", GenerationConfig(4))
    with pytest.raises(OptionError, match="another one began"):
        next(stream)
    with pytest.raises(OptionError, match="has not ended"):
        _ = stream.result


def test_a_refused_request_does_not_end_a_running_stream(session: Session) -> None:
    expected = session.generate("Hello", GenerationConfig(30)).tokens
    stream = session.stream("Hello", GenerationConfig(30))
    next(stream)
    with pytest.raises(PromptError):
        session.stream("")
    for _ in stream:
        pass
    assert stream.result.tokens == expected


def test_a_closed_session_says_so(spoken: Built) -> None:
    session = Session.open(spoken.bundle.folder, threads=1)
    stream = session.stream("Hello")
    session.close()
    with pytest.raises(OptionError, match="closed"):
        session.generate("Hello")
    with pytest.raises(OptionError):
        next(stream)


def test_statistics_add_up(session: Session) -> None:
    result = session.generate(MESSAGES, GenerationConfig(50))
    stats = result.stats
    assert stats.output_tokens == len(result.tokens) == 50
    assert stats.rounds == len(stats.acceptance_lengths) == len(stats.kept_lengths)
    assert stats.proposed == 3 * stats.rounds
    assert stats.accepted + stats.rounds >= stats.output_tokens - 1
    assert stats.mean_acceptance_length == pytest.approx(49 / stats.rounds)
    figures = stats.to_json()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["draft_ms"] > 0 and figures["refine_ms"] > 0 and figures["verify_ms"] > 0
    graph_ms = figures["draft_ms"] + figures["refine_ms"] + figures["verify_ms"]
    assert graph_ms + figures["host_ms"] == pytest.approx(figures["decode_ms"])
    assert figures["peak_memory_bytes"] > 10**7


def test_one_token_needs_no_round(session: Session) -> None:
    stats = session.generate("Hello", GenerationConfig(1)).stats
    assert (stats.rounds, stats.ms_per_token, stats.mean_acceptance_length, stats.acceptance_rate) == (0, None, None, None)
    assert stats.acceptance_by_position == []


def test_warnings_have_thresholds(spoken: Built, caplog: pytest.LogCaptureFixture) -> None:
    for thresholds, expected in ((WarningThresholds(1.1, 0.0), 2), (WarningThresholds(0.0, 1e9), 0)):
        caplog.clear()
        with Session.open(spoken.bundle.folder, threads=1, thresholds=thresholds) as session:
            session.generate("Hello", GenerationConfig(20))
        assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == expected


def test_without_a_tokenizer_only_ids_are_taken(tiny: Built) -> None:
    with Session.open(tiny.bundle.folder, threads=1) as session:
        result = session.generate([3, 4], GenerationConfig(10, ignore_stop=True))
        assert len(result.tokens) == 10 and result.text == ""
        for prompt in ("text", MESSAGES):
            with pytest.raises(PromptError, match="no tokenizer"):
                session.generate(prompt)
        with pytest.raises(OptionError, match="need a tokenizer"):
            session.generate([3], GenerationConfig(stop=["x"]))


def test_opening_what_cannot_be_opened(tiny: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match="not a bundle folder"):
        Session.open(tmp_path / "missing")
    with pytest.raises(OptionError, match="threads is 0"):
        Session.open(tiny.bundle.folder, threads=0)
    with pytest.raises(OptionError, match="'cuda' does not exist"):
        Session.open(tiny.bundle.folder, "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    for backend in ("auto", "ort-cpu"):
        with pytest.raises(EnvironmentProblem, match=r"xpress-export\[cpu\]"):
            Session.open(tiny.bundle.folder, backend)


@pytest.mark.parametrize("change", [{"drafter": {"caches": {"num_layers": 1}}}, {"target": {"caches": {"num_layers": 9}}}])
def test_a_manifest_that_disagrees_with_its_graphs(spoken: Built, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(spoken.bundle.folder, folder)
    manifest = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    _merge(manifest, change)
    (folder / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BundleError, match="not those that the manifest describes"), Session.open(folder, threads=1) as session:
        session.generate("Hello", GenerationConfig(4))


def _merge(values: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        if isinstance(value, dict):
            _merge(values[name], value)
        else:
            values[name] = value


def test_threads_wait_for_each_other(session: Session) -> None:
    prompts = ["Hello", "world", "emoji 🎉", "In 2024"]
    expected = [session.generate(prompt, GenerationConfig(30)).tokens for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: session.generate(prompt, GenerationConfig(30)).tokens, prompts * 6))
    assert found == expected * 6


def test_streams_of_two_threads_end_with_a_clear_error_or_rightly(session: Session) -> None:
    expected = session.generate("Hello", GenerationConfig(40)).tokens

    def run(_index: int) -> tuple[int, ...] | None:
        stream = session.stream("Hello", GenerationConfig(40))
        try:
            for _ in stream:
                pass
        except OptionError:
            return None
        return stream.result.tokens

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(run, range(12)))
    assert set(outcomes) <= {expected, None} and expected in outcomes


def test_a_bundle_that_is_replaced_under_an_open_session(spoken: Built, tiny: Built, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(spoken.bundle.folder, folder)
    with Session.open(folder, threads=1) as session:
        shutil.rmtree(folder)
        shutil.copytree(tiny.bundle.folder, folder)
        # What was loaded when the session was opened goes on; what was not is refused.
        assert session.generate("Hello", GenerationConfig(8, speculation="off")).tokens
        with pytest.raises(BundleError, match="build or copy the bundle again"):
            session.generate("Hello", GenerationConfig(8))


def test_an_interrupted_round_ends_its_stream(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = session.stream("Hello", GenerationConfig(30))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "_fit_caches", lambda *_args, **_fields: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    with pytest.raises(OptionError, match="interrupted"):
        next(stream)
    assert session.generate("Hello", GenerationConfig(30)).tokens


def test_ids_of_numpy_are_ids(session: Session) -> None:
    assert session.encode(np.array([3, 4])) == session.encode(iter([3, 4])) == [3, 4]  # type: ignore[arg-type]
