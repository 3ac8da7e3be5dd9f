"""How many workers prompts would keep busy: what was computed of late, and what waits. Pure."""

from typing import Final

HORIZON_NS: Final = 1_000_000_000
"""Within which what waits is to be computed."""


def prompts_wanted(served: float, waiting_ns: float) -> float:
    """Workers' worth of prompts; `served`: computed of late, `waiting_ns`: what one worker would take for what waits.

    While all that comes is served, that is what is wanted. What a cluster falls behind shows in what waits.
    """
    return served + waiting_ns / HORIZON_NS
