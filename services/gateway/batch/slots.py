"""How much of the capacity batch lines may have, and the slots that are taken before a line is read."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

LOOK_AHEAD = 4
"""Lines that may be in flight where workers show no room at all, so that they see that more could be done."""
MAX_LINES_WAITING = 32
"""Lines in the gateway's queue: enough for one round of binding, and no more are read while workers take none."""
POLL_S = 0.02
"""How soon capacity that has come free is seen: credits come and go without anybody being told."""

WITHOUT_POLL_S = 0.25
"""How soon a line that waits for its model's workers sees them."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a gateway sees of its workers at one moment."""

    free: int
    """Sequences that could be bound now."""
    bound: int
    """Sequences that are bound, whoever asked for them."""
    people_waiting: int
    """Requests in the queue that are no batch lines."""
    lines_waiting: int
    """Batch lines in it."""


def allowed(load: Load, share: float, max_in_flight: int) -> int:
    """How many batch lines may be in flight: none more while people wait, and never so many that a person who comes
    finds no room, save for a few that wait for workers. Pure."""
    if load.people_waiting or load.lines_waiting >= MAX_LINES_WAITING:
        return 0
    return min(max_in_flight, max(int(share * (load.free + load.bound)), LOOK_AHEAD))


class Slots:
    """A gateway's slots for batch lines."""

    def __init__(self, load: Callable[[], Load], *, share: float, max_in_flight: int) -> None:
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
