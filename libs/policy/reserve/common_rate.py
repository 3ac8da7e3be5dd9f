"""The hidden factor that the rates of all models share, estimated window by window."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.reserve.counts import Floats

Bools = NDArray[np.bool_]

SPREADS: Final = (0.1, 0.2, 0.35, 0.6, 1.0)
"""The candidate standard deviations of the factor's logarithm; a model without a factor is a candidate too."""
KEEPS: Final = (0.0, 0.8, 0.95, 0.985, 0.997)
"""The candidate autocorrelations of the logarithm from one window to the next."""
NODES: Final = 15
REACH: Final = 2.8
"""The standard deviations that the grid spans on either side."""
CLEAR: Final = 2.0
"""The nats by which a common factor has to predict better than none before it is used."""
EVIDENCE_KEEP: Final = 0.98
"""The decay of the evidence per window."""
MOST_NATS: Final = 10.0
"""The most evidence that one window may give for or against a setting."""


class CommonRate:
    """A grid filter of a log-normal factor of mean 1 that reverts to its mean (AR(1)), for each candidate setting.

    It observes which models were requested in a window, each with its own probability given the factor. So the
    behaviour of single models, however bursty, is no evidence for a common factor.
    """

    def __init__(self) -> None:
        middle = np.linspace(-REACH, REACH, NODES)
        weight = np.exp(-middle * middle / 2)
        weight /= weight.sum()
        self._settings = [(spread, keep) for spread in SPREADS for keep in KEEPS]
        spreads = np.array([spread for spread, _ in self._settings])
        factor = np.exp(spreads[:, None] * middle)
        # Shape [setting, node].
        self._factor = factor / (factor @ weight)[:, None]
        self._step = np.stack([_transition(middle, weight, keep) for _, keep in self._settings])
        self._belief = np.repeat(weight[None, :], len(self._settings), axis=0)
        self._evidence = np.zeros(len(self._settings))

    @property
    def setting(self) -> tuple[float, float] | None:
        """The spread and autocorrelation that predicted best; None without a common factor."""
        best = int(self._evidence.argmax())
        return self._settings[best] if self._evidence[best] > CLEAR else None

    def ahead(self) -> tuple[Floats, Floats]:
        """Return the values of the factor in the next window and their probabilities."""
        if self.setting is None:
            return np.ones(1), np.ones(1)
        best = int(self._evidence.argmax())
        belief = self._belief[best]
        kept = belief > 1e-5
        return self._factor[best][kept], belief[kept] / belief[kept].sum()

    def learn(self, hazard: Floats, asked: Floats, counted: Bools) -> float:
        """Learn from a window in which models with these cumulative hazards had this many arrivals.

        `counted` marks models whose arrivals are a Poisson process given the factor, so that their number carries
        more information than whether there were any. Return the estimate of the factor during the window.
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
    """Return the transition matrix of an AR(1) of variance 1 on the nodes, of shape [from, to]."""
    if not keep:
        return np.repeat(weight[None, :], NODES, axis=0)
    spread = np.sqrt(1 - keep * keep)
    chance = np.exp(-(((middle[None, :] - keep * middle[:, None]) / max(spread, 0.2)) ** 2) / 2)
    return np.asarray(chance / chance.sum(axis=1, keepdims=True))
