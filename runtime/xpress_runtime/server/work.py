"""Requests on their way: from the session's thread to the event loop, until they end or their client goes away.

Knows the session's interface and asyncio; knows nothing of bodies and answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from xpress_runtime.errors import UserError
from xpress_runtime.fit import THINKING, switches_thinking
from xpress_runtime.generation import GenerationConfig, GenerationResult
from xpress_runtime.server.metrics import Metrics
from xpress_runtime.server.problems import CLIENT_GONE, RETRY_SECONDS, ApiError, refused
from xpress_runtime.server.settings import ServerSettings, target_name
from xpress_runtime.serving import BatchSession, Draining, QueueFull, Request, Step

# Between the last step and the result lies nothing that takes time.
_RESULT_SECONDS = 10.0


class Work:
    """One request of the session, seen from the event loop."""

    def __init__(self, request: Request, steps: asyncio.Queue[Step | None]) -> None:
        self.request = request
        self._steps = steps
        self._ended = False

    async def steps(self) -> AsyncIterator[Step]:
        """Steps as they come, to the end, whichever it is."""
        while not self._ended:
            step = await self._steps.get()
            if step is None:
                self._ended = True
            else:
                yield step

    async def result(self) -> GenerationResult:
        """What came out, after the last step. Raises what the session's request raises."""
        async for _step in self.steps():
            pass
        return await run_in_threadpool(self.request.result, _RESULT_SECONDS)

    async def result_for(self, http: HttpRequest) -> GenerationResult:
        """The result, for a client that waits for it; where it goes away, the request is cancelled and ApiError ends the answer."""
        result = asyncio.ensure_future(self.result())
        gone = asyncio.ensure_future(_until_gone(http))
        try:
            await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ApiError(CLIENT_GONE, "the client went away", code="cancelled")
            return result.result()
        finally:
            self.request.cancel()
            result.cancel()
            gone.cancel()


async def _until_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Service:
    """What the routes of one application share."""

    def __init__(self, session: BatchSession, settings: ServerSettings) -> None:
        self.session = session
        self.settings = settings
        self.metrics = Metrics(session)
        self.model = settings.model_name or target_name(session.bundle)
        self._lock = threading.Lock()
        self._active: set[Request] = set()
        session.observe(self.metrics)

    @property
    def capacity(self) -> int:
        """Tokens of prompt and output together."""
        return self.session.bundle.manifest.capacity

    @property
    def most_tokens(self) -> int:
        """Tokens that a request may ask for."""
        return min(self.session.limits.max_new_tokens or self.capacity, self.capacity)

    @property
    def has_template(self) -> bool:
        return self.session.tokenizer is not None and self.session.tokenizer.has_chat_template

    @cached_property
    def switches_thinking(self) -> bool:
        """Whether the chat template has a switch for thinking."""
        return switches_thinking(self.session.tokenizer)

    def tokens(self, asked: int | None, default: int, field: str = "max_tokens") -> int:
        """How many tokens to generate at most. Raises ApiError where more are asked for than one request may have."""
        most = self.most_tokens
        if asked is None:
            return min(default, most)
        if asked > most:
            raise ApiError(400, f"{field} is {asked}, expected at most {most} on this server", param=field, code="invalid_value")
        return asked

    def thinking(self, thinking: bool | None, *, is_chat: bool) -> dict[str, Any]:
        """Variables for the chat template. Raises ApiError where nothing would come of them."""
        if thinking is None:
            return {}
        if not is_chat or not self.switches_thinking:
            reason = "the model's chat template cannot switch it" if is_chat else "the prompt is no chat"
            raise ApiError(400, f"thinking is {str(thinking).lower()}, and {reason}; leave it out", param="thinking", code="invalid_value")
        return {THINKING: thinking}

    async def submit(
        self,
        http: HttpRequest,
        prompt: Any,
        config: GenerationConfig,
        *,
        chat_variables: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        prompt_field: str = "prompt",
        fields: Mapping[str, str] | None = None,
    ) -> Work:
        """Hand a request to the session. Raises ApiError; ``prompt_field`` and ``fields`` are the request's names of what may be wrong."""
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[Step | None] = asyncio.Queue()

        def on_step(step: Step | None) -> None:
            # A loop that is closed has nobody left who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(steps.put_nowait, step)
            if step is None:
                self._forget_ended()

        hand_over = partial(
            self.session.submit,
            prompt,
            config,
            chat_variables=chat_variables,
            client=_client(http),
            timeout=timeout,
            on_step=on_step,
        )
        try:
            if (reason := self.session.status().failed) is not None:
                raise ApiError(503, f"the server has failed and must be started again: {reason}", code="failed", retry_after=RETRY_SECONDS)
            # Encoding a long prompt takes a while, and the loop has other clients.
            request = await run_in_threadpool(hand_over)
        except QueueFull as problem:
            self.metrics.refused("queue_full")
            raise refused(problem) from None
        except Draining as problem:
            self.metrics.refused("draining")
            raise refused(problem) from None
        except UserError as problem:
            self.metrics.refused("invalid")
            raise refused(problem, fields, prompt=prompt_field) from None
        with self._lock:
            self._active.add(request)
        self._forget_ended()
        return Work(request, steps)

    def cancel_all(self) -> None:
        """End every request that came in here."""
        with self._lock:
            active = list(self._active)
        for request in active:
            request.cancel()

    def _forget_ended(self) -> None:
        with self._lock:
            self._active = {request for request in self._active if request.state in ("queued", "reading", "running")}


def _client(http: HttpRequest) -> str:
    """Whose request it is, so that clients take turns: those of an address, and of a key where there are several."""
    host = http.client.host if http.client is not None else ""
    return f"{host} {http.scope.get('state', {}).get('api_key', '')}".strip()
