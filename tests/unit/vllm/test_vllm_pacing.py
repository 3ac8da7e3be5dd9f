"""Tests without vLLM of the scheduler's decisions: who takes part in a step, trials, and the board."""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

from libs.engine.kv_blocks import KvWait
from libs.engine.vllm.pacing import (
    PacedRequest,
    PacedStep,
    Queues,
    TrialStep,
    begins_ns,
    beyond_slots,
    plan_step,
    trial_tokens,
)
from libs.engine.vllm.step_reports import NOBODY, Board, Running, SpanRing, Steps
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import MAX_HOLD_NS, Pace

MS = 1_000_000
MODEL = StepTimeModel(0, 0.1 * MS, 0, 5 * MS, 5 * MS, 0, 1.0)
"""A decode costs 5 ms, and 5 ms the step; 10 prompt tokens cost 1 ms on top."""
NOTHING = Queues((), (), (), (), 0, (), (), free_places=8, free_blocks=100, stalled=False)
BLOCK = 32


@dataclass
class Request:
    """The attributes of vLLM's request that the code reads."""

    num_tokens: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_output_placeholders: int = 0
    request_id: str = "r"
    drafts: int = 0
    max_tokens: int = 1000

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens - self.num_output_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + self.drafts


def prompt(tokens: int, *, computed: int = 0, yields: bool = False) -> PacedRequest:
    return PacedRequest(Request(tokens, computed), transferred=False, yields=yields, tpot_target_ns=0)


def decoding(*, target_ms: int = 0, first_ms: int = 1000, transferred: bool = False) -> PacedRequest:
    made = PacedRequest(Request(21, 20, 1), transferred=transferred, yields=False, tpot_target_ns=target_ms * MS)
    made.stepped(first_ms * MS)
    return made


def plan(queues: Queues, *, now_ms: int = 1000, budget: int = 512, model: StepTimeModel | None = MODEL) -> PacedStep:
    pace = Pace(512)
    pace.step_time, pace.budget_tokens = model, budget
    return plan_step(pace, queues, tokens_each=1, block_size_tokens=BLOCK, now_ns=now_ms * MS)


def test_prompts_get_the_time_that_the_tightest_decode_leaves() -> None:
    queues = replace(NOTHING, decodes=[decoding(target_ms=20), decoding()], prompts=[prompt(900)])
    assert plan(queues).tokens == 2 + 40  # 15 of 20 ms are the decodes', 1 stays in hand
    assert plan(queues, budget=30).tokens == 2 + 30
    assert plan(queues, model=None).tokens == 2 + 512


def test_prompts_without_budget_or_time_do_not_start() -> None:
    waits = prompt(900)
    queues = replace(NOTHING, decodes=[decoding(target_ms=10)], prompts=[waits])
    for made in (plan(queues), plan(replace(queues, decodes=()), budget=0)):
        assert list(made.aside) == [waits] and made.tokens <= 1


def test_a_newcomer_that_would_break_the_pace_waits_outside_for_a_bounded_time() -> None:
    newcomer = PacedRequest(Request(40, 39), transferred=True, yields=False, tpot_target_ns=0)
    queues = replace(NOTHING, decodes=[decoding(target_ms=12)], arrived=[newcomer])
    pace = Pace(512)
    pace.step_time, pace.budget_tokens = MODEL, 0
    at = partial(plan_step, pace, tokens_each=1, block_size_tokens=BLOCK)
    assert at(queues, now_ns=1000 * MS) == PacedStep(1, [newcomer])
    assert at(queues, now_ns=1000 * MS + MAX_HOLD_NS) == PacedStep(2, [])
    again = replace(queues, decodes=[*queues.decodes, newcomer], arrived=())
    assert at(again, now_ns=1001 * MS) == PacedStep(2, []), "what has begun is not held back"


def test_yielding_prompts_make_way_for_one_that_there_is_room_for() -> None:
    batch, person = prompt(200, computed=64, yields=True), prompt(96)
    queues = replace(NOTHING, partly=[batch], prompts=[person])
    assert plan(queues) == PacedStep(96, [batch])
    assert list(plan(replace(queues, free_blocks=2)).aside) == []
    assert list(plan(replace(queues, free_places=0)).aside) == []
    assert list(plan(replace(queues, prompts=())).aside) == []


def arrived() -> PacedRequest:
    return PacedRequest(Request(40, 39), transferred=True, yields=False, tpot_target_ns=0)


def test_newcomers_get_their_tokens_beside_a_long_running_prompt() -> None:
    first, second, waits = prompt(32000, computed=256), prompt(900, computed=64), prompt(96)
    beside = replace(NOTHING, decodes=[decoding()], arrived=[arrived()], partly=[first, second], prompts=[waits])
    made = plan(beside, budget=256)
    assert made == PacedStep(2 + 256, [second], each=256), "256 are the first prompt's, one the newcomer's"
    made = plan(replace(beside, arrived=(), pulls=3), budget=256)
    assert made == PacedStep(1 + 3 + 256, [second], each=256)
    made = plan(beside, budget=0)
    assert made == PacedStep(2, [waits, first, second])
    assert plan(replace(beside, arrived=()), budget=256) == PacedStep(1 + 256, [], each=0), "no sequence arrives"
    assert list(plan(replace(beside, free_blocks=1), budget=0).aside) == [waits], "decodes may need their blocks"


def test_tokens_lost_to_preemption_do_not_count_as_prompt() -> None:
    again, partly = prompt(300), prompt(900, computed=64)
    queues = replace(NOTHING, decodes=[decoding(target_ms=20)], preempted=[again], partly=[partly])
    assert plan(queues) == PacedStep(1 + 90 + 300, [], each=90), "what the pace leaves, and what was lost"
    runs = replace(queues, preempted=(), lost=[prompt(300, computed=20)])
    assert plan(runs) == PacedStep(1 + 90 + 280, [])
    assert plan(replace(runs, lost=[prompt(9000)])).tokens == 1 + 90 + 512, "a chunk at most"
    assert plan(replace(runs, arrived=[arrived()])) == PacedStep(2 + 40 + 280, [partly])


