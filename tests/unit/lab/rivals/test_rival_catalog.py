"""Tests of rivals by name, and of rules that hold for every one of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.contracts.errors import InvalidRequest
from libs.lab.policies import RIVALS, design_of, rival
from libs.lab.rivals.port import SeenCluster, SeenWorker
from libs.policy.roles import Role
from libs.policy.step_time import StepWork
from tests.rival_rig import MS, SECOND, after, cluster, request, seen, worker

NAMES = [
    "static:9:7",
    "aggregated",
    "aggregated:2048",
    "arrow",
    "arrow:9:7",
    "dynamo-load",
    "dynamo-throughput",
    "dynamo-both:9:7",
    "dynamo-load:9:7:120",
    "llm-d",
    "llm-d:9:7:60",
    "llm-d-latency",
    "llm-d-latency:2048",
    "llm-d-latency-most",
    "niyama",
    "sglang-flip",
    "sglang-flip:9:7",
    "sglang-pdmux",
    "taichi",
    "taichi:9:7",
    "taichi:9:7:512",
    "taichi-flow",
    "taichi-flow:9:7:512",
]
WORKERS = 16


@pytest.mark.parametrize("name", NAMES)
def test_a_name_gives_a_rival_that_names_its_source(name: str) -> None:
    built = rival(name)
    assert built.name.startswith(name.partition(":")[0])
    assert built.source
    assert built.simplified
    assert [move.index for move in built.first_roles(cluster(WORKERS))] == list(range(WORKERS))


def test_a_rivals_own_name_gives_it_again() -> None:
    for name in NAMES:
        built = rival(name)
        again = rival(built.name)
        assert (again.name, again.move_cost) == (built.name, built.move_cost)


OTHERS = ["", "vllm", "static", "static:9", "static:9:x", "static:-9:7", "arrow:", "arrow:0:0", "niyama:1"]


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_name_is_refused_with_a_list_of_all_rivals(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rival(name)
    assert all(kind in str(refused.value) for kind in RIVALS)
    assert "static:P:D" in str(refused.value)


def test_a_dynamo_move_takes_30_s_unless_the_name_sets_another_time() -> None:
    assert rival("dynamo-load:9:7").move_cost.start_ns == 30 * SECOND
    assert rival("dynamo-load:9:7:120").move_cost.start_ns == 120 * SECOND


loads = st.fixed_dictionaries(
    {
        "ready": st.sampled_from([True, True, True, False]),
        "budget_tokens": st.sampled_from([0, 256, 8000]),
        "prompts": st.integers(0, 12),
        "prompt_tokens": st.integers(0, 40_000),
        "decodes": st.integers(0, 64),
        "queued_decodes": st.integers(0, 8),
        "kv_tokens": st.integers(0, 100_000),
        "free_blocks": st.integers(0, 1000),
    }
)
works = st.builds(
    StepWork,
    prefill_tokens=st.integers(0, 8000),
    prefill_sequences=st.integers(1, 3),
    decode_sequences=st.integers(0, 64),
    decode_kv_tokens=st.integers(0, 100_000),
)
steps = st.lists(st.tuples(works, st.integers(1, 900 * MS)), max_size=2)


@st.composite
def pools(draw: st.DrawFn) -> list[SeenWorker]:
    """Draw at least one ready worker of each role; role mixed has a budget or not, by chance."""
    roles = [Role.PREFILL, Role.MIXED, *draw(st.lists(st.sampled_from([Role.PREFILL, Role.MIXED]), max_size=6))]
    built = [worker(index, role, **draw(loads), steps=draw(steps)) for index, role in enumerate(roles)]
    return [replace(each, ready=True) if each.index < 2 else each for each in built]


@st.composite
def looks(draw: st.DrawFn) -> list[SeenCluster]:
    """A few looks, with an interval between two."""
    return [
        seen(
            draw(pools()),
            index * 15 * SECOND,
            arrived=draw(st.integers(0, 2000)),
            ended=draw(st.integers(0, 2000)),
            mean_input_tokens=draw(st.just(0.0) | st.floats(1, 20_000)),
            mean_output_tokens=draw(st.just(0.0) | st.floats(1, 2000)),
        )
        for index in range(draw(st.integers(1, 4)))
    ]


movers = [name for name in NAMES if rival(name).mover(cluster(WORKERS)) is not None]
moving = st.sampled_from([name for name in movers if design_of(name) != "aggregated"])
dividing = st.sampled_from([name for name in movers if design_of(name) == "aggregated"])


@given(moving, looks())
def test_a_mover_moves_only_ready_workers_leaves_one_in_each_role_and_is_deterministic(
    name: str, all_looks: list[SeenCluster]
) -> None:
    decide_alike(name, all_looks)


@given(dividing, looks())
def test_a_mover_of_mixed_workers_changes_budgets_alone(name: str, all_looks: list[SeenCluster]) -> None:
    mover = rival(name).mover(cluster(WORKERS))
    assert mover is not None
    for look in all_looks:
        before = {each.index: each for each in look.workers}
        for move in mover.moves(look):
            assert before[move.index].ready
            assert before[move.index].role == move.role
            assert before[move.index].budget_tokens != move.budget_tokens > 0


@settings(max_examples=10)
@given(st.sampled_from(["dynamo-throughput", "dynamo-both"]), looks())
def test_the_same_holds_for_loops_that_decide_every_36_looks(name: str, all_looks: list[SeenCluster]) -> None:
    decide_alike(name, [look for look in all_looks for _ in range(36)])


def decide_alike(name: str, all_looks: list[SeenCluster]) -> None:
    mover, again = (rival(name).mover(cluster(WORKERS)) for _ in range(2))
    assert mover is not None
    assert again is not None
    for look in all_looks:
        moves = mover.moves(look)
        assert list(again.moves(look)) == list(moves)
        before = {each.index: each for each in look.workers}
        assert len({move.index for move in moves}) == len(moves)
        assert all(before[move.index].ready and before[move.index].role != move.role for move in moves)
        left = [each.role for each in after(look.workers, moves) if each.ready]
        assert Role.PREFILL in left
        assert Role.MIXED in left


caches = st.lists(st.integers(0, 60_000), min_size=8, max_size=8)


@given(st.sampled_from(NAMES), pools(), st.integers(1, 60_000), caches)
def test_a_router_chooses_a_ready_worker_with_the_right_role(
    name: str, workers: list[SeenWorker], input_tokens: int, cached: list[int]
) -> None:
    built = rival(name)
    if design_of(name) == "aggregated":
        workers = [replace(each, role=Role.MIXED, budget_tokens=each.budget_tokens or 512) for each in workers]
    router = built.router(cluster(WORKERS))
    asks = request(input_tokens, cached={index: min(tokens, input_tokens) for index, tokens in enumerate(cached)})
    source = workers[router.prompt(asks, workers, 0)]
    assert source.ready
    assert source.role == Role.PREFILL or source.budget_tokens > 0
    target = workers[router.decode(asks, source.index, workers, 0)]
    assert target.ready
    assert target.role == Role.MIXED
    assert router.prompt(asks, workers, 0) == source.index
