"""What only a process of its own can show: signals, a real limit on files, pipes without a reader, packages that are not installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.invoke import listing
from tests.conftest import Built
from tests.tiny import write_drafter, write_target

ROOT = Path(__file__).resolve().parents[2]
# A shell starts background jobs with Ctrl-C ignored, and a test run may be one.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); signal.signal(signal.SIGTERM, signal.SIG_DFL); "
    "from xpress_export.cli.main import main; main()"
)
# Smaller than the smallest graph.
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); " + PROGRAM
WITHOUT = """
import sys

refused = sys.argv.pop(1).split(",")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")


def start(code: str, *arguments: object, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    paths = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "engines", ROOT / "runtime"))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class Ended:
    """A build that did not come to its end: exit code, standard error, and what it left in its parent folder."""

    exit_code: int
    err: str
    left: dict[str, int]


def _stop_in_the_middle(name: str, process: subprocess.Popen[str], folder: Path) -> str:
    """Send a build the signal ``name`` once it exports graphs, where it is one; returns its standard error when it has ended."""
    assert process.stderr is not None
    err = ""
    if name != "limit":
        while "build: fp32-length accept" not in err:
            line = process.stderr.readline()
            assert line, err
            err += line
        assert list((folder / "new").glob(".bundle.partial-*/graphs/*"))
        process.send_signal(getattr(signal, name))
    return err + process.communicate(timeout=300)[1]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """Builds that are stopped in the middle, all at the same time because each must import PyTorch first."""
    folder = tmp_path_factory.mktemp("stopped")
    write_target(folder / "target", "llama", num_hidden_layers=1)
    write_drafter(folder / "drafter", folder / "target", tap_layers=(0,), num_hidden_layers=1)
    processes: dict[str, subprocess.Popen[str]] = {}
    results = {}
    try:
        for name in ("SIGINT", "SIGTERM", "limit"):
            (folder / name).mkdir()
            arguments = ("build", "--target", folder / "target", "--drafter", folder / "drafter", "--num-passes", "0", "--no-sampling")
            program = LIMITED if name == "limit" else PROGRAM
            processes[name] = start(program, *arguments, "--output", folder / name / "new" / "bundle")
        # A thread each: one that waited for another's end would come after its own build's.
        with ThreadPoolExecutor(len(processes)) as pool:
            errs = pool.map(_stop_in_the_middle, processes, processes.values(), [folder / name for name in processes])
            for (name, process), err in zip(processes.items(), errs, strict=True):
                results[name] = Ended(process.returncode, err, listing(folder / name))
        yield results
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("name", "exit_code", "line"),
    [
        ("SIGINT", 130, "xpress-export: interrupted"),
        ("SIGTERM", 143, None),
        ("limit", 2, "filled up; nothing was left behind"),
    ],
)
def test_stopped_build(name: str, exit_code: int, line: str | None, ended: dict[str, Ended]) -> None:
    result = ended[name]
    assert result.exit_code == exit_code, result.err
    assert result.left == {}
    assert "Traceback" not in result.err
    last = [text for text in result.err.splitlines() if text and not text.startswith("build: ")]
    assert len(last) == (line is not None)
    assert line is None or line in last[0]


@pytest.mark.parametrize("arguments", [("--help",), ("doctor",), ("doctor", "--help")], ids=" ".join)
def test_reader_that_went_away(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(PROGRAM, *arguments, stdout=writing)
    os.close(writing)
    err = process.communicate(timeout=300)[1]
    assert (process.returncode, err) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_output_to_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        process = start(PROGRAM, "doctor", stdout=full.fileno())
        err = process.communicate(timeout=300)[1]
    assert (process.returncode, err) == (3, "xpress-export: No space left on device: standard output\n")


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("torch", "export", ("build", "--target", "t", "--drafter", "d", "--output", "o")),
        ("torch", "export", ("export", "--target", "t", "--drafter", "d", "--output", "o")),
        ("torch", "export", ("parity", "BUNDLE")),
        ("onnxruntime", "cpu", ("generate", "BUNDLE", "--tokens", "1")),
        ("onnxruntime", "cpu", ("generate", "BUNDLE", "--tokens", "1", "--backend", "ort-cpu")),
        ("onnxruntime", "cpu", ("chat", "BUNDLE")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_package_of_an_extra_is_missing(package: str, extra: str, arguments: tuple[str, ...], tiny: Built, tmp_path: Path) -> None:
    filled = [str(tiny.bundle.folder) if argument == "BUNDLE" else argument for argument in arguments]
    process = start(f"{WITHOUT}import os; os.chdir({str(tmp_path)!r}); {PROGRAM}", package, *filled)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (3, "")
    assert err.startswith("xpress-export: ")
    assert err.endswith(f"{package} is not installed; install it with: pip install 'xpress-export[{extra}]'\n")
    assert err.count("\n") == 1
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("package", ["numpy", "tokenizers"])
def test_package_of_every_installation_is_missing(package: str, tiny: Built) -> None:
    process = start(WITHOUT + PROGRAM, package, "generate", tiny.bundle.folder, "--tokens", "1")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (3, "")
    assert err == f"xpress-export: {package} is not installed; install it with: pip install xpress-export\n"


def test_standard_error_is_closed(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = tiny_folders
    code = f"import os, sys; os.close(2); sys.stderr = None; {PROGRAM}"
    process = start(code, "export", "--target", target, "--drafter", drafter, "--output", tmp_path / "graphs", "--no-sampling")
    out, _err = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "target.onnx" in out


def test_a_server_needs_no_export_packages(tiny: Built) -> None:
    missing = "accelerate,gguf,huggingface_hub,onnx,onnx_ir,onnxscript,safetensors,torch,transformers"
    arguments = ("generate", tiny.bundle.folder, "--tokens", "1", "--max-new-tokens", "3", "--ignore-stop", "--threads", "1")
    process = start(WITHOUT + PROGRAM, missing, "--log-level", "error", *arguments)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert len(out.split(",")) == 3
