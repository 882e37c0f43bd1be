"""Every command on a bundle that works: what it prints, what it writes, exit code 0; and parity's exit code 1."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.cli.conftest import Spoken
from tests.cli.invoke import Result, invoke, listing
from tests.conftest import Built
from xpress_runtime.backends import registry
from xpress_runtime.backends.registry import BackendStatus
from xpress_runtime.graph_names import graph_names
from xpress_runtime.version import BUNDLE_FORMAT, VERSION

ROUND = "drafts before refinement"
GRAPHS = list(graph_names((1, 0), (0,), sampling=True, draft_model_shares_tables=None))


def manifest_of(bundle: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    return values


@pytest.fixture
def spoken_copy(spoken: Spoken, tmp_path: Path) -> Path:
    return Path(shutil.copytree(spoken.bundle, tmp_path / "bundle"))


# build and export.


def test_build_checks_parity_by_default(spoken: Spoken) -> None:
    result = spoken.result.assert_done()
    assert result.out.splitlines()[-1] == f"bundle: {spoken.bundle}"
    steps = [line.partition(" (")[0].split()[-1] for line in result.err.splitlines() if line.startswith("build: ")]
    assert steps == ["tokenizer", *GRAPHS, "manifest"]
    manifest = manifest_of(spoken.bundle)
    assert manifest["format_version"] == BUNDLE_FORMAT
    assert manifest["num_passes"] == [1, 0]
    assert manifest["has_tokenizer"]
    parity = manifest["parity"]["fp32-length"]
    assert parity["passed"]
    assert set(parity["graphs"]) == set(GRAPHS)
    assert all(graph["passed"] for graph in parity["graphs"].values())
    for graph in parity["graphs"]:
        assert graph in result.out
    # Nothing beside the bundle and what it was built from.
    assert sorted(path.name for path in spoken.bundle.parent.iterdir()) == ["bundle", "drafter", "target"]


@pytest.mark.usefixtures("quick_export")
def test_build_json(folders: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    options = ("--num-passes", "3,1", "--shortlist", "7,0", "--capacity", "50", "--batch", "2", "--prefill-chunk", "9")
    result = invoke("build", "--target", folders[0], "--drafter", folders[1], "--output", output, "--no-parity", "--json", *options)
    assert json.loads(result.assert_done().out) == {"bundle": str(output), "parity": None}
    assert result.err == ""
    manifest = manifest_of(output)
    wanted = {"num_passes": [3, 1, 0], "shortlists": [7, 0], "capacity": 50, "batch": 2, "prefill_chunk": 9, "parity": None}
    assert {name: manifest[name] for name in wanted} == wanted


@pytest.mark.usefixtures("quick_export")
def test_export_json(folders: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "graphs"
    result = invoke("export", "--target", folders[0], "--drafter", folders[1], "--output", output, "--num-passes", "1", "--json")
    shown = json.loads(result.assert_done().out)
    assert result.err == ""
    assert shown["folder"] == str(output)
    assert list(shown["graphs"]) == GRAPHS
    assert sorted(path.name for path in output.iterdir()) == sorted([*(f"{name}.onnx" for name in shown["graphs"]), "weights.bin"])


def test_export_in_half_precision(folders: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "graphs"
    sizes = ("--num-passes", "1", "--capacity", "40", "--precision", "fp16", "--no-sampling")
    invoke("export", "--target", folders[0], "--drafter", folders[1], "--output", output, *sizes).assert_done()
    model = onnx.load(output / "target.onnx", load_external_data=False)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert (metadata["xpress.precision"], metadata["xpress.attention_form"]) == ("fp16", "mask")
    assert {value.type.tensor_type.elem_type for value in model.graph.output} == {onnx.TensorProto.FLOAT16}


@pytest.mark.usefixtures("quick_export")
def test_export_says_what_it_wrote(folders: tuple[Path, Path], tmp_path: Path) -> None:
    result = invoke("export", "--target", folders[0], "--drafter", folders[1], "--output", tmp_path / "graphs")
    assert f"{tmp_path / 'graphs' / 'head.onnx'}  1 operators" in result.assert_done().out.splitlines()
    assert "export: head" in result.err


@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize("command", ["build", "export"])
def test_force_replaces_its_own_output(command: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "output"
    arguments = [command, "--target", folders[0], "--drafter", folders[1], "--output", output]
    arguments += ["--no-parity"] if command == "build" else []
    invoke(*arguments, "--num-passes", "3").assert_done()
    assert list(output.rglob("refiner-k3.onnx"))
    invoke(*arguments, "--num-passes", "1", "--force").assert_done()
    assert not list(output.rglob("refiner-k3.onnx"))
    assert list(output.rglob("refiner-k1.onnx"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "output", "target"]


@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize(
    "name", ["out", "out/", "./out", "new/deep/out", "target/inside", "日本 ü 🎉", "--out", "a" * 200, "target/../out"]
)
def test_names_of_outputs(name: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("build", "--target", "target/", "--drafter", "./drafter", f"--output={name}", "--no-parity").assert_done()
    assert manifest_of(tmp_path / name)["target"]["origin"]["source"] == str(tmp_path / "target")
    assert sorted(path.name for path in folders[0].iterdir() if path.name != "inside") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    invoke("inspect", tmp_path / name).assert_done()
    assert [path for path in tmp_path.rglob("*") if "partial" in path.name] == []


@pytest.mark.usefixtures("quick_export")
def test_force_into_an_empty_folder(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    invoke("build", "--target", folders[0], "--drafter", folders[1], "--output", tmp_path / "empty", "--no-parity", "--force").assert_done()
    assert manifest_of(tmp_path / "empty")


# parity.


def test_parity_writes_its_result(spoken_copy: Path) -> None:
    manifest = manifest_of(spoken_copy)
    recorded = manifest["parity"]
    (spoken_copy / "bundle.json").write_text(json.dumps(manifest | {"parity": None}), encoding="utf-8")
    shown = json.loads(invoke("parity", spoken_copy, "--json", "--threads", "1").assert_done().out)
    assert manifest_of(spoken_copy)["parity"] == shown
    assert shown["fp32-length"]["passed"]
    assert set(shown["fp32-length"]["graphs"]) == set(recorded["fp32-length"]["graphs"])


def test_parity_on_prompts_of_ones_own(spoken_copy: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('Once upon a time\n\n{"prompt": "Explain rainbows."}\n{x} = 3\n', encoding="utf-8")
    arguments = ("parity", spoken_copy, "--precision", "fp32", "--prompts", prompts, "--max-new-tokens", "5", "--json")
    generation = json.loads(invoke(*arguments).assert_done().out)["fp32-length"]["generation"]
    assert (generation["prompts"], generation["modes"]) == (3, ["plain", "K=1", "K=0", "2 draft steps", "lookup"])
    assert generation["tokens"] <= 3 * 5 * 5


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("\n \n", "is empty"),
        ('{"text": "x"}\n', "line 1 has no text 'prompt'"),
        ('fine\n{"prompt": " "}\n', "line 2 has no text 'prompt'"),
        ('{"prompt": "\\ud800"}\n', "line 1 holds half of a surrogate pair"),
        (None, "cannot be read: No such file"),
    ],
)
def test_parity_on_prompts_that_are_none(spoken_copy: Path, tmp_path: Path, content: str | None, named: str) -> None:
    prompts = tmp_path / "prompts"
    if content is not None:
        prompts.write_text(content, encoding="utf-8")
    before = listing(spoken_copy)
    invoke("parity", spoken_copy, "--prompts", prompts).assert_refused(2, str(prompts), named)
    assert listing(spoken_copy) == before


def test_parity_in_a_precision_that_is_not_there(spoken_copy: Path) -> None:
    refused = invoke("parity", spoken_copy, "--precision", "fp16")
    refused.assert_refused(2, "no graphs in fp16", "it holds: fp32-length", "--precision fp16")


def test_parity_names_the_graph_that_differs(spoken_copy: Path) -> None:
    folder = spoken_copy / "graphs" / "fp32-length"
    head = onnx.load(folder / "head.onnx", load_external_data=False)
    (table,) = (tensor for tensor in head.graph.initializer if tensor.external_data)
    offset = next(int(entry.value) for entry in table.external_data if entry.key == "offset")
    weights = np.fromfile(folder / "weights.bin", np.float32)
    weights[offset // 4] = 1000
    weights.tofile(folder / "weights.bin")
    manifest = manifest_of(spoken_copy)
    name = "graphs/fp32-length/weights.bin"
    manifest["files"][name]["sha256"] = hashlib.sha256((spoken_copy / name).read_bytes()).hexdigest()
    (spoken_copy / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")

    result = invoke("--log-level", "error", "parity", spoken_copy, "--json")
    shown = json.loads(result.out)
    assert not shown["fp32-length"]["passed"]
    assert [graph for graph, entry in shown["fp32-length"]["graphs"].items() if not entry["passed"]] == ["head"]
    Result(result.exit_code, "", result.err).assert_refused(1, "parity failed", "graph head")
    assert manifest_of(spoken_copy)["parity"] == shown
    assert "FAILED" in invoke("inspect", spoken_copy).assert_done().out


def test_parity_against_other_checkpoints(spoken_copy: Path, spoken: Spoken, folders: tuple[Path, Path]) -> None:
    before = listing(spoken_copy)
    invoke("parity", spoken_copy, "--target", folders[0]).assert_refused(2, "another target", str(folders[0]))
    invoke("parity", spoken_copy, "--drafter", folders[1]).assert_refused(2, "another drafter", str(folders[1]))
    invoke("parity", spoken_copy, "--target", spoken.drafter).assert_refused(2, "is a drafter")
    assert listing(spoken_copy) == before


def test_parity_does_not_ask_the_hub_for_a_folder(spoken_copy: Path) -> None:
    manifest = manifest_of(spoken_copy)
    manifest["drafter"]["origin"]["source"] = "models/drafter"
    (spoken_copy / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    invoke("parity", spoken_copy).assert_refused(2, "'models/drafter'", "not here", "--drafter")


# generate and chat.


def test_generate_from_tokens(tiny: Built) -> None:
    arguments = ("generate", tiny.bundle.folder, "--tokens", "1,2,3", "--max-new-tokens", "6", "--ignore-stop")
    result = invoke(*arguments).assert_done()
    tokens = [int(token) for token in result.out.split(",")]
    assert len(tokens) == 6
    for options in (("--speculation", "off"), ("--num-passes", "0"), ("--num-passes", "3"), ("--threads", "1"), ("--backend", "ort-cpu")):
        assert invoke(*arguments, *options).assert_done().out == result.out
    shown = json.loads(invoke(*arguments, "--json").assert_done().out)
    assert shown["tokens"] == tokens
    assert shown["finish_reason"] == "length"
    assert shown["stats"]["output_tokens"] == 6
    assert shown["stats"]["peak_memory_bytes"] > 0


@pytest.mark.parametrize("options", [(), ("--raw",), ("--chat",), ("--system", "Be brief.")])
def test_generate_text(spoken: Spoken, options: tuple[str, ...]) -> None:
    arguments = ("generate", spoken.bundle, *options, "--max-new-tokens", "12", "--ignore-stop")
    streamed = invoke(*arguments, "Hello world").assert_done().out
    piped = invoke(*arguments, stdin=b"Hello world").assert_done().out
    shown = json.loads(invoke(*arguments, "Hello world", "--json").assert_done().out)
    assert streamed == piped == shown["text"] + "\n"
    assert shown["stats"]["prompt_tokens"] > (5 if options != ("--raw",) else 0)


def test_generate_stops_at_a_string(spoken: Spoken) -> None:
    arguments = ("generate", spoken.bundle, "Hello", "--raw", "--max-new-tokens", "16", "--ignore-stop", "--json")
    text = json.loads(invoke(*arguments).assert_done().out)["text"]
    stop = text[len(text) // 2 :][:1]
    shown = json.loads(invoke(*arguments, "--stop", stop).assert_done().out)
    assert shown["finish_reason"] == "stop"
    assert shown["text"] == text.partition(stop)[0]


def test_generate_stats(tiny: Built) -> None:
    arguments = (
        "--log-level",
        "error",
        "generate",
        tiny.bundle.folder,
        "--tokens",
        "5",
        "--max-new-tokens",
        "7",
        "--ignore-stop",
        "--stats",
    )
    shown = invoke(*arguments).assert_done().err.splitlines()
    assert [line.partition(":")[0] for line in shown] == ["backend", "tokens", "acceptance", "time"]
    assert shown[0] == "backend: ort-cpu"
    assert shown[1].startswith("tokens: 1 in, 7 out (length)")
    # Plain decoding proposes nothing, and one token has no rounds.
    shown = invoke(*arguments, "--speculation", "off").assert_done().err.splitlines()
    assert [line.partition(":")[0] for line in shown] == ["backend", "tokens", "time"]
    shown = invoke(*arguments, "--max-new-tokens", "1").assert_done().err.splitlines()
    assert [line.partition(":")[0] for line in shown] == ["backend", "tokens"]


def test_generate_up_to_the_capacity(tiny: Built) -> None:
    prompt = ",".join(["7"] * 60)
    arguments = ("generate", tiny.bundle.folder, "--tokens", prompt, "--ignore-stop", "--json")
    shown = json.loads(invoke(*arguments).assert_done().out)
    assert shown["finish_reason"] == "capacity"
    assert len(shown["tokens"]) == 4


def test_log_levels(tiny: Built) -> None:
    arguments = ("generate", tiny.bundle.folder, "--tokens", "1,2", "--max-new-tokens", "12", "--ignore-stop")
    # No drafter is that good, and no round that quick.
    arguments += ("--warn-acceptance", "1.1", "--warn-round-ms", "0")
    logged = {level: invoke("--log-level", level, *arguments).assert_done().err for level in ("debug", "info", "warning", "error")}
    assert logged["debug"].count(ROUND) == logged["debug"].count("after 2 passes") >= 1
    assert ROUND not in logged["info"]
    assert "mean acceptance length" in logged["info"]
    assert "mean acceptance length" not in logged["warning"]
    for part in ("acceptance rate", "a round took"):
        assert part in logged["warning"]
    assert logged["error"] == ""
    assert invoke(*arguments).assert_done().err.count("WARNING") == 2


def test_chat(spoken: Spoken) -> None:
    arguments = ("chat", spoken.bundle, "--max-new-tokens", "4", "--ignore-stop")
    one = invoke(*arguments, stdin=b"Hello\n").assert_done().out
    assert one.endswith("\n")
    # What went before belongs to the next prompt, unless the conversation begins anew.
    assert invoke(*arguments, stdin=b"Hello\n/reset\n\nHello\n").assert_done().out == one * 2
    assert invoke(*arguments, stdin=b"Hello\n/quit\nHello\n").assert_done().out == one
    assert invoke(*arguments, stdin=b"").assert_done().out == ""
    shown = invoke("--log-level", "error", *arguments, "--stats", "--system", "Be brief.", stdin="日本\n".encode()).assert_done()
    assert shown.err.startswith("tokens: ")


def test_chat_goes_on_after_a_question_that_is_too_long(spoken: Spoken) -> None:
    arguments = ("--log-level", "error", "chat", spoken.bundle, "--max-new-tokens", "3", "--ignore-stop")
    one = invoke(*arguments, stdin=b"Hello\n").assert_done().out
    both = invoke(*arguments, stdin=b"x" * 2000 + b"\nHello\n").assert_done()
    assert both.out == one
    assert "capacity" in both.err
    assert both.err.count("\n") == 1


# inspect and doctor.


def test_inspect(spoken: Spoken) -> None:
    shown = invoke("inspect", spoken.bundle).assert_done().out
    for part in (
        str(spoken.target),
        str(spoken.drafter),
        "passes 1, 0",
        "capacity 128",
        "tokenizer yes",
        "parity    fp32-length passed",
        "memory for",
    ):
        assert part in shown
    for graph in ("embed", "target", "head", "drafter", "refiner-k1", "refiner-k0", "accept"):
        assert f"\n{graph} " in shown


def test_inspect_json(tiny: Built) -> None:
    shown = json.loads(invoke("inspect", tiny.bundle.folder, "--json").assert_done().out)
    memory = shown.pop("memory")["fp32-length"]
    assert shown.pop("engines") == {}
    assert shown == manifest_of(tiny.bundle.folder)
    assert memory["total"] == sum(memory[part] for part in ("weights", "target_caches", "drafter_caches", "working"))
    more = invoke("inspect", tiny.bundle.folder, "--json", "--capacity", "1000", "--batch", "5", "--no-verify").assert_done().out
    assert json.loads(more)["memory"]["fp32-length"]["total"] > memory["total"]


def test_doctor() -> None:
    shown = invoke("doctor").assert_done().out
    assert "build, export, parity, demo: yes" in shown
    assert "backend ort-cpu: runs" in shown
    values = json.loads(invoke("doctor", "--json").assert_done().out)
    assert values["xpress-export"] == VERSION
    assert values["packages"]["torch"] == importlib.metadata.version("torch")
    assert values["backends"]["ort-cpu"] == {"runs": True, "reason": ""}


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(package: str) -> str:
        if package in ("torch", "onnxruntime"):
            raise importlib.metadata.PackageNotFoundError(package)
        return installed(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    status = BackendStatus("ort-cpu", False, "onnxruntime is not installed")
    monkeypatch.setattr("xpress_runtime.backends.probe_backends", lambda: [status])
    monkeypatch.setattr(registry, "probe_backends", lambda: [status])
    shown = invoke("doctor").assert_done().out
    assert "pip install 'xpress-export[export]'" in shown
    assert "pip install 'xpress-export[cpu]'" in shown
    assert "build, export, parity, demo: no" in shown
    assert "backend ort-cpu: onnxruntime is not installed" in shown
