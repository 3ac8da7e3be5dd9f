"""The slots that are taken before a batch line is read."""

import asyncio
from collections.abc import Callable

from libs.policy.batch.capacity import GatewayLoad, allowed

POLL_S = 0.02
"""Interval between checks for free capacity: no event announces that credits have come or gone."""

WITHOUT_POLL_S = 0.25
"""Interval between checks by a line that waits for its model's workers."""


class Slots:
    def __init__(self, load: Callable[[], GatewayLoad], *, share: float, max_in_flight: int) -> None:
        self._load = load
        self._share = share
        self._max_in_flight = max_in_flight
        self.in_flight = 0
        """The number of lines that hold a slot."""

    async def take(self, give_up: Callable[[], object]) -> bool:
        """Wait for a slot, which `give` returns; return False if `give_up()` came true first."""
        while not give_up():
            if self.in_flight < allowed(self._load(), self._share, self._max_in_flight):
                self.in_flight += 1
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def without(self, until: Callable[[], bool]) -> None:
        """Release the caller's slot until `until()` is true and a slot is free again."""
        self.give()
        try:
            while True:
                if until() and self.in_flight < allowed(self._load(), self._share, self._max_in_flight):
                    return
                await asyncio.sleep(WITHOUT_POLL_S)
        finally:
            self.in_flight += 1  # which the caller gives, however this ends

    def give(self) -> None:
        self.in_flight -= 1
