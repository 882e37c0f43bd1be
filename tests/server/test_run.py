"""The server as a process: where it listens, and what signals do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.conftest import events_of
from xpress_runtime.errors import EnvironmentProblem, OptionError
from xpress_runtime.server.run import is_loopback, listen, url_of

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process at once there")


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.server.process", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, process.communicate(timeout=10)[1]
        yield process, url
    finally:
        process.kill()
        process.wait()


class Call(threading.Thread):
    """A request on a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.answer: httpx.Response | None = None
        self._url, self._body = url, body
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(f"{self._url}/generate", json=self._body, timeout=20)

    def done(self) -> httpx.Response:
        self.join(20)
        assert self.answer is not None
        return self.answer


def until(url: str, status: int, **figures: int) -> httpx.Response:
    for _ in range(200):
        answer = httpx.get(f"{url}/ready")
        if answer.status_code == status and all(answer.json()[name] == value for name, value in figures.items()):
            return answer
        time.sleep(0.05)
    raise AssertionError(f"/ready never became {status} {figures}")


@needs_signals
def test_a_signal_lets_requests_end_and_refuses_new_ones() -> None:
    with running("20", "slow") as (process, url):
        bodies = [{"prompt": "hi", "max_tokens": 41, "stream": stream} for stream in (True, False)]
        streamed, plain = (Call(url, body) for body in bodies)
        until(url, 200, running=2)
        process.send_signal(signal.SIGTERM)
        assert until(url, 503).json()["error"]["code"] == "draining"
        assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/generate", json={"prompt": "hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert events_of(streamed.done().text)[-1][1]["output_tokens"] == 41
        assert plain.done().json()["output_tokens"] == 41
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "ended\n")
        assert err.startswith("draining: no new requests")
        assert err.count("\n") == 1


@needs_signals
def test_a_second_signal_cancels() -> None:
    with running("60", "hold") as (process, url):
        streamed, plain = (Call(url, {"prompt": "hi", "stream": stream}) for stream in (True, False))
        until(url, 200, running=2)
        process.send_signal(signal.SIGTERM)
        until(url, 503)
        process.send_signal(signal.SIGINT)
        assert plain.done().status_code == 503
        assert events_of(streamed.done().text)[-1][1]["error"]["code"] == "cancelled"
        assert process.wait(20) == 0


@needs_signals
def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    with running("20", "slow") as (process, url):
        plain = Call(url, {"prompt": "hi", "max_tokens": 41})
        until(url, 200, running=1)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert plain.done().json()["output_tokens"] == 41
        assert process.wait(20) == 0


@needs_signals
def test_the_same_signal_again_cancels_too() -> None:
    with running("60", "hold") as (process, url):
        plain = Call(url, {"prompt": "hi"})
        until(url, 200, running=1)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        process.send_signal(signal.SIGTERM)
        assert plain.done().status_code == 503
        assert process.wait(20) == 0


@needs_signals
def test_a_terminal_that_hangs_up_is_a_signal_to_drain() -> None:
    with running("20", "slow") as (process, url):
        streamed = Call(url, {"prompt": "hi", "max_tokens": 41, "stream": True})
        until(url, 200, running=1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert events_of(streamed.done().text)[-1][1]["output_tokens"] == 41
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err.count("\n")) == (0, "ended\n", 1)


@needs_signals
def test_nohup_is_heeded() -> None:
    # What is ignored here stays so in a process that is started.
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running("20") as (process, url):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            until(url, 200)
            assert process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, former)


@needs_signals
def test_draining_has_an_end() -> None:
    with running("0.2", "hold") as (process, url):
        plain = Call(url, {"prompt": "hi"})
        until(url, 200, running=1)
        process.send_signal(signal.SIGTERM)
        assert plain.done().json()["error"]["code"] == "cancelled"
        assert process.wait(20) == 0


@needs_signals
def test_an_idle_server_ends_at_once_even_with_connections_open() -> None:
    with running("20") as (process, url), httpx.Client() as client:
        client.get(f"{url}/ready")
        began = time.perf_counter()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert time.perf_counter() - began < 5


def test_a_client_that_hangs_up_cancels_its_request() -> None:
    with running("20", "hold") as (_process, url):
        for stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/generate", json={"prompt": "hi", "stream": stream}, timeout=0.3)
            until(url, 200, running=0)


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"cannot listen on 127.0.0.1 port {port}: the port is taken"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 300, "1.2.3.4.5"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(OptionError, match="expected an address"):
        listen(host, 0)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(EnvironmentProblem, match="no such address"):
        listen("192.0.2.1", 0)


def test_urls() -> None:
    with listen("0.0.0.0", 0) as everywhere:
        assert url_of("0.0.0.0", everywhere) == f"http://127.0.0.1:{everywhere.getsockname()[1]}"
        assert not is_loopback(everywhere)
        assert url_of("::", everywhere).startswith("http://[::1]:")
    with listen("localhost", 0) as here:
        assert is_loopback(here)
