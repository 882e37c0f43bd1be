"""The playground page in a browser: odd streams, refusals and lost connections, against a server that says exactly what a test tells it to.

Needs playwright and Debian's chromium; without them only what can be read off the file is checked.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import xpress_runtime
from tests.browsing import figure, launched, opened, text_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGE = Path(xpress_runtime.__file__).parent / "server" / "page.html"
ORIGINS = ("drafter", "refiner", "target")

Answer = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Answers ``/generate`` as the test's stub says."""

    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def reply(self, status: int, content: Any, kind: str = "application/json", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/":
            self.reply(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/ready":
            self.reply(*self.server.ready)
        elif self.path == "/v1/models":
            self.server.keys.append(self.headers["Authorization"])
            self.reply(200, {"object": "list", "data": [{"id": "stub/model", "object": "model"}]})
        else:
            self.reply(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        try:
            self.server.answer(self, body)
        except OSError:
            self.server.client_gone.set()

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def stream(self, *events: bytes) -> None:
        self.start_stream()
        for content in (*events, b""):
            self.send(content)

    def vanish(self) -> None:
        """A reset, as of a server that died."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


class Stub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.ready: tuple[int, Any] = (200, {"status": "ready"})
        self.answer: Answer = lambda handler, _body: handler.reply(404, {})
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.client_gone = threading.Event()

    def handle_error(self, *arguments: Any) -> None:
        pass


def event(name: str, data: Any, end: str = "\n") -> bytes:
    return f"event: {name}{end}data: {json.dumps(data, ensure_ascii=False)}{end}{end}".encode()


def step(*tokens: tuple[str, str], proposed: int = 0, **fields: Any) -> bytes:
    """A step of (text, origin)s; without proposals the prompt's."""
    listed = [{"id": 10 + index, "text": text, "origin": origin} for index, (text, origin) in enumerate(tokens)]
    times = {"draft_ms": 2.0, "refine_ms": 1.0, "verify_ms": 5.0} if proposed else {"prefill_ms": 20.0}
    accepted = max(len(tokens) - 1, 0) if proposed else 0
    data = {"text": "".join(text for text, _ in tokens), "tokens": listed, "proposed": proposed, "accepted": accepted, **times, **fields}
    return event("step", data)


def done(output: str, **fields: Any) -> bytes:
    usual = {"tokens": [1, 2, 3], "finish_reason": "length", "output_tokens": 3, "queued_ms": 0.0, "total_ms": 100.0, "stats": {}}
    return event("done", {"output": output, **usual, **fields})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from launched()


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def page(browser: Browser, stub: Stub) -> Iterator[Page]:
    yield from opened(browser, stub.address)


def wait(page: Page, status: str) -> None:
    from playwright.sync_api import expect

    expect(page.locator("#status")).to_have_text(status, timeout=10_000)


def generate(page: Page, stub: Stub, answer: Answer, status: str = "Complete") -> None:
    stub.answer = answer
    page.fill("#prompt", "Hello")
    page.keyboard.press("Control+Enter")
    wait(page, status)


def error_of(page: Page) -> str:
    return page.locator(".error").first.inner_text()


PARSINGS = """() => {
  const read = (pieces) => {
    const events = [], parser = new EventParser((name, data) => events.push([name, data]));
    pieces.forEach((piece) => parser.push(piece));
    return JSON.stringify(events);
  };
  const lines = [
    "\ufeff: ping", "", "event: step", "data: {\\"text\\": \\"é 語 \U0001f600\\"}", "id: 7", "",
    ":", "data:one", "data: two", "nonsense", "", "event: step", "", "data: cut off",
  ];
  const found = new Set();
  for (const end of ["\\n", "\\r\\n", "\\r"]) {
    const bytes = new TextEncoder().encode(lines.join(end));
    for (let cut = 0; cut <= bytes.length; cut++) found.add(read([bytes.slice(0, cut), bytes.slice(cut)]));
    found.add(read([...bytes].map((byte) => new Uint8Array([byte]))));
  }
  return [...found].map((text) => JSON.parse(text));
}"""

# How each origin is underlined, whatever its colour.
LINES = """() => ["drafter", "refiner", "target"].map((origin) => {
  const style = getComputedStyle(document.querySelector(`.output .${origin}`));
  return style.textDecorationLine === "none" ? "none" : style.textDecorationStyle;
})"""

# Of every element that shows text: its contrast with what is behind it, as WCAG defines it.
CONTRASTS = """() => {
  const channels = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
  const linear = (value) => value / 255 <= .04045 ? value / 255 / 12.92 : ((value / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const below = (node) => node ? over(channels(getComputedStyle(node).backgroundColor), below(node.parentElement)) : [255, 255, 255];
  const hasText = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  const found = [];
  for (const node of document.querySelectorAll("body *:not(script, style, template, option)")) {
    if (!node.checkVisibility() || node.disabled || !(hasText(node) || node.matches("input:not([type=checkbox]), textarea"))) continue;
    const back = below(node), [a, b] = [light(over(channels(getComputedStyle(node).color), back)), light(back)];
    found.push([(Math.max(a, b) + .05) / (Math.min(a, b) + .05), node.className || node.id || node.tagName]);
  }
  return found;
}"""


# What can be read off the file.


def test_page_asks_nobody_else_and_never_makes_markup_of_text() -> None:
    source = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"https?://[^'\"\s)]+", source) == ["http://www.w3.org/2000/svg"]
    assert "connect-src 'self'" in source
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage|sessionStorage|cookie", source
    )


# Streams.


def test_tokens_show_their_origin_and_figures_count_rounds(page: Page, stub: Stub) -> None:
    first = step(("One", "target"))
    second = step((" two", "drafter"), (" three", "refiner"), (" four", "target"), proposed=4)
    third = step((" five", "target"), proposed=4)
    end = done("One two three four five", output_tokens=5, time_to_first_token_ms=30.0, total_ms=100.0)
    generate(page, stub, lambda handler, _: handler.stream(first, second, third, end))
    by_origin = [page.locator(f".output .{origin}").all_text_contents() for origin in ORIGINS]
    assert by_origin == [[" two"], [" three"], ["One", " four", " five"]]
    assert "round 1" in str(page.locator(".output .refiner").get_attribute("title"))
    assert [figure(page, name) for name in ("tau", "rounds", "tokens")] == ["2.00", "2", "5"]
    assert [figure(page, name) for name in ("acceptance", "per_token", "first_token")] == ["25.0%", "17.5ms", "30.0ms"]
    assert page.locator(".parts b").all_text_contents() == ["20.0 ms", "4.0 ms", "2.0 ms", "10.0 ms"]
    assert page.locator("canvas").get_attribute("aria-label") == "2 rounds, 2.00 tokens kept per round"
    assert stub.bodies == [{"prompt": "Hello", "stream": True, "max_tokens": 128, "temperature": 0, "speculation": "on"}]
    lines = page.evaluate(LINES)
    assert len(set(lines)) == 3, "an origin must be told by more than its colour"


def test_parser_takes_bytes_in_any_pieces(page: Page) -> None:
    """Every way to cut the stream in two, and byte by byte, for every line end."""
    events = page.evaluate(PARSINGS)
    assert events == [[["step", '{"text": "é 語 😀"}'], ["message", "one\ntwo"]]]


def test_split_characters_pings_and_line_ends_over_the_network(page: Page, stub: Stub) -> None:
    stream = (
        b": hello\r\n\r\n"
        + step(("語", "target")).replace(b"\n", b"\r\n")
        + b": ping\r\n\r\n"
        + step((" é", "drafter"), ("\n😀", "target"), proposed=2)
    )

    def in_pieces(handler: Handler, _body: dict[str, Any]) -> None:
        handler.start_stream()
        marks = (stream.index("語".encode()) + 1, stream.index("é".encode()) + 1, stream.index("😀".encode()) + 2, len(stream))
        for start, stop in zip((0, *marks), marks, strict=False):
            handler.send(stream[start:stop])
            time.sleep(0.03)
        handler.send(done("語 é\n😀"))
        handler.send(b"")

    generate(page, stub, in_pieces)
    assert text_of(page) == "語 é\n😀"


def test_text_of_the_server_stays_text(page: Page, stub: Stub) -> None:
    attack = "<img src=x onerror=alert(1)><b>"
    stub.answer = lambda handler, _: handler.stream(
        step((attack, "target")), event("error", {"error": {"message": attack, "code": "timeout"}})
    )
    page.fill("#prompt", attack)
    page.click("#generate")
    wait(page, "Failed")
    assert text_of(page) == attack
    assert error_of(page) == attack
    assert page.locator("#panes :is(img, .output b, .error b)").count() == 0


@pytest.mark.parametrize(
    ("steps", "output"),
    [
        ([("It ends", "target"), (" here. END", "drafter")], "It ends here."),
        ([("Half", "target"), ("", "drafter")], "Half 語"),
        ([("entirely", "target"), (" different", "drafter")], "something else"),
        ([("", "target")], ""),
    ],
)
def test_response_has_the_last_word_on_the_text(page: Page, stub: Stub, steps: list[tuple[str, str]], output: str) -> None:
    generate(page, stub, lambda handler, _: handler.stream(step(*steps), done(output, finish_reason="stop")))
    assert text_of(page) == output
    assert "the text ended" in page.locator(".state").inner_text()


def test_many_rounds_share_bars(page: Page, stub: Stub) -> None:
    rounds = [step((" a", "drafter"), (" b", "target"), proposed=3) for _ in range(600)]
    generate(page, stub, lambda handler, _: handler.stream(step(("x", "target")), b"".join(rounds), done("x" + " a b" * 600)))
    assert figure(page, "rounds") == "600"
    assert re.match(r"Each bar is the mean of \d+ rounds", page.locator(".readout").inner_text())
    for key, rounds_of_bar in (("End", r"Rounds? (\d+ to )?600\b"), ("Home", r"Rounds 1 to"), ("ArrowRight", r"Rounds (?!1 )\d+ to")):
        page.locator("canvas").press(key)
        assert re.match(rounds_of_bar, page.locator(".readout").inner_text())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# What goes wrong.


def test_error_event_keeps_the_text_and_says_why(page: Page, stub: Stub) -> None:
    stream = (step(("Some", "target")), event("error", {"error": {"message": "the request took longer than 2 s", "code": "timeout"}}))
    generate(page, stub, lambda handler, _: handler.stream(*stream), "Failed")
    assert (text_of(page), error_of(page)) == ("Some", "the request took longer than 2 s")
    assert page.is_enabled("#generate")


def test_server_that_dies_in_the_middle(page: Page, stub: Stub) -> None:
    def die(handler: Handler, _body: dict[str, Any]) -> None:
        handler.start_stream()
        handler.send(step(("Some", "target")))
        time.sleep(0.1)
        handler.vanish()

    generate(page, stub, die, "Failed")
    assert text_of(page) == "Some"
    assert "connection to the server was lost" in error_of(page)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda handler, _: handler.stream(step(("Some", "target"))), "ended before the text was complete"),
        (lambda handler, _: handler.stream(b"event: step\ndata: {oops\n\n"), "not JSON"),
        (lambda handler, _: handler.vanish(), "cannot be reached"),
        (lambda handler, _: handler.reply(200, {"output": "x"}), "without a stream"),
        (
            lambda handler, _: handler.reply(429, {"error": {"message": "64 wait"}}, Retry_After="7"),
            "Try again in 7 s. The server says: 64 wait",
        ),
        (
            lambda handler, _: handler.reply(503, {"error": {"message": "draining"}}, Retry_After="10"),
            "takes no requests now. Try again in 10 s.",
        ),
        (
            lambda handler, _: handler.reply(400, {"error": {"message": "num_passes is 9, expected 0 or 4"}}),
            "num_passes is 9, expected 0 or 4",
        ),
        (lambda handler, _: handler.reply(502, b"<h1>Bad gateway</h1>", "text/html"), "HTTP 502"),
    ],
    ids=["end", "not-json", "unreachable", "no-stream", "busy", "draining", "refused", "proxy"],
)
def test_failures_in_plain_words(page: Page, stub: Stub, answer: Answer, words: str) -> None:
    generate(page, stub, answer, "Failed")
    assert words in error_of(page)
    assert page.is_enabled("#generate")


