"""That a worker gets what its measured chunk promises: prompts enough for full steps, however late they come."""

from statistics import mean

import pytest

from libs.perfmodel.profiles import profile
from libs.policy.worker.saturation import MOST_TOKENS, knee_of
from load.engine.bench_tune import CASES, SIM_PROFILE, arrivals
from load.lab.tune_lab import ttft_s

SECONDS = 10.0
DEFAULT_TOKENS = 512


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 0.02, 0.04])
def test_at_high_load_the_choice_has_the_best_ttft_of_small_and_large_chunks(late_s: float) -> None:
    choice, plateau = knee_of(profile(SIM_PROFILE).step_time, MOST_TOKENS)
    case = CASES[0]
    load = [(each.at_s, each.prompt_tokens) for each in arrivals(case, case.share * plateau, SECONDS, seed=2)]

    def mean_s(chunk_tokens: int) -> float:
        return mean(ttft_s(load, sim_profile=SIM_PROFILE, chunk_tokens=chunk_tokens, late_s=late_s))

    best = mean_s(choice)
    assert best <= 1.05 * mean_s(MOST_TOKENS)
    assert best <= 0.75 * mean_s(DEFAULT_TOKENS)
