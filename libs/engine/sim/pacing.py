"""Letting modelled time pass on a real event loop, whose timers are coarse."""

import asyncio

MIN_SLEEP_S = 50e-6
"""Less than this is not slept but owed to the next call."""
MAX_CARRY_S = 2e-3


class Pacer:
    """Sleeps modelled durations; what one sleep missed by is made up for in the next, so that the mean is right."""

    def __init__(self) -> None:
        self._carry_s = 0.0

    async def spend(self, duration_s: float) -> None:
        """Let `duration_s` pass, together with what is owed."""
        wanted = duration_s + self._carry_s
        if wanted >= MIN_SLEEP_S:
            clock = asyncio.get_running_loop().time
            start = clock()
            await asyncio.sleep(wanted)
            wanted -= clock() - start
        self._carry_s = min(max(wanted, -MAX_CARRY_S), MAX_CARRY_S)
