"""Durations as users write them: "500ms", "2s", "1m"."""

import re
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.telemetry.rollups import TIERS, Tier

MAX_WINDOW_NS: Final = 600 * 1_000_000_000
MIN_WINDOW_NS: Final = 100_000_000
ALLOWED: Final = "a number and ms, s or m, from 100ms to 10m, for example 500ms, 2s or 1m"
TIER_NAMES: Final = {
    f"{tier.window_ns // 1_000_000}ms" if tier.window_ns < 10**9 else f"{tier.window_ns // 10**9}s": tier
    for tier in TIERS
}
_UNIT_NS: Final = {"ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000, "h": 3_600_000_000_000}
_PATTERN: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(ms|s|m|h)", re.ASCII)


def parse_window_ns(text: str) -> int:
    """Return the window in whole ns. Raise InvalidRequest, which names the parameter and the allowed values."""
    window_ns = _parse_ns(text)
    if not MIN_WINDOW_NS <= window_ns <= MAX_WINDOW_NS:
        raise InvalidRequest(f"window={text[:40]!r} is not {ALLOWED}", param="window")
    return window_ns


def parse_tier(text: str) -> Tier:
    """Return the tier of that window length. Raise InvalidRequest, which names those that exist."""
    tier = TIER_NAMES.get(text.strip())
    if tier is None:
        raise InvalidRequest(f"window={text[:40]!r} is not one of {', '.join(TIER_NAMES)}", param="window")
    return tier


def parse_span_ns(text: str, tier: Tier) -> int:
    """Return the span in whole ns, at least one window and at most as many as are kept. Raise InvalidRequest
    otherwise.
    """
    span_ns, longest_ns = _parse_ns(text), tier.window_ns * tier.windows
    if not tier.window_ns <= span_ns <= longest_ns:
        raise InvalidRequest(
            f"span={text[:40]!r} is not a number and ms, s, m or h, from {tier.window_ns / 1e9:g}s "
            f"to {longest_ns / 1e9:g}s for these windows",
            param="span",
        )
    return span_ns


def _parse_ns(text: str) -> int:
    """Return the duration in ns; 0 if the text is none."""
    match = _PATTERN.fullmatch(text.strip())
    return round(float(match[1]) * _UNIT_NS[match[2]]) if match else 0
