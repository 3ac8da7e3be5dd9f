"""The hazard of an end by elapsed time, for each model and for all models together."""

from typing import Final

import numpy as np

from libs.policy.reserve.counts import Floats, Whole

SHRINK: Final = 6.0
"""The ends in a stretch of time at which a model's own hazard weighs as much as that of all models."""
STRETCHES: Final = 18
LONGEST_S: Final = 7 * 86_400.0


class HazardTable:
    """A piecewise constant hazard per model, over geometrically growing stretches of elapsed time.

    It describes a renewal process of any law, with the usual estimate per stretch: ends over time spent. The last
    stretch has no end. A model's hazard is shrunk towards that of all models, scaled by the model's own pace (Gamma
    prior).
    """

    def __init__(self, shortest_s: float, keep_per_s: float) -> None:
        """Create an empty table.

        `shortest_s` is the end of the first stretch, and `keep_per_s` the decay of evidence per second.
        """
        self.edges_s: Floats = np.concatenate([[0.0], np.geomspace(shortest_s, LONGEST_S, STRETCHES)])
        self._keep_per_s = keep_per_s
        self._ends: Floats = np.zeros((0, STRETCHES + 1))
        self._spent_s: Floats = np.zeros((0, STRETCHES + 1))
        self._hazard: Floats = np.zeros((0, STRETCHES + 1))
        self._summed: Floats = np.zeros((0, STRETCHES + 1))

    def grow(self, models: int) -> None:
        """Add rows up to this number of models."""
        more = models - len(self._ends)
        if more > 0:
            room = np.zeros((more, STRETCHES + 1))
            self._ends = np.concatenate([self._ends, room])
            self._spent_s = np.concatenate([self._spent_s, room])
            self.refresh()

    def forget(self, seconds: float) -> None:
        """Decay all evidence by the seconds passed."""
        keep = self._keep_per_s**seconds
        self._ends *= keep
        self._spent_s *= keep

    def learn(self, model: Whole, from_s: Floats, to_s: Floats, ended: Floats) -> None:
        """Add observed spans of elapsed time; `ended` is 1 where the end came at `to_s`, and 0 where it did not."""
        low, high = self.edges_s, np.append(self.edges_s[1:], np.inf)
        spent_s = np.clip(np.minimum(to_s[:, None], high) - np.maximum(from_s[:, None], low), 0.0, None)
        np.add.at(self._spent_s, model, spent_s)
        where = np.searchsorted(self.edges_s, to_s, side="right") - 1
        np.add.at(self._ends, (model, where), ended)

    def refresh(self) -> None:
        """Estimate the hazards again from all evidence."""
        all_ends, all_spent_s = self._ends.sum(axis=0), self._spent_s.sum(axis=0)
        mean = (all_ends.sum() + 0.5) / (all_spent_s.sum() + self.edges_s[1])
        shared = (all_ends + 0.5) / (all_spent_s + 0.5 / mean)
        expected = self._spent_s @ shared
        pace = (self._ends.sum(axis=1) + SHRINK) / (expected + SHRINK)
        prior = shared[None, :] * pace[:, None]
        self._hazard = (self._ends + SHRINK) / (self._spent_s + SHRINK / prior)
        summed = np.cumsum(self._hazard[:, :-1] * np.diff(self.edges_s), axis=1)
        self._summed = np.concatenate([np.zeros((len(summed), 1)), summed], axis=1)

    def cumulative(self, model: Whole, elapsed_s: Floats) -> Floats:
        """Return the hazard integrated from 0; exp of its negative is the probability of lasting that long."""
        place = np.searchsorted(self.edges_s, elapsed_s, side="right") - 1
        return self._summed[model, place] + self._hazard[model, place] * (elapsed_s - self.edges_s[place])
