"""`xpress-export doctor`: what is installed, and which backends run here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform

import click

from xpress_export.cli.options import json_option

# package → the extra that brings it
_PACKAGES = {
    "numpy": "",
    "tokenizers": "",
    "jinja2": "",
    "onnxruntime": "cpu",
    "torch": "export",
    "transformers": "export",
    "onnx": "export",
    "onnxscript": "export",
    "safetensors": "export",
    "huggingface-hub": "export",
    "gguf": "export",
    "accelerate": "export",
    "tensorrt-rtx": "rtx",
    "polygraphy": "rtx",
    "cuda-bindings": "rtx",
    "tensorrt": "gpu",
    "onnxruntime-gpu": "gpu",
    "onnxruntime-genai": "bench",
    "fastapi": "serve",
    "uvicorn": "serve",
    "sse-starlette": "serve",
    "prometheus-client": "serve",
    "ray": "ray",
}


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Show what is installed, which commands that allows, and which backends run here and why others do not."""
    from xpress_runtime.backends import probe_backends
    from xpress_runtime.version import VERSION

    packages = {name: _version(name) for name in _PACKAGES}
    backends = probe_backends()
    if as_json:
        click.echo(
            json.dumps(
                {
                    "xpress-export": VERSION,
                    "python": platform.python_version(),
                    "cores": os.cpu_count(),
                    "packages": packages,
                    "engines": {kind: {"builds": not reason, "reason": reason} for kind, reason in _engine_builders().items()},
                    "backends": {status.name: {"runs": status.runs, "reason": status.reason} for status in backends},
                }
            )
        )
        return
    click.echo(f"xpress-export {VERSION}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    for name, version in packages.items():
        missing = f"missing: pip install 'xpress-export[{_PACKAGES[name]}]'" if _PACKAGES[name] else "missing: pip install xpress-export"
        click.echo(f"  {name:18} {version or missing}")
    can_build = all(packages[name] for name, extra in _PACKAGES.items() if extra == "export")
    click.echo(f"build, export, parity, demo: {'yes' if can_build else 'no, see the missing packages above'}")
    for kind, missing in _engine_builders().items():
        click.echo(f"engine --kind {kind}: {missing or 'yes'}")
    for status in backends:
        click.echo(f"backend {status.name}: {'runs' if status.runs else status.reason}")


def _engine_builders() -> dict[str, str]:
    """Each kind of engine, and why it cannot be built here; empty where it can."""
    from xpress_export.engines_build import request_engines
    from xpress_runtime.engines import ENGINE_KINDS
    from xpress_runtime.errors import EnvironmentProblem

    reasons = {}
    for kind in ENGINE_KINDS:
        try:
            request_engines([kind])
            reasons[kind] = ""
        except EnvironmentProblem as problem:
            reasons[kind] = str(problem)
    return reasons


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
