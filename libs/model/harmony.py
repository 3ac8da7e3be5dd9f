"""Which tokens of an answer in harmony, gpt-oss's format, are for its reader. Pure.

A generation goes on after `<|start|>assistant`, and is messages: `<|channel|>analysis<|message|>...<|end|>`, then
`<|start|>assistant<|channel|>final<|message|>...<|return|>`. Reasoning comes in channel analysis, tool calls in channel
commentary; the channel's name and a recipient (` to=functions.f`, before or after it) are ordinary tokens. Content is
what the assistant says to nobody but the user: in channel final, or in no channel at all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

MAX_HEADER_BYTES = 256
"""Of a message's role, recipient and channel; a longer header is no answer's."""
_RECIPIENT = b" to="
_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_CONSTRAIN = "<|constrain|>"


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids of the special tokens that set messages apart."""

    start: int
    channel: int
    message: int
    ends: frozenset[int]
    constrain: int
    """Before a content type, in a header; -1 where there is none."""


def find_markers(special: Mapping[str, int]) -> Markers | None:
    """Of a vocabulary's special tokens by their texts; None where one is missing: a model of another format."""
    if not all(text in special for text in _MARKERS):
        return None
    start, channel, message, *ends = (special[text] for text in _MARKERS)
    return Markers(start, channel, message, frozenset(ends), special.get(_CONSTRAIN, -1))


class Verdict(Enum):
    """What becomes of a token."""

    SHOW = auto()
    """It is content, and so are the tokens held before it."""
    HIDE = auto()
    """It is none, nor are they."""
    HOLD = auto()
    """The next one says; at the end of the answer it is content."""


class _State(Enum):
    OPENING = auto()
    """Nothing but the start of an answer without any marker, or of a recipient: the next tokens tell which."""
    HEADER = auto()
    SHOWN = auto()
    HIDDEN = auto()


class Channels:
    """One answer's tokens, judged in order. Whatever they mean, a marker is never shown, nor is a header."""

    def __init__(self, markers: Markers, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of`: what a token adds to the text."""
        self._markers = markers
        self._bytes_of = bytes_of
        self._state = _State.OPENING
        self._header = bytearray(b"assistant")
        self._channel: bytearray | None = None

    def push(self, token_id: int) -> Verdict:
        """The verdict on the next token."""
        markers = self._markers
        if token_id == markers.start:
            self._state, self._header, self._channel = _State.HEADER, bytearray(), None
        elif token_id == markers.channel:
            self._begin_channel()
        elif token_id == markers.message:
            if self._state in (_State.OPENING, _State.HEADER):
                self._state = _State.SHOWN if self._is_content() else _State.HIDDEN
        elif token_id in markers.ends:
            self._state = _State.HIDDEN
        elif token_id == markers.constrain:
            self._add(b" ")  # a content type follows, which is no part of what stands before it
        elif self._state is _State.SHOWN:
            return Verdict.SHOW
        elif self._state is _State.HEADER:
            self._add(self._bytes_of(token_id))
        elif self._state is _State.OPENING:
            return self._opening(token_id)
        return Verdict.HIDE

    def _opening(self, token_id: int) -> Verdict:
        self._add(self._bytes_of(token_id))
        begun = bytes(self._header.removeprefix(b"assistant"))
        if _RECIPIENT.startswith(begun):
            if begun != _RECIPIENT:
                return Verdict.HOLD
        elif not begun.startswith(_RECIPIENT):
            self._state = _State.SHOWN
            return Verdict.SHOW
        self._state = _State.HEADER
        return Verdict.HIDE

    def _begin_channel(self) -> None:
        if self._state not in (_State.OPENING, _State.HEADER):  # a message that begins without its start
            self._header = bytearray(b"assistant")
        self._state, self._channel = _State.HEADER, bytearray()

    def _add(self, more: bytes) -> None:
        part = self._header if self._channel is None else self._channel
        part += more[: MAX_HEADER_BYTES + 1 - len(part)]

    def _is_content(self) -> bool:
        header, channel = bytes(self._header), self._channel
        if len(header) > MAX_HEADER_BYTES or header.split() != [b"assistant"]:
            return False
        if channel is None:
            return True
        words = bytes(channel).split()
        return (
            len(channel) <= MAX_HEADER_BYTES and words[:1] == [b"final"] and not any(b"to=" in word for word in words)
        )
