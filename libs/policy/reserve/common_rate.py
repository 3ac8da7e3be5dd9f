"""What all models' rates have in common at the moment: a hidden factor, followed window by window. Pure."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.reserve.counts import Floats

Bools = NDArray[np.bool_]

SPREADS: Final = (0.1, 0.2, 0.35, 0.6, 1.0)
"""Standard deviations of the factor's logarithm that are tried; 0, no common factor, is tried too."""
KEEPS: Final = (0.0, 0.8, 0.95, 0.985, 0.997)
"""What is left of the logarithm after a window, on average."""
NODES: Final = 15
REACH: Final = 2.8
"""Standard deviations that the nodes span to either side."""
CLEAR: Final = 2.0
"""Nats by which a common factor has to predict better than none before one is believed in."""
EVIDENCE_KEEP: Final = 0.98
"""Per window."""
MOST_NATS: Final = 10.0
"""That one window may say for or against a setting."""


class CommonRate:
    """A filter of a log-normal factor of mean 1 that reverts to its mean (AR(1)), on a grid, for each setting tried.

    What is seen of a window is which models were asked, each with its own probability given the factor. So what models
    do by themselves, however bursty, is no evidence of something in common.
    """

    def __init__(self) -> None:
        middle = np.linspace(-REACH, REACH, NODES)
        weight = np.exp(-middle * middle / 2)
        weight /= weight.sum()
        self._settings = [(spread, keep) for spread in SPREADS for keep in KEEPS]
        spreads = np.array([spread for spread, _ in self._settings])
        factor = np.exp(spreads[:, None] * middle)
        self._factor = factor / (factor @ weight)[:, None]
        """[setting, node]"""
        self._step = np.stack([_transition(middle, weight, keep) for _, keep in self._settings])
        self._belief = np.repeat(weight[None, :], len(self._settings), axis=0)
        self._evidence = np.zeros(len(self._settings))

    @property
    def setting(self) -> tuple[float, float] | None:
        """Spread and keep of the setting that predicted best; None: models have nothing in common."""
        best = int(self._evidence.argmax())
        return self._settings[best] if self._evidence[best] > CLEAR else None

    def ahead(self) -> tuple[Floats, Floats]:
        """Values of the factor in the next window, and their probabilities."""
        if self.setting is None:
            return np.ones(1), np.ones(1)
        best = int(self._evidence.argmax())
        belief = self._belief[best]
        kept = belief > 1e-5
        return self._factor[best][kept], belief[kept] / belief[kept].sum()

    def learn(self, hazard: Floats, asked: Floats, counted: Bools) -> float:
        """A window has passed in which models with these cumulative hazards were asked this often.

        counted: whose arrivals are a Poisson process given the factor, so that their number tells more than whether
        there were any. Returns what the factor is now believed to have been in it.
        """
        flat = self._factor.reshape(-1)
        often, whether = hazard[counted], hazard[~counted]
        likely = float(asked[counted].sum()) * np.log(flat) - (flat - 1) * float(often.sum())
        came = (asked[~counted] > 0).astype(np.float64)
        likely += np.log(-np.expm1(-flat[:, None] * whether[None, :])) @ came - flat * float(whether @ (1 - came))
        likely -= float(np.log(-np.expm1(-whether)) @ came - whether @ (1 - came))
        likely = likely.reshape(self._factor.shape)
        most = likely.max(axis=1, keepdims=True)
        weighed = self._belief * np.exp(likely - most)
        total = weighed.sum(axis=1, keepdims=True)
        reported = np.clip(np.log(total[:, 0]) + most[:, 0], -MOST_NATS, MOST_NATS)
        self._evidence = self._evidence * EVIDENCE_KEEP + reported
        after = weighed / total
        best = int(self._evidence.argmax())
        seen = float(self._factor[best] @ after[best]) if self.setting is not None else 1.0
        self._belief = np.einsum("sn,snm->sm", after, self._step)
        return seen


def _transition(middle: Floats, weight: Floats, keep: float) -> Floats:
    """[from, to] of an AR(1) of variance 1 on the nodes."""
    if not keep:
        return np.repeat(weight[None, :], NODES, axis=0)
    spread = np.sqrt(1 - keep * keep)
    chance = np.exp(-(((middle[None, :] - keep * middle[:, None]) / max(spread, 0.2)) ** 2) / 2)
    return np.asarray(chance / chance.sum(axis=1, keepdims=True))
