"""Tests of the time that images take: in pressures, verdicts, promises, and the planner's split of roles."""

from dataclasses import replace
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue, StepBatch
from libs.policy.planner.limits import ModelLimits, best_split
from libs.policy.pressure import WorkerProfile
from libs.policy.speed import image_ns
from libs.policy.step_time import StepTimeModel
from libs.policy.verdict.aftermath import aftermath
from libs.policy.verdict.causes import CauseCode, causes
from libs.policy.verdict.state import ModelState, PromisedFigure, RoleCounts, VerdictLimits, as_roles_stand
from libs.telemetry.gateways import ArrivalRates, ImageArrivals, ModelBacklog
from libs.telemetry.recent import RecentCounts, recent_sums
from services.metrics.status.observe import ObservedStatus, SeenDemand, observe
from tests.unit.planner.test_planner_observation import look, worker

MS = 1_000_000
S = 1_000 * MS
ENGINE = WorkerProfile(StepTimeModel(8e6, 6e4, 0.0, 15e6, 3e5, 25.0, interference=1.0), 2048, 256, 400_000)
PROMPT = 600
"""Tokens of a prompt, nearly all of them those of one image."""
EACH_MS = 200
NO_IMAGES = {"images_per_token": 0.0}
IMAGES = {"images_per_token": 1 / PROMPT}


def reported(name: str, role: int, load: Load | None = None) -> ObservedStatus:
    batch = StepBatch(worker_id=name, max_sequences=256, chunk_tokens=2048, load=load or Load())
    batch.assignment.role = role
    return ObservedStatus(batch, 1.0, 0, 0, 0, 0)


def observed(
    *, prompts_per_s: float = 0.0, waiting: int = 0, images: int = 0, waiting_encode_ms: int = 0, **demand: Any
) -> ModelState:
    """Return the state of 2 prefill and 6 decode workers that have taken 200 ms for each image so far."""
    load = Load(images_used=50, images_encoded=50, image_encode_ns=50 * EACH_MS * MS)
    loads = [load, Load(waiting_encode_ns=waiting_encode_ms * MS)]
    queue = ModelBacklog(prefill_requests=waiting, prefill_tokens=waiting * PROMPT, images=images)
    seen = SeenDemand(
        queue, prompts_per_s * PROMPT, 0.0, 0.0, ttft_limit_ns=2 * S, tpot_ns=50 * MS, mean_prompt_tokens=PROMPT,
        **demand,
    )  # fmt: skip
    workers = [reported(f"p-{at}", ROLE_PREFILL, each) for at, each in enumerate(loads)]
    workers += [reported(f"d-{at}", ROLE_MIXED) for at in range(6)]
    found = observe("m", ENGINE, workers, 0, seen)
    assert isinstance(found, ModelState)
    return found


def test_images_that_arrive_make_a_pool_prefill_bound_that_their_prompts_alone_would_not() -> None:
    texts = observed(prompts_per_s=15, waiting=40, **NO_IMAGES)
    assert texts.pressures.prefill < 1
    assert not [each for each in causes(texts, VerdictLimits()) if each.code is CauseCode.PREFILL_BOUND]
    busy = observed(prompts_per_s=15, waiting=40, images=40, **IMAGES)
    assert busy.pressures.prefill > 1.5
    found = causes(busy, VerdictLimits())[0]
    assert found.code is CauseCode.PREFILL_BOUND
    assert found.action is not None and found.action.role == "prefill"


def test_waiting_images_are_work_from_the_first_one_whatever_share_of_time_encoding_took_lately() -> None:
    texts = observed(waiting=30, **NO_IMAGES)
    at_gateways = observed(waiting=30, images=30, **NO_IMAGES)
    assert at_gateways.work.waiting_ns == pytest.approx(texts.work.waiting_ns + 30 * EACH_MS * MS)
    at_workers = observed(waiting=30, waiting_encode_ms=700, **NO_IMAGES)
    assert at_workers.work.waiting_ns == pytest.approx(texts.work.waiting_ns + 700 * MS)
    assert at_gateways.backlog_s > texts.backlog_s + 2


def test_images_found_in_the_cache_take_no_time() -> None:
    assert image_ns([(10, 2_000), (30, 2_000)]) == 100
    assert image_ns([]) == image_ns([(0, 0)]) == 0


def test_a_promised_ttft_has_the_time_of_a_prompts_images() -> None:
    def promised_ms(**demand: Any) -> float:
        state = replace(observed(prompts_per_s=1, **demand), prompt_yield=1.0)
        counts = RoleCounts(2, 6, 0)
        found = aftermath(state, state.work, counts, as_roles_stand(ENGINE, state.work, counts))
        return found[PromisedFigure.TTFT].then

    texts, images = promised_ms(**NO_IMAGES), promised_ms(**IMAGES)
    assert images == pytest.approx(texts + EACH_MS, abs=0.1 * EACH_MS)


def test_gateways_that_do_not_count_images_leave_the_share_of_time_that_encoding_took() -> None:
    older = observed(prompts_per_s=4, waiting=30)
    assert older.work.waiting_ns == pytest.approx(observed(prompts_per_s=4, waiting=30, **NO_IMAGES).work.waiting_ns)


