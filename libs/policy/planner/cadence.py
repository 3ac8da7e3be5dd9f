"""When the planner decides, and when it tells a decision to leave all as it is. Pure."""

from typing import Final

REST_S: Final = 1.0
"""From one decision about a cluster at rest to the next, which says the same."""
KEEP_NS: Final = 900_000_000
"""Between two reports of a decision to keep for the same reasons, by which readers know that the planner
lives. Less than a second by half of the longest period, so that one a second is reported."""


def is_due(*, at_rest: bool, since_s: float, period_s: float) -> bool:
    """Whether to decide in this round, `since_s` after the last decision: in each of them, and every `REST_S` about a
    cluster at rest. Rounds come on a beat of periods: half of one is what they may be off."""
    return not at_rest or since_s >= REST_S - period_s / 2


def is_news(*, same_reasons: bool, since_ns: int) -> bool:
    """Whether to report a decision to keep, `since_ns` after the last one."""
    return not same_reasons or since_ns >= KEEP_NS
