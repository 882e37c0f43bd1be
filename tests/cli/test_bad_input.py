"""What a user can get wrong: one line, the right exit code, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Spoken
from tests.cli.invoke import Result, invoke, listing
from tests.conftest import Built
from tests.tiny import edit_json, write_drafter, write_target
from xpress_export import staging
from xpress_export.graphs.weights import WeightStore
from xpress_runtime.backends import registry
from xpress_runtime.backends.registry import BackendStatus

Spoil = Callable[[Path], object]


@pytest.fixture
def unchanged(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Call it when everything is in place: from then on nothing may appear, vanish or grow in the test's folder."""
    before: list[dict[str, int]] = []
    yield lambda: before.append(listing(tmp_path))
    assert before
    assert listing(tmp_path) == before[0]


@pytest.fixture
def build(folders: tuple[Path, Path], tmp_path: Path, unchanged: Callable[[], None]) -> Callable[..., Result]:
    """Build the folders in their present state, which must change nothing."""

    def build(*options: object, target: object = folders[0], drafter: object = folders[1], output: object = None) -> Result:
        unchanged()
        output = tmp_path / "bundle" if output is None else output
        return invoke("build", "--target", target, "--drafter", drafter, "--output", output, "--json", *options)

    return build


# Checkpoints. What can be wrong inside them is tested with the checkpoints; here: that it ends as it should.


def config(**changes: Any) -> Spoil:
    return lambda folder: edit_json(folder / "config.json", **changes)


