"""Properties of the number of requested workers, under any load, actuator and limits."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.scaling import (
    CALM_NS,
    DAY_NS,
    FULL,
    HOUR_S,
    LINGER_NS,
    PRESSED_NS,
    SECOND_NS,
    ModelWorkers,
    Scaled,
    ScaleMemory,
    ScaleReason,
    mixed_instead,
    scale,
)
from libs.policy.pressure import WorkerProfile, Workload, split
from libs.policy.step_time import StepTimeModel

MODEL = StepTimeModel(8e6, 6e4, 0.4, 15e6, 3e4, 25.0, interference=1.0)
ENGINE = WorkerProfile(MODEL, chunk_tokens=2048, max_sequences=256, kv_tokens=400_000)
QUIET = Workload(0.0, 0, 0, 50_000_000)
START_NS = 10 * DAY_NS
DAY_S = 86_400


def work(prompts: float, decodes: int = 0) -> Workload:
    return Workload(prompts, decodes, decodes * 1_000, 50_000_000)


class Town:
    """A pool and an actuator that does what it is asked, or a part of it, later."""

    def __init__(self, others: int, most: int, limits: ModelLimits = ModelLimits()) -> None:  # noqa: B008 (frozen)
        self.pool = ModelWorkers(others, most_started=most)
        self.limits = limits
        self.memory = ScaleMemory()
        self.now_ns = START_NS
        self.ran_s = 0.0

    def second(self, wanted: Workload, *, obeys: bool = True, forecast: int = 0, seconds: int = 1) -> Scaled:
        """Decide, and let the actuator follow after it."""
        pool = self.pool
        found = scale(
            ENGINE, wanted, pool, self.limits, memory=self.memory, now_ns=self.now_ns,
            start_up_ns=10 * SECOND_NS, forecast=forecast,
        )  # fmt: skip
        self.memory = found.memory
        started = found.started if obeys else pool.started
        serving = min(max(found.wished - pool.others, 0), started)
        self.pool = replace(pool, started=started, started_serving=serving, standby=started - serving)
        self.ran_s += self.pool.started * seconds
        self.now_ns += seconds * SECOND_NS
        return found


def test_workers_are_requested_after_two_seconds_without_room_and_not_for_a_burst() -> None:
    town = Town(others=2, most=8)
    for _ in range(PRESSED_NS // SECOND_NS):
        assert town.second(work(6.0)).started == 0
    found = town.second(work(6.0))
    assert (found.code, found.started > 2) == (ScaleReason.PRESSES, True)
    burst = Town(others=2, most=8)
    assert {burst.second(work(6.0 if second == 3 else 0.5)).started for second in range(20)} == {0}


def test_a_worker_is_released_after_a_calm_minute_and_ended_later() -> None:
    town = Town(others=2, most=8)
    for _ in range(5):
        town.second(work(5.0))
    came = town.pool.started
    assert came >= 3
    seconds = 0
    while town.pool.started_serving == came:
        town.second(QUIET)
        seconds += 1
    assert seconds * SECOND_NS >= CALM_NS and town.pool.standby == 1, "it is warm still"
    for _ in range((came + 2) * (CALM_NS + LINGER_NS) // SECOND_NS):
        town.second(QUIET)
    assert (town.pool.started, town.pool.serving) == (0, 2), "people's workers stay"


def test_capacity_precedes_growth() -> None:
    growing, level = Town(others=4, most=8), Town(others=4, most=8)
    wished = [growing.second(work(0.1 * second)).wished for second in range(36)]
    assert max(level.second(work(2.5)).wished for _ in range(30)) == 4
    first = next(second for second, each in enumerate(wished) if each > 4)
    assert 0.1 * first < 4 * FULL, "when they still have room"


def test_a_forecast_raises_the_number_within_limits() -> None:
    town = Town(others=2, most=8, limits=ModelLimits(workers_max=5))
    found = town.second(QUIET, forecast=4)
    assert (found.wished, found.started, found.code) == (4, 2, ScaleReason.FORECAST)
    found = town.second(QUIET, forecast=40)
    assert (found.wished, found.started, found.code) == (5, 3, ScaleReason.LIMITS)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 40), st.integers(0, 4_000), st.booleans(), st.integers(0, 30)), max_size=60),
    st.integers(0, 8),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 4),
)
def test_limits_hold_under_any_load(
    seconds: list[tuple[float, int, bool, int]], others: int, most: int, workers_max: int, workers_min: int
) -> None:
    limits = ModelLimits(workers_max=max(workers_max, workers_min), workers_min=workers_min)
    town = Town(others, most, limits)
    for prompts, decodes, obeys, forecast in seconds:
        found = town.second(work(prompts, decodes), obeys=obeys, forecast=forecast)
        assert 0 <= found.started <= most
        assert found.started + others <= max(limits.workers_max, others)
        assert limits.workers_min <= found.wished <= limits.workers_max


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 40), st.sampled_from([0, 12]), st.integers(1, 60)), min_size=1, max_size=200),
    st.integers(1, 12),
    st.floats(0.05, 3),
)
def test_no_more_gpu_hours_are_used_in_a_day_than_allowed(
    stretches: list[tuple[float, int, int]], most: int, gpu_hours: float
) -> None:
    town = Town(1, most, ModelLimits(gpu_hours_day=gpu_hours))
    for prompts, forecast, seconds in stretches:
        town.second(work(prompts), forecast=forecast, seconds=seconds)
        if town.now_ns - START_NS >= DAY_S * SECOND_NS:
            break
    assert town.ran_s <= gpu_hours * HOUR_S


@given(st.integers(0, 6), st.floats(0, 6))
def test_gpu_hours_count_for_their_day_and_survive_a_restart(started: int, spent_h: float) -> None:
    pool = ModelWorkers(1, started=started, most_started=8)
    before = ScaleMemory(spent_gpu_s={START_NS // DAY_NS: spent_h * HOUR_S}, charged_ns=START_NS + DAY_NS - 10**9)
    found = scale(ENGINE, QUIET, pool, ModelLimits(), memory=before, now_ns=START_NS + DAY_NS + 10**9, start_up_ns=0)
    assert dict(found.memory.spent_gpu_s) == {START_NS // DAY_NS + 1: float(started)}


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 400), st.floats(0, 1))
def test_mixed_workers_for_a_plan_never_exceed_its_pools_and_suffice_for_their_load(
    prefill: int, decode: int, decodes: int, interference: float
) -> None:
    engine = replace(ENGINE, step_time=replace(MODEL, interference=interference))
    count = mixed_instead(engine, work(0.0, decodes), prefill, decode)
    assert max(prefill, decode) <= count <= prefill + decode
    if count < prefill + decode:
        most = max(split(engine, work(0.0, each), 0, 1).decode_pressure <= 1 and each for each in range(1, 257))
        planned = work(prefill * FULL, round(decode * most * FULL))
        assert split(engine, planned, 0, count).cost <= 1.0


def test_if_prompts_hide_beside_decodes_fewer_mixed_workers_are_requested_than_in_two_pools() -> None:
    hides = replace(ENGINE, step_time=replace(MODEL, interference=0.0))
    assert mixed_instead(hides, work(0.0, 100), 4, 8) < 12
    assert mixed_instead(hides, work(0.0, 0), 4, 8) == 12, "how long sequences will be is not known"
