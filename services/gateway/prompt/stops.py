"""Matching of stop strings in streamed text. Pure."""

from collections.abc import Sequence


class StopMatcher:
    """A matcher that finds the stop string completed first, however the text is divided into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def held_chars(self) -> int:
        """Return the number of characters held back because they may begin a stop string."""
        return len(self._held)

    def push(self, text: str, exempt_chars: int = 0) -> tuple[str, bool]:
        """Return the text that can be sent, and whether a stop string ended it.

        A stop string that ends within the first `exempt_chars` of `text` does not count; one that begins there and
        ends later does.
        """
        if not self._stops:
            return text, False
        searched = len(self._held) + exempt_chars
        text = self._held + text
        found = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := text.find(stop, max(searched + 1 - len(stop), 0))) >= 0
        ]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return the text held back, once no more follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
