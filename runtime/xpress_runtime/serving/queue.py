"""Requests that wait: those of one client in their order, clients in turn. Knows nothing about when a request may run."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from xpress_runtime.serving.requests import Request


class FairQueue:
    """Not thread-safe; whoever shares it locks."""

    def __init__(self) -> None:
        # Clients in the order of their turns.
        self._clients: OrderedDict[str, deque[Request]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._clients.values())

    def __iter__(self) -> Iterator[Request]:
        for requests in self._clients.values():
            yield from requests

    def append(self, request: Request) -> None:
        """Behind those of its client."""
        self._clients.setdefault(request.client, deque()).append(request)

    def first(self) -> Request | None:
        """Whose turn it is."""
        return next(iter(self), None)

    def pop(self) -> Request:
        """Take the first one out; its client's next turn is behind every other's."""
        client, requests = next(iter(self._clients.items()))
        request = requests.popleft()
        del self._clients[client]
        if requests:
            self._clients[client] = requests
        return request

    def take(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Take out every request that is ``unwanted``."""
        # Asked once: a request may become unwanted at any moment.
        taken = [request for request in self if unwanted(request)]
        if taken:
            for client, requests in list(self._clients.items()):
                kept = deque(request for request in requests if request not in taken)
                if kept:
                    self._clients[client] = kept
                else:
                    del self._clients[client]
        return taken