def test_key_is_asked_for_and_sent_and_kept_nowhere(page: Page, stub: Stub) -> None:
    def guarded(handler: Handler, _body: dict[str, Any]) -> None:
        if handler.headers["Authorization"] != "Bearer s3cret":
            handler.reply(401, {"error": {"message": "no key"}})
        else:
            handler.stream(step(("In", "target")), done("In"))

    generate(page, stub, guarded, "Failed")
    assert "API key" in error_of(page)
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type("s3cret")
    generate(page, stub, guarded)
    assert text_of(page) == "In"
    assert "s3cret" not in page.url + json.dumps(page.context.storage_state())
    page.fill("#key", "schlüssel")
    generate(page, stub, guarded, "Failed")
    assert "not ASCII" in error_of(page)
    page.reload()
    assert page.input_value("#key") == ""


@pytest.mark.parametrize("by", ["Escape", "click"])
def test_stop_cancels_at_the_server(page: Page, stub: Stub, by: str) -> None:
    def endless(handler: Handler, _body: dict[str, Any]) -> None:
        handler.start_stream()
        for _ in range(500):
            handler.send(step((" on", "target")))
            time.sleep(0.02)

    stub.answer = endless
    page.fill("#prompt", "Hello")
    page.click("#generate")
    page.locator(".output .t").first.wait_for()
    page.keyboard.press("Escape") if by == "Escape" else page.click("#stop")
    wait(page, "Stopped")
    assert stub.client_gone.wait(5)
    assert text_of(page).startswith(" on")
    assert not page.locator(".error").is_visible()
    assert page.evaluate("document.activeElement.id") == "generate"


