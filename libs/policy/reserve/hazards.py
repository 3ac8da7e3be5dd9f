"""How soon something that has lasted for so long ends: a hazard by time so far, of each model and of all. Pure."""

from typing import Final

import numpy as np

from libs.policy.reserve.counts import Floats, Whole

SHRINK: Final = 6.0
"""Ends that a model needs in a stretch of time until its own hazard there weighs as much as that of all models."""
STRETCHES: Final = 18
LONGEST_S: Final = 7 * 86_400.0


class HazardTable:
    """Piecewise constant hazards over stretches of elapsed time that grow geometrically; beyond the last it goes on.

    A renewal process of any law, with the usual estimate for each stretch: ends over time spent in it. A model's is
    shrunk to that of all models, which is scaled by how often this model's ends come at all (Gamma prior).
    """

    def __init__(self, shortest_s: float, keep_per_s: float) -> None:
        """shortest_s: the end of the first stretch. keep_per_s: what is left of old evidence after a second."""
        self.edges_s: Floats = np.concatenate([[0.0], np.geomspace(shortest_s, LONGEST_S, STRETCHES)])
        self._keep_per_s = keep_per_s
        self._ends: Floats = np.zeros((0, STRETCHES + 1))
        self._spent_s: Floats = np.zeros((0, STRETCHES + 1))
        self._hazard: Floats = np.zeros((0, STRETCHES + 1))
        self._summed: Floats = np.zeros((0, STRETCHES + 1))

    def grow(self, models: int) -> None:
        """Room for this many models."""
        more = models - len(self._ends)
        if more > 0:
            room = np.zeros((more, STRETCHES + 1))
            self._ends = np.concatenate([self._ends, room])
            self._spent_s = np.concatenate([self._spent_s, room])
            self.refresh()

    def forget(self, seconds: float) -> None:
        """Evidence grows old."""
        keep = self._keep_per_s**seconds
        self._ends *= keep
        self._spent_s *= keep

    def learn(self, model: Whole, from_s: Floats, to_s: Floats, ended: Floats) -> None:
        """Pieces of elapsed time that were watched, with 1 where it ended at `to_s`, 0 where it went on."""
        low, high = self.edges_s, np.append(self.edges_s[1:], np.inf)
        spent_s = np.clip(np.minimum(to_s[:, None], high) - np.maximum(from_s[:, None], low), 0.0, None)
        np.add.at(self._spent_s, model, spent_s)
        where = np.searchsorted(self.edges_s, to_s, side="right") - 1
        np.add.at(self._ends, (model, where), ended)

    def refresh(self) -> None:
        """Estimate anew from what was learned."""
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
        """The hazard's integral from 0; what is left after that long is exp of its negative."""
        place = np.searchsorted(self.edges_s, elapsed_s, side="right") - 1
        return self._summed[model, place] + self._hazard[model, place] * (elapsed_s - self.edges_s[place])
