"""The slots that are taken before a batch line is read."""

import asyncio
from collections.abc import Callable, Sequence

from libs.policy.batch import GatewayLoad, allowed
from libs.policy.gateway.view import WorkerView, serves
from libs.runtime.clock import Clock

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


# Age at which the list of served models is refreshed.
LOOK_S = 0.25
# A model that nobody has looked up for this long may have had workers meanwhile.
FORGET_S = 10.0


class ServedModels:
    """The models that the workers of one gateway serve."""

    def __init__(self, views: Callable[[], Sequence[WorkerView]], models: Sequence[str], clock: Clock) -> None:
        self._views = views
        self._models = models
        self._clock = clock
        self._looked_ns = 0
        self._served: frozenset[str] = frozenset()
        self._away: dict[str, tuple[int, int]] = {}
        """The time since which a model has had no workers, and the time of the last look-up."""

    def has(self, model: str) -> bool:
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns >= LOOK_S * 1e9:
            views = self._views()
            self._looked_ns, self._served = now_ns, frozenset(name for name in self._models if serves(views, name))
        return model in self._served

    def away_s(self, model: str) -> float:
        """Return for how long the model has had no workers while others had some, as far as look-ups show."""
        if self.has(model) or not self._served:
            self._away.pop(model, None)
            return 0.0
        now_ns = self._clock.now_ns()
        since_ns, asked_ns = self._away.get(model, (now_ns, now_ns))
        if now_ns - asked_ns > FORGET_S * 1e9:
            since_ns = now_ns
        self._away[model] = since_ns, now_ns
        return (now_ns - since_ns) / 1e9
