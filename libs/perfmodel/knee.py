"""Where trials of prefill show a device's knee: their steps are fitted, the curve says the rest. Pure."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from libs.perfmodel.fit import MIN_STEPS, fit_steps
from libs.perfmodel.samples import Rows
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.saturation import Point, Saturation, Trial, knee_of, prefill_tokens_per_s, trial_work


def find_knee(prior: StepTimeModel, trials: Sequence[Trial]) -> Saturation | None:
    """The knee of a curve fitted to the trials; None where there are too few to fit one."""
    if len(trials) < MIN_STEPS:
        return None
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for trial in trials:
        by_size[trial.tokens].append(trial.duration_ns)
    model = fit_steps(prior, _rows(trials))
    chunk_tokens, plateau = knee_of(model, max(by_size))
    points = tuple(
        Point(size, size / float(np.median(durations)) * 1e9, prefill_tokens_per_s(model, size))
        for size, durations in sorted(by_size.items())
    )
    scatter = float(np.median([max(durations) / min(durations) - 1 for durations in by_size.values()]))
    return Saturation(chunk_tokens, plateau, points, model, scatter)


def _rows(trials: Sequence[Trial]) -> Rows:
    table = np.array([(trial.tokens, trial_work(trial.tokens).squared, trial.duration_ns) for trial in trials], float)
    nothing, everything = np.zeros(len(trials)), np.ones(len(trials))
    return Rows(table[:, 0], table[:, 1], nothing, nothing, table[:, 2], everything)
