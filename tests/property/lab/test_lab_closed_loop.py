"""Properties of closed-loop replay: each turn waits for the previous answer, and nothing else changes."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.lab.cluster.books import LabAnswer, LabOutcome
from libs.lab.cluster.gateway import LabGateway
from libs.lab.cluster.host.shape import WorkerShape
from libs.lab.cluster.run import LabResult, LabSetup, Run, check
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace, TraceRequest
from libs.policy.gateway.binding import POLICIES
from libs.policy.gateway.order import WaitBounds
from libs.policy.roles import Role
from tests.lab_rig import BLOCK, MODEL, MS

pytestmark = pytest.mark.usefixtures("quiet_lab")


turns = st.lists(
    st.tuples(
        st.integers(0, 3),  # session, 0: none
        st.integers(0, 2000),  # ms after the one before
        st.integers(1, 300),  # prompt tokens
        st.integers(1, 40),  # output tokens
        st.integers(0, 3000),  # ms of thinking
    ),
    min_size=1,
    max_size=25,
)


def trace_of(drawn: list[tuple[int, int, int, int, int]]) -> Trace:
    taken: defaultdict[int, int] = defaultdict(int)
    found, at_ms = [], 0
    for number, (session, gap_ms, prompt, output, think_ms) in enumerate(drawn):
        at_ms += gap_ms
        turn = taken[session] if session else 0
        taken[session] += 1
        think_ns = think_ms * MS if turn else 0
        found.append(TraceRequest(number, at_ms * MS, prompt, output, session=session, turn=turn, think_ns=think_ns))
    return Trace("drawn", found)


def replay(trace: Trace, *, closed_loop: bool, overtime_ns: int = 0, patience: WaitBounds | None = None) -> LabResult:
    shape = WorkerShape("m", MODEL, BLOCK, 4000, BLOCK * 1000, 64, 256, 1e9, MS)
    roles = [(Role.PREFILL, 0), (Role.MIXED, 0)]
    setup = LabSetup(shape, roles, lambda request: 500 * MS, 12 * MS, overtime_ns, closed_loop=closed_loop)

    def gateway(workers: object, time: VirtualTime) -> LabGateway:
        policy = POLICIES["predicted-ttft"]()
        return LabGateway(workers, policy, time, patience=patience or WaitBounds(600_000, 5_000), max_waiting=99)  # type: ignore[arg-type]

    return Run(trace, setup, gateway).run()


def served(result: LabResult) -> list[tuple[int, int, LabOutcome]]:
    return sorted((each.request.number, each.tokens, each.outcome) for each in result.answers)


def sessions(result: LabResult) -> list[list[LabAnswer]]:
    found: defaultdict[int, list[LabAnswer]] = defaultdict(list)
    for answer in sorted(result.answers, key=lambda each: each.request.turn):
        if answer.request.session:
            found[answer.request.session].append(answer)
    return list(found.values())


@settings(max_examples=60)
@given(turns)
def test_both_replays_serve_the_same_and_a_closed_loop_waits_for_each_answer(
    drawn: list[tuple[int, int, int, int, int]],
) -> None:
    trace = trace_of(drawn)
    as_recorded, closed = replay(trace, closed_loop=False), replay(trace, closed_loop=True)
    for result in (as_recorded, closed):
        check(result)
    assert served(as_recorded) == served(closed)
    assert all(outcome is LabOutcome.COMPLETED for _, _, outcome in served(closed))
    for answers in sessions(closed):
        for before, after in pairwise(answers):
            assert after.arrival_ps == before.last_ps + after.request.think_ns * PS_PER_NS


@given(turns)
@settings(max_examples=30)
def test_a_trace_with_the_arrivals_of_a_closed_loop_is_replayed_equally_by_both(
    drawn: list[tuple[int, int, int, int, int]],
) -> None:
    trace = trace_of(drawn)
    closed = replay(trace, closed_loop=True)
    start_ps = min(each.arrival_ps for each in closed.answers) - min(each.arrival_ns for each in trace.requests) * 1000
    arrived = sorted(closed.answers, key=lambda each: each.arrival_ps)
    recorded = Trace(
        "recorded",
        [
            replace(each.request, number=number, arrival_ns=(each.arrival_ps - start_ps) // PS_PER_NS)
            for number, each in enumerate(arrived)
        ],
    )
    again = replay(recorded, closed_loop=False)
    # To the nanosecond that a trace has, less what the picoseconds below it add up to.
    for one, other in zip(arrived, sorted(again.answers, key=lambda each: each.request.number), strict=True):
        assert one.tokens == other.tokens and abs(one.arrival_ps - other.arrival_ps) < PS_PER_NS


def test_a_turn_arrives_even_if_the_previous_one_was_refused() -> None:
    first = TraceRequest(0, 0, 4000 * BLOCK * 2, 5, session=1)  # no worker has room for it
    later = TraceRequest(1, 10 * MS, 50, 5, session=1, turn=1, think_ns=70 * MS)
    result = replay(Trace("t", [first, later]), closed_loop=True)
    assert served(result) == [(0, 0, LabOutcome.REJECTED), (1, 5, LabOutcome.COMPLETED)]
    assert result.answers[1].arrival_ps - result.answers[0].arrival_ps > 70 * MS * PS_PER_NS


def test_turns_that_never_arrived_count_as_unfinished() -> None:
    requests = [
        TraceRequest(turn, turn, 100, 500, session=1, turn=turn, think_ns=9_000 * MS if turn else 0)
        for turn in range(3)
    ]
    result = replay(Trace("t", requests), closed_loop=True, overtime_ns=1_000 * MS)
    assert [each.outcome for each in result.answers] == [LabOutcome.UNFINISHED] * 3
    waits = replay(Trace("t", requests), closed_loop=True, overtime_ns=5_000 * MS)
    assert [each.outcome for each in waits.answers] == [LabOutcome.COMPLETED] * 3, "a thinking client is waited for"


@pytest.mark.parametrize("policy", ["fulcrum:1:1", "arrow"])
def test_clients_that_wait_for_answers_load_an_overloaded_cluster_less(policy: str) -> None:
    trace = generate("poisson:rate=30,seconds=8,sessions=40,turns=6,think=1,osl=100", seed=2)
    experiment = Experiment(trace, resolve("llama-3.1-8b", "h100"), 2, parse_slo("ttft=max(2s,3x),tpot=50ms"))
    (recorded, _), (closed, result) = (
        run(replace(experiment, closed_loop=each), policy_named(policy, 2)) for each in (False, True)
    )
    assert closed.score.requests == recorded.score.requests == len(trace.requests)
    assert closed.score.completed == len(trace.requests)
    assert closed.score.ttft_s["p90"] < recorded.score.ttft_s["p90"]
    for answers in sessions(result):
        for before, after in pairwise(answers):
            assert after.arrival_ps >= before.last_ps
