"""`xpress-export package`: a bundle as a model of an inference server."""

from __future__ import annotations

import json
from pathlib import Path

import click

from xpress_export.cli.options import bundle_argument, combined, json_option


@click.command("package")
@bundle_argument
@combined(
    click.option("--triton", "repository", required=True, type=click.Path(path_type=Path), help="Triton model repository to write into."),
    click.option("--name", help="Name of the model. Default: that of the target."),
    click.option("--backend", default="auto", show_default=True, help="Backend that runs the bundle there."),
    click.option("--slots", type=click.IntRange(1), help="Requests that are decoded at a time. Default: the bundle's batch."),
    click.option("--threads", type=click.IntRange(1), help="CPU threads of an operator. Default: all cores."),
    click.option("--instances", type=click.IntRange(1), default=1, show_default=True, help="Sessions; on GPUs, for each of them."),
    click.option("--max-queue", type=click.IntRange(0), default=64, show_default=True, help="Requests that wait for a slot."),
    click.option("--max-tokens", type=click.IntRange(1), help="Most output tokens of a request. Default: the bundle's capacity."),
    click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds that a request may take. Default: no limit."),
    click.option(
        "--link/--copy",
        "link",
        default=False,
        help="Hard links to the bundle's files instead of copies (the default). The onnx package refuses to load linked weights.",
    ),
    click.option("--force", is_flag=True, help="Replace a model that was packaged before."),
    json_option,
)
def command(
    bundle: Path,
    repository: Path,
    name: str | None,
    backend: str,
    slots: int | None,
    threads: int | None,
    instances: int,
    max_queue: int,
    max_tokens: int | None,
    timeout: float | None,
    link: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write BUNDLE as a model of Triton's Python backend: config.pbtxt, model.py and the bundle's files."""
    from xpress_export.triton import PackageOptions, write_model
    from xpress_runtime.backends import BACKEND_NAMES
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.errors import OptionError

    if backend != "auto" and backend not in BACKEND_NAMES:
        raise OptionError(f"backend '{backend}' does not exist; choose one of: auto, {', '.join(BACKEND_NAMES)}")
    options = PackageOptions(backend, slots, threads, instances, max_queue, max_tokens, timeout)
    packaged = write_model(Bundle.open(bundle), repository, options, name=name, link=link, overwrite=force)
    if as_json:
        values = {"folder": str(packaged.folder), "name": packaged.name, "requirement": packaged.requirement}
        click.echo(json.dumps({**values, "bytes": packaged.bytes, "linked": packaged.linked}))
        return
    click.echo(f"model {packaged.name} in {packaged.folder} ({packaged.bytes / 1e6:.1f} MB {'linked' if packaged.linked else 'copied'})")
    click.echo(f"the image of the server needs: pip install '{packaged.requirement}'")
    click.echo(f"then: tritonserver --model-repository {repository}")
