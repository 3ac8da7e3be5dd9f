"""Answers to requests for a model that no worker serves yet. Pure."""

import math
from dataclasses import dataclass
from typing import Final

from libs.contracts.errors import FulcrumError, NoWorkers, UnknownModel, quoted
from libs.stores.catalogue.entry import LoadTimes, ModelEntry, ModelOutlook

# Assumed for a model that was never loaded, if no planner gives an estimate.
GUESSED_BYTES_PER_S: Final = 1e9
# Clients are asked to return after the expected wait times a factor between this and `SPREAD`.
MARGIN: Final = 1.1
SPREAD: Final = 1.3
FAILED_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Expected:
    """A catalogue model's entry and the estimates of when it serves."""

    entry: ModelEntry
    times: LoadTimes | None
    outlook: ModelOutlook | None

    def wait_s(self, now_ms: float) -> float:
        """Return the expected seconds until the model serves; 0 if it does."""
        outlook = self.outlook
        if outlook is None:
            return self.times.load_s if self.times else self.entry.size_bytes / GUESSED_BYTES_PER_S
        if outlook.ready_unix_ms:
            return max(outlook.ready_unix_ms - now_ms, 0.0) / 1000
        return outlook.wait_s


def gives_up(expected: Expected, waited_s: float, most_s: float, now_ms: float, draw: float) -> FulcrumError | None:
    """Return the error that ends a request's wait for a model, or None if it may go on waiting.

    `draw` in 0..1 spreads the times at which clients are asked to return.
    """
    name = quoted(expected.entry.name)
    if expected.outlook is not None and expected.outlook.error:
        error = expected.outlook.error
        return NoWorkers(f"model {name} cannot be loaded: {error}", retry_after_s=spread(FAILED_RETRY_S, draw))
    left_s = expected.wait_s(now_ms)
    if waited_s + left_s <= most_s:
        return None
    return NoWorkers(
        f"model {name} is not loaded, and is expected to be in {left_s:.0f} s: longer than the {most_s:g} s that a"
        " request waits",
        retry_after_s=spread(max(left_s, 1.0), draw),
    )


def removed(name: str) -> UnknownModel:
    """Return the error for a request whose model was removed while it waited."""
    return UnknownModel(f"model {quoted(name)} was removed while the request waited for it", param="model")


def spread(seconds: float, draw: float) -> float:
    """Scale a wait by a random factor and round it up to whole seconds."""
    return math.ceil(seconds * (MARGIN + draw * (SPREAD - MARGIN)))
