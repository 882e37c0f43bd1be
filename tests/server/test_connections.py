"""Connections as such: silent ones, too many, and those that bring no HTTP."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from tests.server.test_run import Call, running, until
from xpress_runtime.errors import OptionError
from xpress_runtime.server import ServerSettings
from xpress_runtime.server.connections import connection_limits

HEAD = b"GET /health HTTP/1.1\r\nhost: a\r\n"


def connect(url: str) -> socket.socket:
    host, _colon, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def read(connection: socket.socket) -> bytes:
    """Everything until the server closes; TimeoutError if it does not."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def error_of(answer: bytes) -> tuple[int, str, str]:
    """Status, code and message of an answer in the one shape."""
    head, _empty, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.lower().split(b"\r\n")
    assert {b"content-type: application/json", b"connection: close", b"content-length: %d" % len(body)} <= set(fields)
    assert any(field.startswith(b"date: ") for field in fields)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(status.split()[1]), error["code"], error["message"]


def test_a_head_that_does_not_come() -> None:
    with running("20", "head_seconds=1", "slow") as (process, url):
        # Longer than the limit, with all of its head there.
        streamed = Call(url, {"prompt": "hi", "max_tokens": 121, "stream": True})
        until(url, 200, running=1)
        began = time.monotonic()
        with connect(url) as silent, connect(url) as half, connect(url) as second:
            half.sendall(HEAD)
            second.sendall(HEAD + b"\r\n")
            assert b" 200 " in second.recv(65536).split(b"\r\n")[0]
            second.sendall(HEAD)
            assert read(silent) == b""
            expected = (408, "timeout", "the head of the request did not arrive within 1 seconds")
            assert error_of(read(half)) == expected
            assert error_of(read(second)) == expected
            assert 0.9 < time.monotonic() - began < 5
        assert streamed.done().status_code == 200
        assert "event: done" in streamed.done().text
        assert process.poll() is None


def test_a_body_may_take_longer_than_a_head() -> None:
    with running("20", "head_seconds=1") as (_process, url), connect(url) as connection:
        body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
        fields = ("host: a", "connection: close", "content-type: application/json", f"content-length: {len(body)}")
        head = "\r\n".join(("POST /generate HTTP/1.1", *fields, "", ""))
        connection.sendall(head.encode() + body[:5])
        time.sleep(1.3)
        connection.sendall(body[5:])
        assert read(connection).startswith(b"HTTP/1.1 200 ")


def test_silent_connections_make_room() -> None:
    with running("20", "max_connections=4") as (process, url):
        silent = [connect(url) for _ in range(8)]
        time.sleep(0.6)
        for _ in range(3):
            assert httpx.get(f"{url}/health").status_code == 200
        # The first ones had waited longest.
        assert read(silent[0]) == b""
        process.terminate()
        _out, err = process.communicate(timeout=20)
        assert err.count("4 connections are open, as many as may") == 1
        for connection in silent:
            connection.close()


def test_no_room_at_all() -> None:
    with running("0.1", "hold", "max_connections=2") as (process, url):
        body = b'{"prompt": "hi", "stream": true}'
        fields = b"host: a\r\ncontent-type: application/json\r\ncontent-length: %d" % len(body)
        streams = [connect(url) for _ in range(2)]
        for stream in streams:
            stream.sendall(b"POST /generate HTTP/1.1\r\n%s\r\n\r\n%s" % (fields, body))
            assert stream.recv(10) == b"HTTP/1.1 2"
        answer = httpx.get(f"{url}/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_connections")
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["connection"] == "close"
        # Silent ones over the limit do not pile up, and cost those that run nothing.
        silent = [connect(url) for _ in range(20)]
        assert read(silent[0]) == b""
        assert httpx.get(f"{url}/ready").status_code == 503
        process.terminate()
        for stream in streams:
            assert b"event: error" in read(stream)
        for connection in (*streams, *silent):
            connection.close()


def test_requests_that_are_no_http_get_an_answer() -> None:
    bad = {
        b"nonsense\r\n\r\n": "illegal request line",
        b"GET / HTTP/1.1\r\n\r\n": "Host",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000: "Receive buffer too long",
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 20_000: "too",
        b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n": "Content-Length",
        b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: " + b"1" * 26 + b"\r\n\r\n": "Content-Length",
        # In the middle of a body.
        b"POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n": "chunk",
    }
    with running("20") as (process, url):
        for sent, named in bad.items():
            with connect(url) as connection:
                connection.sendall(sent)
                status, code, message = error_of(read(connection))
                assert (status, code) == (400, "invalid_http")
                assert message.startswith("the request is not valid HTTP: ")
                assert named in message
        assert httpx.get(f"{url}/ready").status_code == 200
        process.terminate()
        assert "Traceback" not in process.communicate(timeout=20)[1]


def test_limits_follow_the_files_that_may_be_open() -> None:
    for files in (256, 1024, 65536, 10**9):
        connections, backlog = connection_limits(files)
        assert 0 < connections + backlog < files
    assert connection_limits(1024)[0] > 512
    assert connection_limits(10)[0] == 1
    assert connection_limits()[0] > 0


@pytest.mark.parametrize("setting", [{"head_seconds": 0}, {"head_seconds": float("nan")}, {"max_connections": 0}])
def test_settings_that_are_none(setting: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="expected"):
        ServerSettings(**setting)  # type: ignore[arg-type]
