"""The commands about engines: `engine`, `build --engine`, `inspect`, and what only a process of its own can show."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.invoke import invoke, listing
from tests.cli.test_processes import PROGRAM, WITHOUT, start
from tests.conftest import Built
from tests.engines.conftest import RTX
from tests.engines.test_network import drop_mask, spoil
from tests.tiny import write_drafter, write_target
from xpress_engines import builder
from xpress_runtime.bundle import Bundle, file_sha256
from xpress_runtime.engines import open_engines

GRAPHS = ["accept", "denoise", "lookup", "confidence", "store-taps", "refiner-k2", "refiner-k0", "embed", "head", "drafter", "target"]


def test_engine_into_a_bundle_and_inspect(half: Built, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(half.bundle)
    before = (bundle.folder / "bundle.json").read_bytes()
    result = invoke("engine", bundle.folder, "--compute-capability", "8.9").assert_done()
    assert [line.split(" (")[0] for line in result.err.splitlines()] == [f"engine: {RTX} {graph}" for graph in GRAPHS]
    shown = result.out.splitlines()
    assert shown[0] == f"engines {RTX} of fp16-mask, tensorrt-rtx {open_engines(bundle, RTX).manifest.builder_version}"
    assert shown[1] == "  compute capabilities 8.9"
    assert shown[2] == "  profiles prefill 1 × 8, verify 2 × 4, single 2 × 1 (rows × tokens), layout shared; capacity 64"
    assert "peak memory" in shown[3]
    assert [line.split()[0] for line in shown[6:]] == GRAPHS
    assert (bundle.folder / "bundle.json").read_bytes() == before
    assert result.out in invoke("inspect", bundle.folder).assert_done().out
    held = json.loads(invoke("inspect", bundle.folder, "--json").assert_done().out)["engines"]
    assert held == {RTX: json.loads((bundle.folder / "engines" / RTX / "engines.json").read_text(encoding="utf-8"))}


def test_engines_are_replaced_only_on_demand(engined: Bundle, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(engined)
    invoke("engine", bundle.folder).assert_refused(2, "holds engines of kind tensorrt-rtx already", "--force")
    mine = ("--batch", "1", "--layout", "pinned", "--compute-capability", "8.6", "--precision", "bf16")
    result = invoke("engine", bundle.folder, *mine, "--force", "--json").assert_done()
    assert result.err == ""
    shown = json.loads(result.out)
    assert shown["profile"] == {"prefill_chunk": 8, "block_size": 4, "batch": 1, "capacity": 64, "layout": "pinned"}
    assert (shown["bundle"], shown["compute_capabilities"], shown["precision"]) == (str(bundle.folder), ["8.6"], "bf16")
    assert sorted(path.name for path in (bundle.folder / "engines").iterdir()) == [RTX]


def test_damaged_engines_do_not_hide_a_good_bundle(engined: Bundle, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(engined)
    (bundle.folder / "engines" / RTX / "head.engine").write_bytes(b"")
    shown = invoke("inspect", bundle.folder).assert_done().out
    assert f"engines {RTX} cannot be used: " in shown
    held = json.loads(invoke("inspect", bundle.folder, "--json").assert_done().out)["engines"]
    assert "head.engine has 0 bytes" in held[RTX]["problem"]


def test_bundle_with_engines_is_replaced_and_a_foreign_file_is_not(engined: Bundle, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(engined)
    thesis = bundle.folder / "engines" / RTX / "thesis.txt"
    thesis.write_text("precious", encoding="utf-8")
    invoke("engine", bundle.folder, "--force").assert_refused(2, "thesis.txt", "not replaced", "move it away")
    build = ("build", "--target", bundle.folder / "none", "--drafter", bundle.folder / "none", "--output", bundle.folder, "--force")
    invoke(*build).assert_refused(2, f"engines/{RTX}/thesis.txt", "not replaced")
    thesis.unlink()
    # Past the check of the output, and to the target, which is none.
    invoke(*build).assert_refused(2, "none")


@pytest.mark.parametrize(
    ("options", "exit_code", "named"),
    [
        (("--kind", "cuda"), 2, ("'cuda' does not exist", "tensorrt-rtx, tensorrt")),
        (("--kind", "tensorrt"), 3, ("tensorrt is not installed", "xpress-export[gpu]")),
        (("--compute-capability", "9.0"), 2, ("Hopper", "kind tensorrt", "8.0, 8.6, 8.9, 12.0, 12.1")),
        (("--timing-cache", "cache"), 2, ("--timing-cache", "times nothing")),
        (("--profile", "huge"), 2, ("'huge' is neither a preset (edge, server) nor a file",)),
        (("--profile", "edge"), 2, ("capacity 2048", "built with 64", "build the bundle again")),
        (("--precision", "fp8"), 2, ("--precision", "fp8")),
        (("--batch", "0"), 2, ("--batch",)),
        (("--layout", "wide"), 2, ("--layout", "wide")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and value and value[0].startswith("--") else None,
)
def test_engine_refuses(options: tuple[str, ...], exit_code: int, named: tuple[str, ...], half: Built) -> None:
    before = listing(half.bundle.folder)
    invoke("engine", half.bundle.folder, *options).assert_refused(exit_code, *named)
    assert listing(half.bundle.folder) == before


def test_engine_needs_half_precision_graphs(tiny: Built) -> None:
    invoke("engine", tiny.bundle.folder).assert_refused(2, "no fp16 or bf16 graphs", "fp32-length", "--precision fp16")


def test_lost_bound_is_one_line(half: Built, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(half.bundle)
    path = bundle.folder / "graphs/fp16-mask/target.onnx"
    spoil(path, drop_mask)
    _record_again(bundle, "graphs/fp16-mask/target.onnx")
    result = invoke("engine", bundle.folder)
    assert (result.exit_code, result.out) == (1, "")
    last = result.err.splitlines()[-1]
    assert last.startswith("xpress-export: graph target: layer node_mask_attention_1_AttentionInput")
    assert "cache bound was lost" in last
    assert not (bundle.folder / "engines").exists()


def test_engines_folder_that_is_a_link(half: Built, copied: Callable[[Bundle], Bundle], tmp_path: Path) -> None:
    bundle = copied(half.bundle)
    (tmp_path / "elsewhere").mkdir()
    (bundle.folder / "engines").symlink_to(tmp_path / "elsewhere")
    invoke("engine", bundle.folder).assert_refused(2, "engines is a link", "move it away")
    assert listing(tmp_path / "elsewhere") == {}


def test_the_current_folder_is_not_imported(
    half: Built, copied: Callable[[Bundle], Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(half.bundle)
    for module in ("json", "onnx", "xpress_engines"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('imported from the current folder')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    invoke("engine", bundle.folder, "--compute-capability", "8.9").assert_done()


def test_a_library_that_fails_is_one_line(half: Built, copied: Callable[[Bundle], Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = copied(half.bundle)
    monkeypatch.setenv("POLYGRAPHY_ARRAY_SWAP_THRESHOLD_MB", "abc")
    result = invoke("engine", bundle.folder)
    assert (result.exit_code, result.out) == (3, "")
    assert "ValueError" in result.err.splitlines()[-1]
    assert not (bundle.folder / "engines").exists()


def _record_again(bundle: Bundle, name: str) -> None:
    path = bundle.folder / "bundle.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["files"][name] = {"bytes": (bundle.folder / name).stat().st_size, "sha256": file_sha256(bundle.folder / name)}
    path.write_text(json.dumps(values), encoding="utf-8")


# build --engine.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"head_dim": 16, "num_hidden_layers": 1}
    write_target(folder / "target", "qwen3", **sizes)
    write_drafter(folder / "drafter", folder / "target", tap_layers=(0,), **sizes)
    return folder / "target", folder / "drafter"


def test_build_with_engines(pair: tuple[Path, Path], tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text('description = "mine"\nprefill_chunk = 4\nbatch = 3\ncapacity = 32\nlayout = "pinned"\n', encoding="utf-8")
    arguments = ("build", "--target", pair[0], "--drafter", pair[1], "--output", tmp_path / "bundle", "--num-passes", "0")
    result = invoke(*arguments, "--no-parity", "--engine", RTX, "--profile", profile, "--batch", "2", "--compute-capability", "12.0")
    result.assert_done()
    steps = [line.split(" (")[0] for line in result.err.splitlines() if line.startswith("build: ")]
    assert steps[-1] == f"build: {RTX} target"
    bundle = Bundle.open(tmp_path / "bundle")
    assert [graph_set.name for graph_set in bundle.manifest.graph_sets] == ["fp32-length", "fp16-mask"]
    assert (bundle.manifest.prefill_chunk, bundle.manifest.batch, bundle.manifest.capacity) == (4, 2, 32)
    manifest = open_engines(bundle, RTX).manifest
    assert (manifest.profile.batch, manifest.profile.layout) == (2, "pinned")
    assert manifest.compute_capabilities == ("12.0",)


@pytest.mark.usefixtures("quick_export")
def test_failed_engines_leave_no_bundle(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "WORKER", (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    arguments = ("build", "--target", pair[0], "--drafter", pair[1], "--output", tmp_path / "bundle", "--no-parity", "--engine", RTX)
    result = invoke(*arguments)
    assert (result.exit_code, result.out) == (3, "")
    assert "killed" in result.err.splitlines()[-1]
    assert listing(tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "exit_code", "named"),
    [
        (("--engine", "cuda"), 2, ("'cuda' does not exist",)),
        (("--engine", "tensorrt"), 3, ("tensorrt is not installed",)),
        (("--engine", RTX, "--compute-capability", "7.5"), 2, ("Turing",)),
        (("--engine", RTX, "--timing-cache", "cache"), 2, ("times nothing",)),
        (("--compute-capability", "8.9"), 2, ("--compute-capability", "--engine")),
        (("--timing-cache", "cache"), 2, ("--timing-cache", "--engine")),
        (("--profile", "huge"), 2, ("'huge' is neither",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and value and value[0].startswith("--") else None,
)
def test_build_refuses_before_it_reads_checkpoints(
    options: tuple[str, ...], exit_code: int, named: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = ("build", "--target", tmp_path / "none", "--drafter", tmp_path / "none", "--output", tmp_path / "bundle")
    invoke(*arguments, *options).assert_refused(exit_code, *named)
    assert listing(tmp_path) == {}


# Processes.


@pytest.fixture
def building(half: Built, copied: Callable[[Bundle], Bundle]) -> subprocess.Popen[str]:
    """`engine` in a process of its own, while its first graph is built."""
    bundle = copied(half.bundle)
    process = start(PROGRAM, "engine", bundle.folder)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith(f"engine: {RTX} accept"), line
    assert list(bundle.folder.glob("engines/.tensorrt-rtx.partial-*"))
    return process


def _children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()]


def _ended(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@linux
@pytest.mark.parametrize(("name", "exit_code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_interrupted_engine_build(name: str, exit_code: int, building: subprocess.Popen[str], tmp_path: Path) -> None:
    (worker,) = _children(building)
    building.send_signal(getattr(signal, name))
    err = building.communicate(timeout=60)[1]
    assert building.returncode == exit_code, err
    assert "Traceback" not in err
    assert not (tmp_path / "copy" / "engines").exists()
    assert _ended(worker)


@linux
def test_worker_ends_with_its_caller(building: subprocess.Popen[str]) -> None:
    (worker,) = _children(building)
    building.kill()
    building.communicate(timeout=60)
    assert _ended(worker)


@pytest.mark.parametrize("package", ["tensorrt_rtx", "polygraphy", "onnx"])
def test_package_of_the_builder_is_missing(package: str, half: Built) -> None:
    process = start(WITHOUT + PROGRAM, package, "engine", half.bundle.folder)
    out, err = process.communicate(timeout=300)
    shown = package.replace("_", "-")
    line = f"xpress-export: {shown} is not installed; install it with: pip install 'xpress-export[rtx]'\n"
    assert (process.returncode, out, err) == (3, "", line)


def test_engines_are_built_without_the_export_packages(half: Built, copied: Callable[[Bundle], Bundle]) -> None:
    """As on a server: of the extras only the one with the builder."""
    bundle = copied(half.bundle)
    missing = "accelerate,gguf,huggingface_hub,onnx_ir,onnxruntime,onnxscript,safetensors,torch,transformers"
    process = start(WITHOUT + PROGRAM, missing, "engine", bundle.folder, "--json")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert set(json.loads(out)["engines"]) == set(GRAPHS)