def test_nothing_is_sent_of_a_form_that_is_wrong(page: Page, stub: Stub) -> None:
    page.keyboard.press("Control+Enter")
    page.fill("#prompt", "Hello")
    page.fill("#max_tokens", "0")
    page.keyboard.press("Control+Enter")
    page.fill("#max_tokens", "8")
    page.fill("#num_passes", "2")
    page.fill("#draft_steps", "3")
    page.fill("#temperature", "0.7")
    generate(page, stub, lambda handler, _: handler.stream(step(("x", "target")), done("x")))
    assert stub.bodies == [
        {"prompt": "Hello", "stream": True, "max_tokens": 8, "temperature": 0.7, "speculation": "on", "draft_steps": 3, "num_passes": 2}
    ]


def test_line_about_the_server(browser: Browser, stub: Stub) -> None:
    stub.ready = (503, {"error": {"message": "it finishes what it has"}})
    for page in opened(browser, stub.address):
        page.get_by_text("not ready: it finishes what it has").wait_for()
        page.get_by_text("Model: stub/model").wait_for()
        stub.ready = (200, {"status": "ready", "slots": 4})
        page.fill("#key", "abc")
        page.press("#key", "Tab")
        page.get_by_text("ready, 4 slots").wait_for()
    assert stub.keys[-1] == "Bearer abc"