def test_a_preempted_sequence_without_room_gives_prompts_no_tokens() -> None:
    queues = replace(NOTHING, decodes=[decoding()], preempted=[prompt(300)], partly=[prompt(900, computed=64)])
    for full in (replace(queues, free_places=0), replace(queues, free_blocks=10)):
        assert plan(full, budget=16) == PacedStep(1 + 16, [])
    nobody = replace(queues, decodes=(), free_blocks=10)
    assert plan(nobody, budget=0).tokens == 300, "without neighbours it may try"


def test_drafts_are_counted_if_there_are_any() -> None:
    drafting, plain = decoding(), decoding()
    drafting.request.drafts = 3
    made = plan_step(
        Pace(512),
        replace(NOTHING, decodes=[drafting, plain], arrived=[arrived()]),
        tokens_each=4,
        block_size_tokens=BLOCK,
        now_ns=1,
    )
    assert made.tokens == 4 + 1 + 4 + 512


def test_sequences_that_hold_blocks_continue_after_a_step_that_computed_nothing() -> None:
    batch, waits, person = prompt(200, computed=64, yields=True), prompt(50, yields=True), prompt(96)
    queues = replace(NOTHING, partly=[batch], prompts=[person, waits])
    assert list(plan(queues).aside) == [batch, waits]
    assert list(plan(replace(queues, stalled=True)).aside) == [waits]


def test_a_step_decided_ahead_begins_after_those_in_flight() -> None:
    work = StepWork(decode_sequences=1)
    assert begins_ns(MODEL, [(work, 50 * MS)], 60 * MS, 61 * MS) == 70 * MS
    assert begins_ns(MODEL, [(work, 50 * MS)], 0, 90 * MS) == 90 * MS
    assert begins_ns(None, [(work, 50 * MS)], 0, 51 * MS) == begins_ns(MODEL, [], 0, 51 * MS) == 51 * MS


def test_tokens_in_flight_count_as_produced() -> None:
    made = decoding(target_ms=20)
    assert made.line is not None and made.line.due_ns == 1020 * MS
    made.request.num_output_placeholders = 1
    assert made.line.due_ns == 1040 * MS
    drafts = PacedRequest(Request(21, 20, 1, 4), tpot_target_ns=20 * MS, tokens_a_step=4)
    drafts.stepped(1000 * MS)
    assert drafts.line is not None and drafts.line.due_ns == 1040 * MS, "a token for a step, whatever its drafts"


def test_a_sequence_whose_last_token_is_in_flight_computes_no_more() -> None:
    made = PacedRequest(Request(23, 23, 3, num_output_placeholders=1, max_tokens=4))
    assert made.ends_under_way
    made.request.max_tokens = 5
    assert not made.ends_under_way
    made.request.num_output_placeholders = 0
    assert not made.ends_under_way


def test_a_trial_starts_once_all_its_prompts_have_arrived_and_runs_once() -> None:
    trial = TrialStep()
    assert [sum(map(len, trial_tokens(tokens, 50))) for tokens in (1, 512, 700)] == [1, 512, 700]
    assert not trial.due and not trial.add(Request(512, request_id="a"), 2)
    assert trial.add(Request(188, request_id="b"), 2) and trial.tokens == 700
    assert not trial.is_of({"a": 512})
    trial.begun()
    assert not trial.due and trial.is_of({"a": 512, "b": 188})
    trial.over()
    assert not trial.due and not trial.is_of({"a": 512})


@given(st.lists(st.sampled_from(["decide", "end"]), max_size=30))
def test_the_board_shows_the_oldest_step_in_flight_with_its_number(events: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        board, seen = Board(Path(folder) / "board"), Board(Path(folder) / "board")
        steps, now_ns, begun = Steps(board, KvWait(), SpanRing(Path(folder) / "encodes")), 1, 0
        for event in events:
            now_ns += 1
            if event == "decide":
                begun += 1
                steps.decided(StepWork(prefill_tokens=begun), now_ns)
            elif steps.in_flight:
                assert steps.end(now_ns).prefill_tokens == steps.ended
            running = seen.read()
            assert running is not None
            if steps.in_flight:
                assert (running.number, running.work.prefill_tokens) == (steps.ended + 1, steps.ended + 1)
                assert running.start_unix_ns >= steps.ended_ns
            else:
                assert running == NOBODY
        board.close()
        seen.close()


def test_a_step_reports_its_ended_kv_wait_until_it_is_acknowledged(tmp_path: Path) -> None:
    board, wait = Board(tmp_path / "board"), KvWait()
    steps = Steps(board, wait, SpanRing(tmp_path / "encodes"))
    wait.awaiting(True, 10)
    steps.decided(StepWork(decode_sequences=1), 30)
    assert board.read() == Running(1, 30, 10, StepWork(decode_sequences=1))


@given(st.lists(st.integers(0, 6), max_size=8), st.lists(st.integers(0, 6), max_size=8), st.integers(1, 4))
def test_adapters_within_their_slots_fit_beside_all_that_run(running, waiting, most):
    assume(len(set(running) - {0}) <= most)
    beyond = beyond_slots(running, waiting, most)
    admitted = {each for each in waiting if each not in beyond}
    assert len((set(running) | admitted) - {0}) <= most
    assert not beyond or len((set(running) | admitted) - {0}) == most, "a slot is left"
    assert not beyond & ({0} | set(running))
