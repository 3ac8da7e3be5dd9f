"""Windows as people write them: "500ms", "2s", "1m"."""

import re
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.telemetry.timeline import MAX_WINDOW_NS

MIN_WINDOW_NS: Final = 100_000_000
ALLOWED: Final = "a number and ms, s or m, from 100ms to 10m, for example 500ms, 2s or 1m"
_UNIT_NS: Final = {"ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000}
_PATTERN: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(ms|s|m)", re.ASCII)


def parse_window_ns(text: str) -> int:
    """The window in whole ns; raises InvalidRequest that names the parameter and what is allowed."""
    match = _PATTERN.fullmatch(text.strip())
    window_ns = round(float(match[1]) * _UNIT_NS[match[2]]) if match else 0
    if not MIN_WINDOW_NS <= window_ns <= MAX_WINDOW_NS:
        raise InvalidRequest(f"window={text[:40]!r} is not {ALLOWED}", param="window")
    return window_ns
