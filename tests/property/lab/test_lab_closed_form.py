"""Properties of the lab's closed form of many decode steps: equal to single steps, to the picosecond."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.lab.cluster.books import LabAnswer
from libs.lab.cluster.gateway import LabGateway
from libs.lab.cluster.run import LabResult, LabSetup, Run, check
from libs.lab.cluster.time import Coast, VirtualTime
from libs.lab.traces.request import TraceRequest
from libs.policy.gateway.binding import POLICIES
from libs.policy.gateway.order import WaitBounds
from libs.policy.roles import Role
from tests.lab_rig import MS, figures, requests, shape, trace_of

pytestmark = pytest.mark.usefixtures("quiet_lab")

roles = st.lists(
    st.sampled_from([(Role.PREFILL, 0), (Role.MIXED, 0), (Role.MIXED, 64), (Role.MIXED, 512)]), min_size=1, max_size=4
)
moves = st.lists(
    st.tuples(
        st.integers(0, 3000),  # ms
        st.integers(0, 3),
        st.sampled_from([(Role.PREFILL, 0), (Role.MIXED, 0), (Role.MIXED, 128), (Role.STANDBY, 0)]),
    ),
    max_size=6,
)


def run(
    drawn: Any, first: Any, moved: Any, kv_blocks: int, *, stepwise: bool, guard: bool, planned: bool = False
) -> LabResult:
    setup = LabSetup(shape(kv_blocks, guard=guard, stepwise=stepwise), first, lambda request: 500 * MS, 12 * MS)

    def gateway(workers: Any, time: VirtualTime) -> LabGateway:
        policy, patience = POLICIES["predicted-ttft"](), WaitBounds(20_000, 5_000)
        return LabGateway(workers, policy, time, patience=patience, max_waiting=99, tpot_ns=12 * MS, planned=planned)

    ran = Run(trace_of(drawn), setup, gateway)
    for at_ms, index, (role, budget) in moved:
        worker = ran.workers[index % len(ran.workers)]
        ran.time.at(1_100_000_000 + at_ms * MS, lambda w=worker, r=role, b=budget: w.set_role(r, b))
    return ran.run()


@settings(max_examples=60)
@given(requests(400), roles, moves, st.sampled_from([60, 90, 400]), st.booleans())
def test_many_steps_at_once_equal_single_steps(drawn: Any, first: Any, moved: Any, kv_blocks: int, guard: bool) -> None:
    at_once = run(drawn, first, moved, kv_blocks, stepwise=False, guard=guard)
    check(at_once)
    assert figures(at_once) == figures(run(drawn, first, moved, kv_blocks, stepwise=True, guard=guard))


@given(st.integers(1, 10**7), st.integers(0, 10**5), st.integers(0, 10**10))
def test_steps_by_a_time_are_those_that_have_ended_by_then(first_ps: int, growth_ps: int, passed_ps: int) -> None:
    coast = Coast(77, first_ps, growth_ps)
    steps = coast.steps_by(77 + passed_ps)
    assert coast.end_ps(steps) <= 77 + passed_ps < coast.end_ps(steps + 1)


@given(st.integers(1, 10**6), st.integers(0, 5000), st.integers(1, 200), st.integers(1, 2000), st.integers(0, 10**9))
def test_late_tokens_of_many_steps_equal_those_counted_one_by_one(
    first_ps: int, growth_ps: int, steps: int, tpot_ns: int, delay_ps: int
) -> None:
    request = TraceRequest(0, 0, 1, 1)
    at_once = LabAnswer(request, VirtualTime(), 0, 0, tpot_ns)
    at_once.at(10)
    at_once.first_ps -= 200_000_000_000  # the grace is over
    one_by_one = replace(at_once)
    coast = Coast(1000, first_ps, growth_ps)
    at_once.coasted(coast, steps, delay_ps)
    for step in range(1, steps + 1):
        one_by_one.at(coast.end_ps(step) + delay_ps)
    assert (at_once.late, at_once.tokens, at_once.last_ps) == (one_by_one.late, one_by_one.tokens, one_by_one.last_ps)


@settings(max_examples=40)
@given(requests(400), st.integers(1, 3), st.integers(1, 3), st.integers(150, 600))
def test_many_steps_at_once_equal_single_steps_while_the_planner_moves_workers(
    drawn: Any, prefill: int, mixed: int, kv_blocks: int
) -> None:
    first = [(Role.PREFILL, 0)] * prefill + [(Role.MIXED, 0)] * mixed
    at_once, each_step = (
        run(drawn, first, [], kv_blocks, stepwise=stepwise, guard=True, planned=True) for stepwise in (False, True)
    )
    check(at_once)
    assert figures(at_once) == figures(each_step)
