"""What a client is answered whose model no worker serves yet. Pure."""

import math
from dataclasses import dataclass
from typing import Final

from libs.contracts.errors import FulcrumError, NoWorkers, UnknownModel, quoted
from libs.stores.catalogue.entry import LoadTimes, ModelEntry, ModelOutlook

GUESSED_BYTES_PER_S: Final = 1e9
"""Of a model that was never loaded, where no planner says what to expect."""
MARGIN: Final = 1.1
"""A client comes back so much later than the model is expected, or up to `SPREAD` times that."""
SPREAD: Final = 1.3
FAILED_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a model that is in the catalogue."""

    entry: ModelEntry
    times: LoadTimes | None
    outlook: ModelOutlook | None

    def wait_s(self, now_ms: float) -> float:
        """Until it serves, from now on; 0 where it does."""
        outlook = self.outlook
        if outlook is None:
            return self.times.load_s if self.times else self.entry.size_bytes / GUESSED_BYTES_PER_S
        if outlook.ready_unix_ms:
            return max(outlook.ready_unix_ms - now_ms, 0.0) / 1000
        return outlook.wait_s


def gives_up(expected: Expected, waited_s: float, most_s: float, now_ms: float, draw: float) -> FulcrumError | None:
    """Why a request that has waited so long waits no longer; None: it does. `draw`: 0..1, by which clients that come
    back are spread."""
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
    """For whoever waited for it."""
    return UnknownModel(f"model {quoted(name)} was removed while the request waited for it", param="model")


def spread(seconds: float, draw: float) -> float:
    """Whole seconds after which it holds, later for some than for others."""
    return math.ceil(seconds * (MARGIN + draw * (SPREAD - MARGIN)))
