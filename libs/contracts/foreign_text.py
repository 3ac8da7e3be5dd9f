"""The text of clients or other processes, made safe: escaped for display, and without keys for storage."""

import re
from typing import Any, Final

_UNSEEN: Final = (
    r"\x00-\x1f\x7f-\x9f"  # C0, delete and C1: line ends, escape codes and CSI, which terminals obey
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of what follows
    r"\u2028\u2029\u200b\u2060\ufeff"  # line separators, and characters without width
    r"\ud800-\udfff\U000e0000-\U000e007f"  # lone surrogates, which cannot be written; tags, which nothing shows
)
_CONTROLS: Final = re.compile(f"[{_UNSEEN}]")
_CONTROLS_IN_LINES: Final = re.compile(rf"(?![\n\t])[{_UNSEEN}]")
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

_KEY: Final = re.compile(
    r"(?P<own>sk-fulcrum-)[A-Za-z0-9_-]+"
    r"|(?P<other>(?<![A-Za-z0-9])(?:sk-(?:proj-|ant-)?|hf_))[A-Za-z0-9_-]{16,}"  # another service's
    r"|(?P<bearer>\bbearer(?:\s|\+|%20)+)[^\s\"',;&]{16,}",
    re.IGNORECASE,
)
MASK: Final = "***"


def plain(text: str, *, lines: bool = False) -> str:
    """Escape characters that a terminal would interpret or not show. `lines` keeps line ends and tabs, for text of many
    lines.
    """
    return (_CONTROLS_IN_LINES if lines else _CONTROLS).sub(_escaped, text)


def plain_values(value: Any) -> Any:
    """Return the same JSON value with every string in it escaped."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(name): plain_values(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain_values(each) for each in value]
    return value


def masked(text: str) -> str:
    """Replace the secret part of each key or bearer token by MASK."""
    return _KEY.sub(_kind_alone, text)


def masked_values(value: Any) -> Any:
    """Return the same value with every string in it masked. Values other than text and its containers are kept."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, bytes):
        return masked(value.decode("utf-8", "backslashreplace"))
    if isinstance(value, dict):
        return {masked_values(name): masked_values(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [masked_values(each) for each in value]
    return value


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return _SHORT.get(character) or character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _kind_alone(found: re.Match[str]) -> str:
    return f"{found['own'] or found['other'] or found['bearer']}{MASK}"
