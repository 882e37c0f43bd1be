"""Finds stop strings in text that arrives in pieces.

Knows text only: no tokens, no models. Which text comes first is decided character by character, so the result does not depend on how the
text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from xpress_runtime.errors import OptionError


class StopStrings:
    """Ends a text before the first stop string that completes; of those that complete at the same character, the longest one.

    A stop string inside a longer one therefore ends the text before the longer one could complete: what would follow it is never
    generated.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise OptionError(f"stop strings are given as one string {stops!r}, expected a list of strings: [{stops!r}]")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str):
                raise OptionError(f"stop string {index} is of type {type(stop).__name__}, expected a string")
            if not stop:
                raise OptionError(f"stop string {index} is empty; leave it out, or name the text to stop at")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._found = False

    @property
    def found(self) -> bool:
        """Whether the text ended at a stop string."""
        return self._found

    def push(self, text: str) -> tuple[str, bool]:
        """Append text. Returns the text that is safe to show, and whether a stop string was found; after that nothing is shown."""
        if self._found:
            return "", True
        if not self._matchers:
            return text, False
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            for matcher in self._matchers:
                matcher.push(character)
            num_matched = max((len(matcher.stop) for matcher in self._matchers if matcher.complete), default=0)
            if num_matched:
                self._found = True
                self._held = ""
                return pending[: end - num_matched], True
        num_held = max(matcher.num_matched for matcher in self._matchers)
        num_safe = len(pending) - num_held
        self._held = pending[num_safe:]
        return pending[:num_safe], False

    def flush(self) -> str:
        """The text that was held back, when no text follows: it did not become a stop string."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.num_matched = 0
        return held


class _Matcher:
    """How much of one stop string the text ends with, by the Knuth-Morris-Pratt failure table."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # failure[n]: after n matched characters, how many of them are also matched if the match started later.
        self._failure = [0, 0]
        for character in stop[1:]:
            num = self._failure[-1]
            while num and stop[num] != character:
                num = self._failure[num]
            self._failure.append(num + 1 if stop[num] == character else 0)

    @property
    def complete(self) -> bool:
        return self.num_matched == len(self.stop)

    def push(self, character: str) -> None:
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._failure[self.num_matched]
        if self.stop[self.num_matched] == character:
            self.num_matched += 1
