"""Tests of static splits and aggregated serving as rivals: routing of prompts and decodes, worked out by hand."""

import pytest

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.splits import aggregated, niyama, static_split
from libs.lab.rivals.taichi import taichi
from libs.policy.roles import Role
from tests.rival_rig import MS, cluster, mixed, prefill, request


def test_a_static_split_sends_a_prompt_to_the_least_predicted_backlog() -> None:
    router = static_split(2, 1).router(cluster(3))
    workers = [prefill(0, prompt_tokens=3000), prefill(1, prompt_tokens=1000), mixed(2)]
    # 3,000 tokens take 300 ms. Worker 0: 300 queued + 300 = 600 ms; worker 1: 100 + 300 = 400 ms.
    assert router.prompt(request(3000), workers, 0) == 1
    # 2,500 cached at worker 0: 300 + 50 = 350 ms, sooner than 400 ms.
    assert router.prompt(request(3000, cached={0: 2500}), workers, 0) == 0


def test_a_static_split_sends_a_decode_to_the_fewest_sequences_then_to_the_most_free_kv() -> None:
    router = static_split(1, 3).router(cluster(4))
    workers = [
        prefill(0),
        mixed(1, decodes=3),
        mixed(2, decodes=1, queued_decodes=1, free_blocks=10),
        mixed(3, decodes=2),
    ]
    assert router.decode(request(), 0, workers, 0) == 3
    assert router.decode(request(), 0, [*workers[:3], mixed(3, decodes=2, ready=False)], 0) == 2


def test_a_static_split_lists_its_prefill_workers_first_and_never_moves() -> None:
    rival = static_split(1, 2)
    assert [move.role for move in rival.first_roles(cluster(3))] == [Role.PREFILL, Role.MIXED, Role.MIXED]
    assert rival.mover(cluster(3)) is None


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (2, 3)])
def test_a_split_that_does_not_use_all_workers_on_both_sides_is_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="at least one on each side"):
        static_split(*counts).first_roles(cluster(4))


def test_aggregated_sends_a_prompt_to_the_least_predicted_load() -> None:
    router = aggregated(512).router(cluster(2))
    # A request of 1,024 tokens takes 102.4 ms, in steps of 512 beside the decodes.
    # Worker 0: 102.4 ms queued (1,024 tokens); decode steps of 10 + 9 + 1 = 20 ms; 2,048 tokens are 4 steps:
    # 102.4 + 102.4 + 4 x 20 = 284.8 ms. Worker 1: decode steps of 10 + 28 + 2 = 40 ms, 2 steps: 102.4 + 80 = 182.4 ms.
    busy = mixed(0, budget_tokens=512, prompt_tokens=1024, prompts=1, decodes=9, kv_tokens=1000)
    other = mixed(1, budget_tokens=512, decodes=28, kv_tokens=2000)
    assert router.prompt(request(1024), [busy, other], 0) == 1
    # With 64 decodes worker 1 takes 10 + 64 + 2 = 76 ms a step: 254.4 ms, still sooner, but all its places are taken.
    assert router.prompt(request(1024), [busy, mixed(1, budget_tokens=512, decodes=64, kv_tokens=2000)], 0) == 0


def test_an_aggregated_worker_keeps_its_request() -> None:
    assert aggregated().router(cluster(2)).decode(request(), 1, [mixed(0), mixed(1)], 0) == 1


def test_aggregated_has_one_budget_everywhere_within_the_swept_range() -> None:
    roles = aggregated(2048).first_roles(cluster(3))
    assert [(move.role, move.budget_tokens) for move in roles] == [(Role.MIXED, 2048)] * 3
    with pytest.raises(InvalidRequest, match="256 to 8192"):
        aggregated(128)


def test_niyama_is_aggregated_with_guarded_chunks() -> None:
    rival = niyama()
    assert rival.guard
    # Steps compute at most 8,000 tokens here, less than its 8,192.
    assert [move.budget_tokens for move in rival.first_roles(cluster(2))] == [8000, 8000]


def test_taichi_sends_a_prompt_to_a_decode_heavy_worker_that_meets_the_deadline() -> None:
    router = taichi(1, 2).router(cluster(3))
    heavy = prefill(0, prompt_tokens=100)
    # 1,000 tokens at budget 250 are 4 steps. Worker 1: 100 + 4 x (10 + 39 + 1 = 50) = 300 ms; worker 2:
    # 100 + 4 x (10 + 4 + 1 = 15) = 160 ms: the soonest of both.
    one = mixed(1, budget_tokens=250, decodes=39, kv_tokens=1000)
    two = mixed(2, budget_tokens=250, decodes=4, kv_tokens=1000)
    assert router.prompt(request(1000), [heavy, one, two], 0) == 2
    # 5,000 tokens: 500 + 20 x 50 = 1,500 ms and 500 + 20 x 15 = 800 ms; with 26 decodes at worker 2 500 + 20 x 37 =
    # 1,240 ms: neither is within 1 s, so it goes to the prefill-heavy one, and so does a prompt without room.
    crowded = mixed(2, budget_tokens=250, decodes=26, kv_tokens=1000)
    assert router.prompt(request(5000), [heavy, one, crowded], 0) == 0
    assert router.prompt(request(1000), [heavy, mixed(1, budget_tokens=250, free_blocks=9)], 0) == 0


def test_taichi_decodes_where_the_prompt_was_computed_or_on_the_emptiest_decode_heavy_worker() -> None:
    router = taichi(1, 2).router(cluster(3))
    workers = [prefill(0), mixed(1, decodes=2), mixed(2, decodes=1)]
    assert router.decode(request(), 1, workers, 0) == 1
    assert router.decode(request(), 0, workers, 0) == 2


def test_hand_calculations_use_these_step_times() -> None:
    assert prefill(0, prompt_tokens=1000).backlog_ns == pytest.approx(100 * MS)
    assert mixed(0, decodes=9, kv_tokens=1000).decode_step_ns == pytest.approx(20 * MS)