def test_images_per_prompt_token_are_those_that_came_over_all_gateways() -> None:
    rates = ArrivalRates()

    def take(gateway: str, reported_ms: int, tokens: int, images: int | None) -> None:
        queue = ModelQueue(model="m", arrived_tokens=tokens, arrived_images=images)
        rates.take(GatewayQueues(gateway_id=gateway, told_unix_ns=reported_ms * MS, queues=[queue]), reported_ms * MS)

    take("older", 1, 0, None)
    take("older", 1_000, 500, None)
    assert rates.images_per_token("m", 1_000 * MS) is None
    for gateway, tokens, images in (("a", 600, 1), ("b", 400, 3)):
        take(gateway, 1, 100, 1)
        take(gateway, 1_000, 100 + tokens, 1 + images)
    assert rates.images_per_token("m", 1_000 * MS) == pytest.approx(4 / 1_000)
    assert rates.images_per_token("other", 1_000 * MS) is None


def test_images_of_all_arrivals_are_the_newest_counts_of_each_gateway_and_incarnation() -> None:
    arrivals = ImageArrivals()

    def take(gateway: str, incarnation: int, reported: int, tokens: int, images: int | None) -> None:
        queue = ModelQueue(model="m", arrived_tokens=tokens, arrived_images=images)
        message = GatewayQueues(gateway_id=gateway, incarnation=incarnation, told_unix_ns=reported, queues=[queue])
        arrivals.take(message, 10)

    assert arrivals.per_token("m", 10) == 0.0
    take("older", 1, 5, 9_000, None)
    take("a", 1, 5, 600, 3)
    take("a", 1, 2, 100, 1)
    take("a", 6, 7, 400, 2)
    take("b", 1, 5, 0, 0)
    assert arrivals.per_token("m", 10) == pytest.approx(5 / 1_000)
    assert arrivals.per_token("other", 10) == 0.0


def test_images_per_token_are_those_of_the_last_day_once_some_have_arrived_in_it() -> None:
    arrivals, hour_ns = ImageArrivals(), 3_600_000_000_000

    def take(hour: int, tokens: int, images: int) -> None:
        queue = ModelQueue(model="m", arrived_tokens=tokens, arrived_images=images)
        arrivals.take(GatewayQueues(gateway_id="g", told_unix_ns=hour * hour_ns, queues=[queue]), hour * hour_ns)

    take(0, 1_000_000, 0)
    assert arrivals.per_token("m", 0) == 0.0
    for hour in range(1, 101):
        take(hour, 1_000_000 + 1_000 * hour, 0)
    for hour in range(101, 126):
        take(hour, 1_100_000 + 1_000 * (hour - 100), 10 * (hour - 100))
    assert arrivals.per_token("m", 125 * hour_ns) == pytest.approx(10 / 1_000)
    # Without arrivals in the last day, all of them count.
    assert arrivals.per_token("m", 200 * hour_ns) == pytest.approx(250 / 1_125_000)


def test_the_time_of_an_image_is_that_of_the_last_day_and_starts_anew_with_a_restarted_worker() -> None:
    counts, hour_ns = RecentCounts(), 3_600_000_000_000
    counts.add(0, 1_000, 1_000 * 5)
    for hour in range(1, 60):
        counts.add(hour * hour_ns, 1_000 + hour, 5_000 + hour * 20)
    assert counts.rise(59 * hour_ns) == (24, 24 * 20)
    assert recent_sums([counts, RecentCounts()], 59 * hour_ns) == (24, 480)
    counts.add(60 * hour_ns, 3, 90)
    assert counts.rise(60 * hour_ns) == (0, 0)
    assert recent_sums([counts], 60 * hour_ns) == (3, 90)


def test_the_planner_gives_images_more_prefill_workers_than_their_prompts_alone() -> None:
    """The planner's own figures, which decide how many workers each role gets."""
    load = Load(images_used=50, images_encoded=50, image_encode_ns=50 * EACH_MS * MS)

    def planned(images: int, waiting_encode_ms: int = 0) -> tuple[float, int]:
        waiting = ModelBacklog(prefill_requests=100, prefill_tokens=60_000, hopeful_tokens=60_000, images=images)
        at_worker = Load(images_used=0, waiting_encode_ns=waiting_encode_ms * MS)
        workers = [worker("p", "prefill", load=load), worker("q", "prefill", load=at_worker)]
        found = look(*workers, *(worker(f"d{at}", "decode") for at in range(6)), waiting=waiting)
        assert found.engine is not None
        best = best_split(found.engine, replace(found.work, decodes=8, kv_tokens=8_000), 8, ModelLimits())
        assert best is not None
        return found.work.waiting_ns, best.prefill

    (texts_ns, few), (images_ns, many) = planned(0), planned(100)
    assert images_ns == pytest.approx(texts_ns + 100 * EACH_MS * MS)
    assert planned(0, 900)[0] == pytest.approx(texts_ns + 900 * MS)
    assert many > few