def dflash(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dflash_config"]
        edit_json(folder / "config.json", dflash_config=values | changes)

    return spoil


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Spoil:
    """Replace a tensor, drop it (None), or add it where there is none."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name, torch.zeros(2))).contiguous()
        save_file(tensors, folder / "model.safetensors")

    return spoil


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def flip(offset: int, bit: int) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[offset] ^= 1 << bit
        path.write_bytes(content)

    return spoil


class Case(NamedTuple):
    name: str
    role: str
    spoil: Spoil
    named: tuple[str, ...]


CHECKPOINTS = [
    Case("no folder", "target", shutil.rmtree, ("target", "does not exist")),
    Case("no folder", "drafter", shutil.rmtree, ("drafter", "does not exist")),
    Case("no config", "target", lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    Case("no config", "drafter", lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    Case("no weights", "target", lambda folder: (folder / "model.safetensors").unlink(), ("model.safetensors",)),
    Case("config is no JSON", "target", lambda folder: (folder / "config.json").write_text("{"), ("config.json", "JSON")),
    Case("unsupported model_type", "target", config(model_type="gpt9"), ("gpt9", "llama")),
    Case("unsupported architecture", "drafter", config(architectures=["Eagle3"]), ("Eagle3",)),
    Case("field missing", "target", config(hidden_size=...), ("hidden_size", "missing")),
    Case("field missing", "drafter", config(block_size=...), ("block_size", "missing")),
    Case("field misspelled", "drafter", config(block_size=..., blocksize=4), ("blocksize",)),
    Case("field absurd", "target", config(num_hidden_layers=10**9), ("num_hidden_layers", "1000000000")),
    Case("field absurd", "drafter", config(block_size="four"), ("block_size", "four")),
    Case("truncated", "target", truncate, ("model.safetensors", "damaged")),
    Case("truncated", "drafter", truncate, ("model.safetensors", "damaged")),
    Case("header length flipped", "target", flip(6, 7), ("model.safetensors",)),
    Case("header flipped", "drafter", flip(10, 7), ("model.safetensors",)),
    Case("tensor missing", "target", tensor("model.norm.weight", None), ("model.norm.weight", "missing")),
    Case("tensor missing", "drafter", tensor("fc.weight", None), ("fc.weight", "missing")),
    Case("tensor extra", "target", tensor("model.surprise", lambda found: found), ("model.surprise",)),
    Case("tensor misshapen", "drafter", tensor("fc.weight", lambda found: found.T), ("fc.weight", "[40, 80]", "[80, 40]")),
    Case("mask id", "drafter", dflash(mask_token_id=61), ("mask_token_id", "61")),
    Case("tap", "drafter", dflash(target_layer_ids=[0, 3]), ("layer 3", "2")),
    Case("tap missing", "drafter", dflash(target_layer_ids=None), ("target_layer_ids",)),
]


@pytest.mark.parametrize("case", CHECKPOINTS, ids=lambda case: f"{case.role}: {case.name}")
@pytest.mark.parametrize("command", ["build", "export"])
def test_spoilt_checkpoint(command: str, case: Case, folders: tuple[Path, Path], tmp_path: Path, unchanged: Callable[[], None]) -> None:
    case.spoil(folders[0 if case.role == "target" else 1])
    unchanged()
    result = invoke(command, "--target", folders[0], "--drafter", folders[1], "--output", tmp_path / "new" / "output")
    result.assert_refused(2, *case.named)


def test_flipped_value(build: Callable[..., Result], folders: tuple[Path, Path]) -> None:
    # Noticed only when the tensor is read, in the middle of the work.
    path = folders[0] / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][3, 3] = float("inf")
    save_file(tensors, path)
    build("--num-passes", "0", "--no-sampling").assert_refused(2, "model.embed_tokens.weight", "not finite")


def test_drafter_for_another_target(build: Callable[..., Result], folders: tuple[Path, Path], tmp_path: Path) -> None:
    write_target(tmp_path / "other", "llama", vocab_size=67)
    build(target=tmp_path / "other").assert_refused(2, "vocabulary size", "61", "67", str(folders[1]), "another target")


def test_checkpoints_mixed_up(build: Callable[..., Result], folders: tuple[Path, Path]) -> None:
    build(target=folders[1], drafter=folders[0]).assert_refused(2, "is a drafter")


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_one_folder_as_both(role: str, build: Callable[..., Result], tmp_path: Path) -> None:
    build(target=tmp_path / role, drafter=tmp_path / role).assert_refused(2, role)


@pytest.mark.parametrize(
    "reference", ["", " ", "no such thing", "./nowhere", "nowhere/", "nowhere.gguf", "~nobody-here/x", "x" * 5000, "a\\b"]
)
def test_reference_that_names_nothing(reference: str, build: Callable[..., Result]) -> None:
    build(target=reference).assert_refused(2)


def test_revision_of_a_folder(build: Callable[..., Result]) -> None:
    build("--target-revision", "main").assert_refused(2, "main", "local path")


# Options.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--num-passes", "4"), ("4", "0 to 3", "block size 4")),
        (("--num-passes", "1,4"), ("4", "0 to 3")),
        (("--num-passes", "-1"), ("-1",)),
        (("--num-passes", "9" * 30), ("0 to 3",)),
        (("--num-passes", "two"), ("--num-passes", "two")),
        (("--num-passes", ""), ("--num-passes",)),
        (("--num-passes", "1,,2"), ("--num-passes", "1,,2")),
        (("--num-passes", "1.5"), ("--num-passes", "1.5")),
        (("--capacity", "0"), ("--capacity", "0", "x>=2")),
        (("--capacity", "1"), ("--capacity", "1", "x>=2")),
        (("--capacity", "-7"), ("--capacity", "-7")),
        (("--capacity", "129"), ("--capacity", "129", "2 to 128")),
        (("--capacity", "many"), ("--capacity", "many")),
        (("--batch", "0"), ("--batch", "0", "1<=x<=1024")),
        (("--batch", "1025"), ("--batch", "1025")),
        (("--shortlist", "62"), ("--shortlist", "62", "61")),
        (("--shortlist", "-1"), ("--shortlist", "-1")),
        (("--prefill-chunk", "0"), ("--prefill-chunk", "0")),
        (("--unknown", "1"), ("--unknown",)),
        (("stray",), ("stray",)),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_build_options(options: tuple[str, ...], named: tuple[str, ...], build: Callable[..., Result]) -> None:
    build(*options).assert_refused(2, *named)


def test_passes_of_a_bare_drafter(build: Callable[..., Result], folders: tuple[Path, Path], tmp_path: Path) -> None:
    write_drafter(tmp_path / "bare", folders[0], refiner=False)
    build("--num-passes", "1", drafter=tmp_path / "bare").assert_refused(2, "--num-passes", "bare")


def test_parity_that_could_not_run_is_missed_first(build: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    status = BackendStatus("ort-cpu", False, "pip install 'xpress-export[cpu]'")
    monkeypatch.setattr(registry, "probe_backends", lambda: [status])
    build().assert_refused(3, "xpress-export[cpu]")


# The output.


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
@pytest.mark.parametrize(
    "output",
    ["", ".", "..", "nowhere/..", os.sep, "../target", "../drafter", "../file", "../file/b", "../file/b/c", "../link", "../link/b"],
)
def test_output_in_the_way(
    output: str, force: tuple[str, ...], build: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    build(*force, output=output).assert_refused(2, "--output")


@pytest.mark.usefixtures("quick_export")
def test_existing_bundle(folders: tuple[Path, Path], tmp_path: Path) -> None:
    arguments = ("build", "--target", folders[0], "--drafter", folders[1], "--output", tmp_path / "bundle", "--no-parity")
    invoke(*arguments).assert_done()
    before = listing(tmp_path)
    invoke(*arguments).assert_refused(2, "exists already", "--force")
    assert listing(tmp_path) == before


@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize("stray", ["notes.txt", "graphs/mine.onnx", "target/model.safetensors", ".hidden", "tokenizer/vocab.txt"])
def test_force_keeps_what_is_not_its_own(stray: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    arguments = ("build", "--target", folders[0], "--drafter", folders[1], "--output", tmp_path / "bundle", "--no-parity", "--force")
    invoke(*arguments).assert_done()
    path = tmp_path / "bundle" / stray
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    before = listing(tmp_path)
    invoke(*arguments).assert_refused(2, stray, "not replaced")
    assert listing(tmp_path) == before
    path.unlink()
    # A bundle that is damaged is still one.
    (tmp_path / "bundle" / "bundle.json").write_text("{")
    invoke(*arguments).assert_done()
    assert list(tmp_path.glob(".*")) == []


def test_name_too_long(build: Callable[..., Result], tmp_path: Path) -> None:
    build(output=tmp_path / ("n" * 300)).assert_refused(2, "too long")


def test_output_that_may_not_be_written(build: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(staging.tempfile, "mkdtemp", refuse)
    build().assert_refused(2, "cannot be written", "Permission denied")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_parent_that_may_not_be_written(build: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    build(output=tmp_path / "closed" / "bundle").assert_refused(2, "cannot be written", "Permission denied")


def test_disk_without_room(build: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    build(output=tmp_path / "new" / "bundle").assert_refused(2, "0 MB free", "make room")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
def test_disk_that_fills_up(number: int, build: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def fill_up(_: WeightStore, __: object) -> None:
        seen.append([path.name for path in (tmp_path / "new").iterdir()])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(WeightStore, "externalize", fill_up)
    build(output=tmp_path / "new" / "bundle").assert_refused(2, "filled up", "nothing was left behind")
    assert len(seen) == 1
    assert seen[0][0].startswith(".bundle.partial-")


@pytest.mark.parametrize(("raised", "exit_code"), [(KeyboardInterrupt, 130), (SystemExit(143), 143)])
def test_interrupted_export(
    raised: BaseException, exit_code: int, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise raised

    monkeypatch.setattr("xpress_export.graph_set.export_graph", interrupt)
    before = listing(tmp_path)
    result = invoke("export", "--target", folders[0], "--drafter", folders[1], "--output", tmp_path / "new" / "graphs", "--json")
    assert result.exit_code == exit_code
    assert listing(tmp_path) == before


def test_second_interruption_does_not_stop_the_cleaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree
    impatient = [KeyboardInterrupt()]

    def remove_interrupted(folder: Path, **options: Any) -> None:
        if impatient:
            raise impatient.pop()
        remove(folder, **options)

    monkeypatch.setattr(staging.shutil, "rmtree", remove_interrupted)
    with pytest.raises(KeyboardInterrupt), staging.staged_folder(tmp_path / "a" / "b", needed_bytes=0, replace=False) as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    assert listing(tmp_path) == {}


# Prompts and settings.


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--tokens", ""), ("--tokens",)),
        (("--tokens", "one"), ("--tokens", "one")),
        (("--tokens", "1,,2"), ("--tokens", "1,,2")),
        (("--tokens", "1.5"), ("--tokens", "1.5")),
        (("--tokens", "-1"), ("-1", "0 to 60")),
        (("--tokens", "3,61"), ("item 1", "61", "0 to 60")),
        (("--tokens", "9" * 40), ("0 to 60",)),
        (("--tokens", ",".join(["1"] * 64)), ("64 tokens", "capacity is 64")),
        (("--tokens", "1", "Hello"), ("--tokens", "PROMPT")),
        (("--tokens", "1", "--chat"), ("--tokens", "--chat")),
        (("--tokens", "1", "--max-new-tokens", "0"), ("max_new_tokens", "0")),
        (("--tokens", "1", "--max-new-tokens", "few"), ("--max-new-tokens", "few")),
        (("--tokens", "1", "--num-passes", "4"), ("num_passes", "4", "0, 1, 2, 3")),
        (("--tokens", "1", "--num-passes", "-1"), ("num_passes", "-1")),
        (("--tokens", "1", "--backend", "abacus"), ("abacus", "ort-cpu")),
        (("--tokens", "1", "--threads", "0"), ("--threads", "0")),
        (("--tokens", "1", "--threads", "100000"), ("--threads", "100000")),
        (("--tokens", "1", "--speculation", "maybe"), ("--speculation", "maybe")),
        (("--tokens", "1", "--stop", ""), ("stop",)),
        (("--tokens", "1", "--stop", "x"), ("tokenizer",)),
        (("--tokens", "1", "--warn-acceptance", "low"), ("--warn-acceptance", "low")),
        (("Hello",), ("no tokenizer",)),
        (("--chat", "Hello"), ("no tokenizer",)),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_generate(arguments: tuple[str, ...], named: tuple[str, ...], tiny: Built) -> None:
    invoke("generate", tiny.bundle.folder, *arguments).assert_refused(2, *named)


@pytest.mark.parametrize("prompt", ["", " ", "\n\t \u3000"])
def test_prompt_without_text(prompt: str, spoken: Spoken) -> None:
    invoke("generate", spoken.bundle, prompt).assert_refused(2, "prompt is empty")
    invoke("generate", spoken.bundle, stdin=prompt.encode()).assert_refused(2, "prompt is empty")


@pytest.mark.parametrize("mode", ["--chat", "--raw"])
def test_prompt_longer_than_the_capacity(mode: str, spoken: Spoken) -> None:
    invoke("generate", spoken.bundle, mode, "prompt " * 500).assert_refused(2, "capacity is 128", "--capacity")


def test_prompt_that_is_no_text(spoken: Spoken) -> None:
    invoke("generate", spoken.bundle, stdin=b"caf\xe9").assert_refused(2, "not UTF-8", "byte 3")
    invoke("generate", spoken.bundle, "caf\udce9").assert_refused(2, "not valid Unicode")
    invoke("chat", spoken.bundle, stdin=b"caf\xe9\n").assert_refused(2, "not UTF-8")


def test_closed_standard_input(spoken: Spoken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cli.invoke.io.TextIOWrapper", lambda *_, **__: None)
    invoke("generate", spoken.bundle).assert_refused(2, "no prompt")
    assert invoke("chat", spoken.bundle).assert_done().out == ""


def test_system_message_without_a_chat(spoken: Spoken) -> None:
    invoke("generate", spoken.bundle, "--raw", "--system", "Be brief.", "Hello").assert_refused(2, "--system", "--raw")


def test_chat_without_a_template(tiny: Built) -> None:
    invoke("chat", tiny.bundle.folder, stdin=b"Hello\n").assert_refused(2, "no chat template", "generate")


def test_no_backend_runs(tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    status = BackendStatus("ort-cpu", False, "pip install 'xpress-export[cpu]'")
    monkeypatch.setattr(registry, "probe_backends", lambda: [status])
    for options in ((), ("--backend", "ort-cpu")):
        invoke("generate", tiny.bundle.folder, "--tokens", "1", *options).assert_refused(3, "ort-cpu", "xpress-export[cpu]")


# Bundles. What can be wrong inside them is tested with the runtime.


def change_a_byte(bundle: Path) -> None:
    path = bundle / "graphs/fp32-length/head.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def list_file(name: str) -> Spoil:
    def spoil(bundle: Path) -> None:
        files = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["files"]
        edit_json(bundle / "bundle.json", files=files | {name: {"bytes": 1, "sha256": "0" * 64}})

    return spoil


BUNDLES: list[tuple[str, Spoil, tuple[str, ...]]] = [
    ("missing", shutil.rmtree, ("a bundle", "xpress-export build")),
    ("no description", lambda bundle: (bundle / "bundle.json").unlink(), ("bundle.json", "xpress-export build")),
    ("not JSON", lambda bundle: (bundle / "bundle.json").write_text("{"), ("bundle.json", "JSON")),
    ("changed byte", change_a_byte, ("head.onnx", "sha256")),
    ("missing file", lambda bundle: (bundle / "graphs/fp32-length/head.onnx").unlink(), ("head.onnx", "missing")),
    ("newer", lambda bundle: edit_json(bundle / "bundle.json", format_version=99), ("99", "newer")),
    ("older", lambda bundle: edit_json(bundle / "bundle.json", format_version=0), ("0", "older")),
    ("path outside", list_file("../../file"), ("../../file", "leaves")),
    ("absolute path", list_file("/etc/hostname"), ("/etc/hostname", "leaves")),
    ("wrong type", lambda bundle: edit_json(bundle / "bundle.json", capacity="64"), ("capacity", '"64"', "integer")),
]


@pytest.mark.parametrize("command", [("generate", "--tokens", "1"), ("inspect",), ("parity",), ("chat",)], ids=lambda command: command[0])
@pytest.mark.parametrize(("name", "spoil", "named"), BUNDLES, ids=lambda value: value if isinstance(value, str) else "")
def test_spoilt_bundle(
    name: str,  # noqa: ARG001
    spoil: Spoil,
    named: tuple[str, ...],
    command: tuple[str, ...],
    tiny: Built,
    tmp_path: Path,
    unchanged: Callable[[], None],
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny.bundle.folder, bundle)
    spoil(bundle)
    unchanged()
    invoke(command[0], bundle, *command[1:], stdin=b"Hello\n").assert_refused(2, *named)


@pytest.mark.parametrize("arguments", [("--capacity", "0"), ("--capacity", "much"), ("--batch", "0")], ids=" ".join)
def test_inspect(arguments: tuple[str, ...], tiny: Built) -> None:
    invoke("inspect", tiny.bundle.folder, *arguments).assert_refused(2, *arguments)


def test_demo_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    invoke("demo", "--cache", tmp_path / "file").assert_refused(2, str(tmp_path / "file"))
    invoke("demo", "--max-new-tokens", "1").assert_refused(2, "--max-new-tokens")
