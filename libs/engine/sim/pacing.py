"""Letting modelled time pass on a real event loop, whose timers are coarse."""

import asyncio

MIN_SLEEP_S = 50e-6
"""Less than this is not slept, only yielded."""
MAX_CARRY_S = 2e-3


class Pacer:
    """Sleeps modelled durations; what one sleep missed by is made up for in the next, so that the mean is right."""

    def __init__(self) -> None:
        self._carry_s = 0.0

    async def spend(self, duration_s: float) -> None:
        """Let `duration_s` pass; always gives other tasks a turn."""
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        clock = asyncio.get_running_loop().time
        start = clock()
        wanted = duration_s + self._carry_s
        await asyncio.sleep(wanted if wanted >= MIN_SLEEP_S else 0)
        missed = wanted - (clock() - start)
        self._carry_s = min(max(missed, -MAX_CARRY_S), MAX_CARRY_S)
