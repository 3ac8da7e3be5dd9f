"""Order a share's lines so that prompts with the same beginning run one after the other. Pure.

The worker then still has the common prefix cached: however full its cache is, that prefix is the youngest entry. The
look-ahead is one share: a megabyte, or its longest line.
"""

from collections.abc import Sequence

import msgspec

from services.gateway.batch.lines.line import Line


class _Prompt(msgspec.Struct):
    model: str = ""
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Prompt)


def by_prefix(lines: Sequence[Line]) -> list[int]:
    """Indices of `lines` in the order to run them; refused lines come first."""
    return sorted(range(len(lines)), key=lambda place: _key(lines[place]))


def _key(line: Line) -> tuple[str, bytes]:
    if line.refusal is not None:
        return "", b""
    try:
        found = _decoder.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", b""
    return found.model, bytes(found.messages) + bytes(found.prompt)
