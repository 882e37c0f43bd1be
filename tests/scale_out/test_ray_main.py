"""``python -m deploy.ray_serve`` as an operator runs it: it answers, and at SIGTERM finishes what it has."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest

from tests.conftest import Built

pytest.importorskip("ray.serve", reason="Ray Serve is not installed (pip install 'ray[serve]')")

ROOT = Path(__file__).resolve().parents[2]
NUM_REQUESTS = 40

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="this system has no SIGTERM")]


def _post(url: str, number: int) -> int:
    body = json.dumps({"prompt": [2 + number, 5], "max_tokens": 60, "ignore_stop": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60) as answer:
        status: int = answer.status
        return status


def test_what_is_there_at_sigterm_is_answered(tiny: Built, tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    paths = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "engines", ROOT / "runtime"))
    command = [sys.executable, "-m", "deploy.ray_serve", f"bundle={tiny.bundle.folder}", "backend=ort-cpu", "slots=2", f"port={port}"]
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while not _ready(port):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            asked = [pool.submit(_post, f"http://127.0.0.1:{port}/generate", number) for number in range(NUM_REQUESTS)]
            next(as_completed(asked))
            server.send_signal(signal.SIGTERM)
            assert sum(not one.done() for one in asked) > NUM_REQUESTS // 2
            assert {one.result() for one in asked} == {200}
        assert server.wait(60) == 0, log.read_text()[-4000:]
    finally:
        server.kill()
        server.wait()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
