"""The boundaries of the house: what is installed, what imports what, and what is imported when."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "xpress_export": ROOT / "xpress_export",
    "xpress_engines": ROOT / "engines" / "xpress_engines",
    "xpress_runtime": ROOT / "runtime" / "xpress_runtime",
}
MODULES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
# Not installed, and held to the same rules.
RECIPE = sorted((ROOT / "examples").rglob("*.py"))
MAX_MODULE_LINES = 400

# What an edge server does not have.
EXPORT_ONLY = {"onnx", "onnx_ir", "onnxscript", "safetensors", "torch", "transformers"}
# Modules of the runtime that cannot be imported with the packages of its own extras alone, each with the reason.
NOT_IMPORTED: dict[str, str] = {}
COMMANDS = [
    "build",
    "export",
    "convert",
    "engine",
    "parity",
    "generate",
    "chat",
    "serve",
    "batch",
    "package",
    "inspect",
    "doctor",
    "bench",
    "demo",
]


def _module_name(path: Path) -> str:
    package, folder = next((name, folder) for name, folder in PACKAGES.items() if folder in path.parents)
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, anywhere in it; for ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = _module_name(path).split(".")
                package = package if path.name == "__init__.py" else package[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield node.args[0].value


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """Standard output of a program in a process of its own that sees the checkout."""
    paths = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "engines", ROOT / "runtime"))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What is installed.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    copy = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "conformance_data")
    for folder in ("xpress_export", "engines", "runtime", "tests", "examples"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE", "cli.py"):
        shutil.copy(ROOT / file, copy / file)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file_,) = out.glob("*.whl")
    return zipfile.ZipFile(file_)


def test_wheel_installs_only_the_three_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    (information,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {*PACKAGES, information}
    entry_points = wheel.read(f"{information}/entry_points.txt").decode()
    assert "xpress-export = xpress_export.cli.main:main" in entry_points
    assert f"{information}/licenses/LICENSE" in wheel.namelist()


def test_wheel_holds_every_module_and_the_demo(wheel: zipfile.ZipFile) -> None:
    expected = {f"{name}/{path.relative_to(folder).as_posix()}" for name, folder in PACKAGES.items() for path in folder.rglob("*.py")}
    expected |= {f"{name}/py.typed" for name in PACKAGES}
    expected |= {f"xpress_engines/presets/{name}.toml" for name in ("edge", "server")}
    drafter = ("README.md", "LICENSE", "config.json", "eval.json", "model.safetensors")
    expected |= {"xpress_export/bench/report.html.jinja", *(f"xpress_export/bench/sets/{name}.jsonl" for name in ("math", "code", "chat"))}
    expected |= {"xpress_export/demo/prompts.jsonl", *(f"xpress_export/demo/drafter/{file}" for file in drafter)}
    assert expected <= set(wheel.namelist())


def test_wheel_holds_no_tests(wheel: zipfile.ZipFile) -> None:
    assert not [name for name in wheel.namelist() if "test" in name.lower()]


# What imports what.


@pytest.mark.parametrize(
    ("importer", "forbidden"),
    [
        ("xpress_runtime", {"xpress_engines", "xpress_export", *EXPORT_ONLY}),
        ("xpress_engines", {"xpress_export", "torch", "transformers"}),
    ],
)
def test_dependencies_point_one_way(importer: str, forbidden: set[str]) -> None:
    folder = PACKAGES[importer]
    found = {
        (str(path.relative_to(ROOT)), name) for path in folder.rglob("*.py") for name in _imports(path) if name.split(".")[0] in forbidden
    }
    assert not found


def test_only_the_command_line_imports_the_command_line() -> None:
    outside = [path for path in MODULES if not _within(_module_name(path), "xpress_export.cli")]
    found = {(str(path.relative_to(ROOT)), name) for path in outside for name in _imports(path) if _within(name, "xpress_export.cli")}
    assert not found


def test_nothing_imports_the_recipe() -> None:
    assert not [str(path.relative_to(ROOT)) for path in MODULES for name in _imports(path) if _within(name, "examples")]
    assert RECIPE


def test_imports_are_seen_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "house", tmp_path)
    inner = tmp_path / "rooms" / "kitchen.py"
    inner.parent.mkdir()
    inner.write_text(
        "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\n"
        "def later():\n    import h\n    importlib.import_module('i.j')\n    return __import__('k')\n"
    )
    seen = {"a.b", "c", "c.d", "house.rooms", "house.rooms.e", "house.f", "house.f.g", "h", "i.j", "k"}
    assert set(_imports(inner)) == seen


# What is imported when.

REFUSE = """
import importlib, json, pkgutil, sys

