"""Which idle models to keep in GPU memory, which to let go, and which to load before they are requested.

Holding a model pays if the cold start it is likely to save costs more than the GPU time it is expected to take.
With a falling hazard, as sessions have, this gives each model its own keep-alive. Where the hazard rises again, the
model is loaded again before the request.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.policy.reserve.counts import Floats

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ModelPool:
    """The models of a pool as parallel arrays, indexed by place."""

    gpus: Floats
    """The GPUs that each model needs while it is loaded."""
    loaded: Bools
    busy: Bools
    """Whether a request is in flight, so that the model must stay."""
    floor: Bools
    """Whether the model is kept loaded regardless of its worth."""
    worth: Floats
    """The worth of keeping a loaded model or of loading another; see `worth_of`."""


def worth_of(hazard: Floats, ahead_s: Floats, gpus: Floats, cold_cost_gpu_s: float, load_s: Floats | float) -> Floats:
    """Return the value of a saved cold start over the GPU time held for it, at the best time to give up.

    - hazard: cumulative hazard of the next request, of shape [seconds ahead, model]
    - cold_cost_gpu_s: the GPU seconds that one cold start is worth
    - load_s: the GPU time to load the model first, 0 where it is loaded

    Holding pays above 1.
    """
    left = np.exp(-hazard)
    steps_s = np.diff(ahead_s, prepend=0.0)
    before = np.concatenate([np.ones((1, left.shape[1])), left[:-1]])
    held_s = np.cumsum((before + left) / 2 * steps_s[:, None], axis=0)
    return np.asarray(((1 - left) * cold_cost_gpu_s / (gpus * (held_s + load_s))).max(axis=0))


def choose(pool: ModelPool, room_gpus: float) -> Bools:
    """Return which models to have loaded within `room_gpus`.

    Busy models come first, then floors, then those that pay, by worth. If the busy ones alone exceed the room, they
    stay and nothing else does.
    """
    kept = pool.busy | pool.floor
    left = room_gpus - float(pool.gpus[pool.busy].sum())
    for place in np.flatnonzero(pool.floor & ~pool.busy):
        kept[place] = pool.gpus[place] <= left
        left -= float(pool.gpus[place]) * kept[place]
    asking = np.flatnonzero(~kept & (pool.worth > 1) & ~(pool.floor | pool.busy))
    for place in asking[np.argsort(-pool.worth[asking], kind="stable")]:
        if pool.gpus[place] <= left:
            kept[place] = True
            left -= float(pool.gpus[place])
    return kept
