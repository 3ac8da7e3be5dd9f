"""The order in which a share's lines are asked: those whose prompts begin alike one after the other. Pure.

Of a prompt that the one before it shares, a worker has the KV still cached, and however full its cache is, it is the
youngest there. The look-ahead is the share: a megabyte, beside its longest line.
"""

from collections.abc import Sequence

import msgspec

from services.gateway.batch.line import Line


class _Prompt(msgspec.Struct):
    model: str = ""
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Prompt)


def by_prefix(lines: Sequence[Line]) -> list[int]:
    """Places of `lines` in the order to ask them; lines that are not asked come first."""
    return sorted(range(len(lines)), key=lambda place: _key(lines[place]))


def _key(line: Line) -> tuple[str, bytes]:
    if line.refusal is not None:
        return "", b""
    try:
        found = _decoder.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", b""
    return found.model, bytes(found.messages) + bytes(found.prompt)