refused, skipped = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not for this process", name=name)

sys.meta_path.insert(0, Refuse())
import xpress_runtime

names = [found.name for found in pkgutil.walk_packages(xpress_runtime.__path__, "xpress_runtime.", onerror=lambda name: None)]
for name in names:
    if name not in skipped:
        importlib.import_module(name)
for name in refused:
    assert name not in sys.modules, name
print(json.dumps(names))
"""


def test_runtime_imports_without_the_export_packages() -> None:
    names = json.loads(_python(REFUSE, json.dumps(sorted(EXPORT_ONLY)), json.dumps(sorted(NOT_IMPORTED))))
    on_disk = {_module_name(path) for path in PACKAGES["xpress_runtime"].rglob("*.py")} - {"xpress_runtime"}
    assert set(names) == on_disk
    assert set(NOT_IMPORTED) <= on_disk


LOADED = """
import json, sys
import xpress_runtime
assert xpress_runtime.__file__, "xpress_runtime has no __init__.py"
print(json.dumps(sorted(sys.modules)))
"""


def test_importing_the_runtime_loads_nothing_heavy() -> None:
    loaded = set(json.loads(_python(LOADED)))
    assert "xpress_runtime" in loaded
    assert not loaded & {"jinja2", "onnxruntime", "tokenizers", *EXPORT_ONLY}


HELP = """
import json, sys
from xpress_export.cli.main import main

sys.argv[0] = "xpress-export"
try:
    code = main()
except SystemExit as end:
    code = end.code
assert not code, code
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    *shown, modules = _python(HELP, *arguments).splitlines()
    assert "Usage: xpress-export" in "\n".join(shown)
    assert not set(json.loads(modules)) & {"numpy", "onnxruntime", *EXPORT_ONLY}


def test_help_names_every_command() -> None:
    shown = _python(HELP, "--help")
    assert [command for command in COMMANDS if not re.search(rf"^\s+{command}\b", shown, re.MULTILINE)] == []


def test_command_line_runs_from_a_checkout(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "cli.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs everything")
def test_what_tests_share_is_made_in_one_process(request: pytest.FixtureRequest) -> None:
    """xdist tells groups by what it adds to a test's id; a pytest that it does not know loses that without a word."""
    assert request.node.nodeid.endswith("@test_house.py")


# How it is written.


def test_every_module_says_what_it_does() -> None:
    silent = [
        str(path.relative_to(ROOT)) for path in (*MODULES, *RECIPE) if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_modules_stay_small() -> None:
    large = {
        str(path.relative_to(ROOT)): lines
        for path in (*MODULES, *RECIPE)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_MODULE_LINES
    }
    assert not large


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout")
def test_no_file_names_a_place_of_one_machine() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    place = re.compile(rb"(?<![\w.~$}/-])/(?:work|tmp|root|home)(?![\w-])")
    found = []
    for file in (ROOT / name for name in listed if name):
        content = file.read_bytes() if file.is_file() else b""
        if b"\0" in content[:8192]:
            continue
        for number, line in enumerate(content.splitlines(), 1):
            if place.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.decode(errors='replace').strip()[:120]}")
    assert not found
