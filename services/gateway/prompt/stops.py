"""Stop strings in streamed text: what may be sent on, what must wait, where the text ends. Pure."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is complete first, whatever pieces the text comes in."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def held_chars(self) -> int:
        """How much text waits, since it may begin a stop string."""
        return len(self._held)

    def push(self, text: str, exempt_chars: int = 0) -> tuple[str, bool]:
        """What can be sent, and whether a stop string ended the text before it. A stop string that ends within the
        first `exempt_chars` of `text` does not count; one that begins there and ends later does."""
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
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
