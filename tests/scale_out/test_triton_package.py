"""What ``xpress-export package`` writes, and what it leaves alone."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Built
from xpress_export.triton import PackageOptions, write_model
from xpress_export.triton.config import INPUTS, OUTPUTS, config_text
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import OptionError, OutputError

OPTIONS = PackageOptions("ort-cpu", slots=4, threads=2, instances=2, timeout=1.5)


def _schema() -> Any:
    """Triton's own description of a config, or a skip."""
    try:
        from tritonclient.grpc import model_config_pb2
    except (ImportError, RuntimeError) as problem:
        pytest.skip(f"Triton's schema is not installed (pip install 'tritonclient[grpc]'): {problem}")
    return model_config_pb2


def test_config_is_what_triton_reads(tiny: Built, tmp_path: Path) -> None:
    schema = _schema()
    from google.protobuf import text_format

    written = write_model(tiny.bundle, tmp_path, OPTIONS, name="tiny")
    config = text_format.Parse((written.folder / "config.pbtxt").read_text(), schema.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("tiny", "python", 0)
    assert config.model_transaction_policy.decoupled
    (group,) = config.instance_group
    assert (group.count, group.kind) == (2, schema.ModelInstanceGroup.KIND_CPU)
    assert [(i.name, schema.DataType.Name(i.data_type), list(i.dims), i.optional) for i in config.input] == [
        (tensor.name, tensor.data_type, [tensor.dims], True) for tensor in INPUTS
    ]
    assert [output.name for output in config.output] == [tensor.name for tensor in OUTPUTS]
    assert {name: value.string_value for name, value in config.parameters.items()} == OPTIONS.parameters()


@pytest.mark.parametrize("value", ['a"b', "back\\slash", "new\nline", "Füße 漢字 😀", "#"])
def test_parameters_survive_the_text_format(value: str) -> None:
    schema = _schema()
    from google.protobuf import text_format

    text = config_text("x", instances=1, kind="KIND_AUTO", parameters={"p": value}, comment="two\nlines")
    assert text_format.Parse(text, schema.ModelConfig()).parameters["p"].string_value == value


def test_model_and_bundle_lie_in_the_version(tiny: Built, tmp_path: Path) -> None:
    written = write_model(tiny.bundle, tmp_path / "deep" / "repository", OPTIONS)
    assert written.folder == tmp_path / "deep" / "repository" / "target"
    assert {path.name for path in written.folder.iterdir()} == {"1", "config.pbtxt", "xpress-export.json"}
    assert {path.name for path in (written.folder / "1").iterdir()} == {"model.py", "bundle"}
    assert Bundle.open(written.folder / "1" / "bundle").manifest == tiny.bundle.manifest
    note = json.loads((written.folder / "xpress-export.json").read_text())
    assert note["requirement"] == written.requirement
    assert written.requirement.startswith("xpress-export[cpu]==")
    assert written.requirement in (written.folder / "config.pbtxt").read_text()
    assert all((written.folder / file).is_file() for file in note["files"])


def test_model_needs_the_runtime_alone(tiny: Built, tmp_path: Path) -> None:
    source = (write_model(tiny.bundle, tmp_path, OPTIONS).folder / "1" / "model.py").read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name.partition(".")[0]
        for i in imports
        for name in ([i.module or ""] if isinstance(i, ast.ImportFrom) else [a.name for a in i.names])
    }
    assert not names & {"xpress_export", "xpress_engines", "torch", "onnxruntime", "fastapi"}


def test_linked_files_take_no_room(own: Bundle, tmp_path: Path) -> None:
    written = write_model(own, tmp_path, OPTIONS, link=True)
    for file in own.manifest.files:
        assert (written.folder / "1" / "bundle" / file).samefile(own.folder / file)


def test_links_to_another_disk_are_refused(tiny: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", link)
    with pytest.raises(OutputError, match="use --copy"):
        write_model(tiny.bundle, tmp_path, OPTIONS, link=True)
    assert not list(tmp_path.iterdir())


def test_nothing_is_replaced_unasked(tiny: Built, tmp_path: Path) -> None:
    write_model(tiny.bundle, tmp_path, OPTIONS, name="m")
    with pytest.raises(OutputError, match="exists already; give another --name, or --force"):
        write_model(tiny.bundle, tmp_path, OPTIONS, name="m")
    # As Triton leaves it behind.
    compiled = tmp_path / "m" / "1" / "__pycache__" / "model.cpython-312.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"")
    write_model(tiny.bundle, tmp_path, PackageOptions("ort-cpu", slots=7), name="m", overwrite=True)
    assert '"7"' in (tmp_path / "m" / "config.pbtxt").read_text()
    assert not compiled.exists()


@pytest.mark.parametrize("foreign", ["labels.txt", "1/weights.pt", "2/model.py"])
def test_what_others_put_there_stays(tiny: Built, tmp_path: Path, foreign: str) -> None:
    write_model(tiny.bundle, tmp_path, OPTIONS, name="m")
    (tmp_path / "m" / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / "m" / foreign).write_text("mine")
    with pytest.raises(OutputError, match=f"holds {foreign}, which is not part of a packaged bundle"):
        write_model(tiny.bundle, tmp_path, OPTIONS, name="m", overwrite=True)
    assert (tmp_path / "m" / foreign).read_text() == "mine"


def test_a_model_of_somebody_else_is_never_replaced(tiny: Built, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"')
    (tmp_path / "m" / "1" / "model.py").write_text("mine")
    with pytest.raises(OutputError, match="is not part of a packaged bundle"):
        write_model(tiny.bundle, tmp_path, OPTIONS, name="m", overwrite=True)


def test_a_failure_leaves_nothing(tiny: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("xpress_export.triton.repository.config_text", stop)
    with pytest.raises(KeyboardInterrupt):
        write_model(tiny.bundle, tmp_path / "repository", OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "spaced name", "x" * 129])
def test_names_are_names_of_folders(tiny: Built, tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="the name is"):
        write_model(tiny.bundle, tmp_path, OPTIONS, name=name)


@pytest.mark.parametrize(
    ("backend", "kind"), [("auto", "KIND_AUTO"), ("ort-cpu", "KIND_CPU"), ("tensorrt-rtx", "KIND_GPU"), ("ort-cuda", "KIND_GPU")]
)
def test_instances_are_where_the_backend_runs(backend: str, kind: str) -> None:
    assert PackageOptions(backend).kind == kind