# Side by side.


@pytest.mark.parametrize(
    ("plain", "words"), [("a b", "Both texts are equal, token by token (3 tokens)."), ("a c", "differ from character 3 on")]
)
def test_comparison_says_if_texts_are_equal_and_what_the_times_are_worth(page: Page, stub: Stub, plain: str, words: str) -> None:
    together = threading.Barrier(2, timeout=5)

    def both(handler: Handler, body: dict[str, Any]) -> None:
        together.wait()
        if body["speculation"] == "on":
            handler.stream(step(("a", "target")), step((" b", "drafter"), proposed=2), done("a b", total_ms=150.0, queued_ms=50.0))
        else:
            handler.stream(step(("a", "target")), step((plain[1:], "target")), done(plain, total_ms=250.0))

    page.check("#compare")
    page.fill("#num_passes", "2")
    generate(page, stub, both)
    assert [text_of(page, pane) for pane in (0, 1)] == ["a b", plain]
    verdict = page.locator("#verdict").inner_text()
    assert words in verdict
    assert "2.50 times as fast" in verdict
    assert "Not a measurement" in verdict
    assert "xpress-export bench" in verdict
    assert sorted((body["speculation"], body.get("num_passes")) for body in stub.bodies) == [("off", None), ("on", 2)]


@pytest.mark.parametrize("waiting", ["on", "off"])
def test_comparison_tells_when_one_waited_for_the_other(page: Page, stub: Stub, waiting: str) -> None:
    def one_slot(handler: Handler, body: dict[str, Any]) -> None:
        queued = 100.0 if body["speculation"] == waiting else 0.0
        handler.stream(step(("a", "target")), done("a", total_ms=queued + 100.0, queued_ms=queued))

    page.check("#compare")
    generate(page, stub, one_slot)
    verdict = page.locator("#verdict").inner_text()
    assert "one waited for a free slot" in verdict
    assert "1.00 times as fast" in verdict


def test_half_a_comparison_is_none(page: Page, stub: Stub) -> None:
    def one_of_two(handler: Handler, body: dict[str, Any]) -> None:
        if body["speculation"] == "on":
            handler.stream(step(("a", "target")), done("a"))
        else:
            handler.reply(429, {"error": {"message": "full"}})

    page.check("#compare")
    generate(page, stub, one_of_two, "Failed")
    assert "Nothing to compare" in page.locator("#verdict").inner_text()
    assert text_of(page) == "a"


# How it looks.


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_text_is_legible_and_fits(browser: Browser, stub: Stub, scheme: str, width: int) -> None:
    def mixed(handler: Handler, body: dict[str, Any]) -> None:
        if body["speculation"] == "off":
            handler.reply(429, {"error": {"message": "x" * 200}})
        else:
            handler.stream(
                step(("a", "target")), step((" b" * 200, "drafter"), ("c" * 300, "refiner"), proposed=3), done("a" + " b" * 200 + "c" * 300)
            )

    for page in opened(browser, stub.address, viewport={"width": width, "height": 800}, color_scheme=scheme):
        page.check("#compare")
        generate(page, stub, mixed, "Failed")
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 40
        assert not [found for found in contrasts if found[0] < 4.5]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("[...document.querySelectorAll('.output')].every((output) => output.scrollWidth <= output.clientWidth)")
        unnamed = page.evaluate(
            "[...document.querySelectorAll('input, textarea, select')].filter((field) => !field.labels.length).map((field) => field.id)"
        )
        assert not unnamed
        assert page.locator(".output").first.get_attribute("aria-live") == "off"
