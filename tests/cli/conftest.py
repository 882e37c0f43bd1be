"""Checkpoints and bundles for the commands, each made once, and a build that takes no time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.invoke import Result, invoke
from tests.runtime.tiny_tokenizers import CHATML, byte_level
from tests.tiny import write_drafter, write_target
from xpress_export import graph_set
from xpress_export.graphs.exporter import ExportedGraph
from xpress_export.graphs.spec import GraphSpec
from xpress_export.graphs.weights import WeightStore


@dataclass(frozen=True)
class Spoken:
    """A target that has a tokenizer, its drafter, and the bundle that ``build`` made of them with all defaults."""

    target: Path
    drafter: Path
    bundle: Path
    result: Result


@pytest.fixture(scope="session")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    """One layer each; the vocabulary is large enough for tables outside the graphs. It must not be changed."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("spoken")
    target, drafter, bundle = folder / "target", folder / "drafter", folder / "bundle"
    write_target(target, "qwen3", vocab_size=430, num_hidden_layers=1, eos_token_id=2)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>", chat_template=CHATML)
    tokenizer.save_pretrained(target)
    write_drafter(drafter, target, tap_layers=(0,), num_hidden_layers=1, xpress_num_passes=1)
    result = invoke("build", "--target", target, "--drafter", drafter, "--output", bundle)
    return Spoken(target, drafter, bundle, result)


@pytest.fixture
def folders(tiny_folders: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the tiny target and drafter, to be spoilt."""
    for source in tiny_folders:
        shutil.copytree(source, tmp_path / source.name)
    return tmp_path / "target", tmp_path / "drafter"


@pytest.fixture
def quick_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of a build but tracing: each graph's weights are read, and its file holds its name."""

    def export(spec: GraphSpec, folder: Path, weights: WeightStore, metadata: Mapping[str, str]) -> ExportedGraph:  # noqa: ARG001
        path = folder / f"{spec.name}.onnx"
        path.write_text(spec.name)
        return ExportedGraph(path, {"Identity": 1})

    monkeypatch.setattr(graph_set, "export_graph", export)
