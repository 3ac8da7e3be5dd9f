"""Which idle models to keep in GPU memory, which to let go and which to load before they are asked. Pure.

Holding a model for a while is worth it where the cold start that it is likely to save costs more than the GPU time that
it is expected to take until the next request or the end of the while. With a hazard that falls, as sessions have, that
is a keep-alive of each model's own length; where the hazard rises again, the model is loaded again before the request.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.policy.reserve.counts import Floats

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ModelPool:
    """Models side by side, by place."""

    gpus: Floats
    """That each needs while it is loaded."""
    loaded: Bools
    busy: Bools
    """A request is in flight: never let go."""
    floor: Bools
    """To be kept loaded whatever it is worth."""
    worth: Floats
    """Of keeping a loaded one, or of loading one that is not: see `worth_of`."""


def worth_of(hazard: Floats, ahead_s: Floats, gpus: Floats, cold_cost_gpu_s: float, load_s: Floats | float) -> Floats:
    """What a cold start that is saved is worth over the GPU time that is held for it, at the best time to give up.

    hazard: cumulative, of the next request, [seconds ahead, model]. cold_cost_gpu_s: GPU-seconds that one cold start
    is taken to be worth. load_s: GPU time for loading it first, 0 where it is loaded. Above 1 it pays.
    """
    left = np.exp(-hazard)
    steps_s = np.diff(ahead_s, prepend=0.0)
    before = np.concatenate([np.ones((1, left.shape[1])), left[:-1]])
    held_s = np.cumsum((before + left) / 2 * steps_s[:, None], axis=0)
    return np.asarray(((1 - left) * cold_cost_gpu_s / (gpus * (held_s + load_s))).max(axis=0))


def choose(pool: ModelPool, room_gpus: float) -> Bools:
    """Which models to have loaded: busy ones, floors, then those that pay, the most worthwhile first, while there is
    room. Where busy ones alone are more than the room, they stay and nothing else does."""
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
