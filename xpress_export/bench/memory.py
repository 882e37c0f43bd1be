"""The peak memory of one mode, measured in a process of its own: in a shared one the largest mode would hide all others.

As a program (``python -m xpress_export.bench.memory``) it reads one JSON object, generates once, and answers with one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xpress_export
from xpress_export.bench.modes import Mode
from xpress_runtime import version
from xpress_runtime.errors import EnvironmentProblem, XpressError

_WORKER = (sys.executable, "-m", "xpress_export.bench.memory")


@dataclass(frozen=True)
class PeakMemory:
    """Bytes; None where the system does not tell. ``host_bytes``: the largest resident size of the process. ``device_bytes``: the most that
    was in use on the GPU, by whatever process; None on a CPU.
    """

    host_bytes: int | None
    device_bytes: int | None

    def to_json(self) -> dict[str, int | None]:
        return asdict(self)


def measure_memory(
    bundle: Path, backend: str, threads: int | None, runtime_cache: Path | None, prompt: Sequence[int], mode: Mode
) -> PeakMemory:
    """Open ``bundle`` in a fresh process, generate once in ``mode``, and report that process's peak. Raises EnvironmentProblem."""
    request = {
        "bundle": str(bundle.absolute()),
        "backend": backend,
        "threads": threads,
        "runtime_cache": None if runtime_cache is None else str(runtime_cache.absolute()),
        "prompt": list(prompt),
        "config": asdict(mode.config),
    }
    # The house's packages as this process has them, also where they come from a checkout.
    homes = {str(Path(file).parents[1]) for file in (xpress_export.__file__, version.__file__)}
    paths = os.pathsep.join([*sorted(homes), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        _WORKER, input=json.dumps(request), env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EnvironmentProblem(f"the process that measured {mode.label} ended with {done.returncode}: {last[0]}") from None
    if "error" in answer:
        raise EnvironmentProblem(str(answer["error"]))
    return PeakMemory(answer["host_bytes"], answer["device_bytes"])


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    from xpress_export.bench.measure import device_bytes
    from xpress_runtime.generation import GenerationConfig
    from xpress_runtime.session import Session
    from xpress_runtime.stats import peak_memory_bytes

    try:
        with Session.open(
            request["bundle"], request["backend"], threads=request["threads"], verify=False, runtime_cache=request["runtime_cache"]
        ) as session:
            session.generate(request["prompt"], GenerationConfig(**request["config"]))
            return PeakMemory(peak_memory_bytes(), device_bytes(session.backend)).to_json()
    except XpressError as problem:
        return {"error": str(problem)}


def main() -> None:
    """Answer the request on standard input."""
    sys.stdout.write(json.dumps(_serve(json.loads(sys.stdin.read()))))


if __name__ == "__main__":
    main()
