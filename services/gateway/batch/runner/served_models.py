"""Models that have workers now, and for how long others have had none meanwhile: their lines hold up everybody's."""

from collections.abc import Callable, Sequence

from libs.policy.gateway.view import WorkerView, serves
from libs.runtime.clock import Clock

LOOK_S = 0.25
"""How old what is known may be."""
FORGET_S = 10.0
"""A model that nobody has asked about for so long may have had workers meanwhile."""


class Served:
    """Which models the workers of one gateway serve."""

    def __init__(self, views: Callable[[], Sequence[WorkerView]], models: Sequence[str], clock: Clock) -> None:
        self._views = views
        self._models = models
        self._clock = clock
        self._looked_ns = 0
        self._served: frozenset[str] = frozenset()
        self._away: dict[str, tuple[int, int]] = {}
        """Since when, and when that was last asked."""

    def has(self, model: str) -> bool:
        """Whether workers serve the model."""
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns >= LOOK_S * 1e9:
            views = self._views()
            self._looked_ns, self._served = now_ns, frozenset(name for name in self._models if serves(views, name))
        return model in self._served

    def away_s(self, model: str) -> float:
        """For how long the model has had no workers while others had some; as far as somebody has asked."""
        if self.has(model) or not self._served:
            self._away.pop(model, None)
            return 0.0
        now_ns = self._clock.now_ns()
        since_ns, asked_ns = self._away.get(model, (now_ns, now_ns))
        if now_ns - asked_ns > FORGET_S * 1e9:
            since_ns = now_ns
        self._away[model] = since_ns, now_ns
        return (now_ns - since_ns) / 1e9
