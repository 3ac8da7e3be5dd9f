"""The slots that are taken before a line of a batch job is read."""

import asyncio
from collections.abc import Callable

from libs.policy.batch import GatewayLoad, allowed

POLL_S = 0.02
"""Interval between checks for free capacity: no event announces that credits have come or gone."""

WITHOUT_POLL_S = 0.25
"""Interval between checks by a line that waits for its model's workers."""


class Slots:
    """A gateway's slots for batch lines."""

    def __init__(self, load: Callable[[], GatewayLoad], *, share: float, max_in_flight: int) -> None:
        self._load = load
        self._share = share
        self._max_in_flight = max_in_flight
        self.in_flight = 0
        """Lines that have a slot."""

    async def take(self, give_up: Callable[[], object]) -> bool:
        """Wait for a slot, which `give` returns; False when `give_up()` came true first."""
        while not give_up():
            if self.in_flight < allowed(self._load(), self._share, self._max_in_flight):
                self.in_flight += 1
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def without(self, until: Callable[[], bool]) -> None:
        """Let others have the caller's slot until `until()` and there is one for the caller again."""
        self.give()
        try:
            while True:
                if until() and self.in_flight < allowed(self._load(), self._share, self._max_in_flight):
                    return
                await asyncio.sleep(WITHOUT_POLL_S)
        finally:
            self.in_flight += 1  # which the caller gives, however this ends

    def give(self) -> None:
        """Return one."""
        self.in_flight -= 1
