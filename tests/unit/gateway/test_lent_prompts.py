"""Tests of prompts that are late on decode workers, which prefill workers without work take over."""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.dispatcher import EXPIRY_INTERVAL_NS, Bounds, Dispatcher
from libs.dispatch.generation import Generation, RequestTimes
from libs.dispatch.ports import Tokens, WorkerUpdate
from libs.dispatch.rounds import Router
from libs.dispatch.suspects import Suspects
from libs.policy.gateway.binding import LeastLoaded, PredictedTtft, prompt_ns
from libs.policy.gateway.lent_prompts import (
    MOST_TAKEN,
    PATIENCE_NS,
    WORTH,
    LentPrompt,
    has_nothing_to_do,
    to_take_back,
)
from libs.policy.gateway.order import WaitBounds
from libs.policy.gateway.outlook import WorkerOutlook
from libs.policy.gateway.placement import MAX_TAKEN_BACK, Attempt, Partner, Placement, Requeue
from libs.policy.gateway.view import BindingRequest, WorkerRoom, WorkerView
from libs.policy.roles import Phase
from libs.policy.speed import UNKNOWN_SPEED
from libs.testing.wait import ManualClock
from tests.unit.gateway.test_routing import SPEED, decode, mixed, prefill

MS = 1_000_000


def lent(key: int, waited_ms: int, predicted_ms: float = 100, worker: str = "m") -> LentPrompt:
    return LentPrompt(
        BindingRequest(key, "m", tokens=300, avoid=frozenset((worker,))), waited_ms * MS, predicted_ms * MS
    )


def taken(*prompts: LentPrompt, views: Any) -> list[int]:
    return to_take_back(prompts, views, PredictedTtft(), 0)


def test_a_late_prompt_goes_to_a_prefill_worker_that_has_nothing_to_do() -> None:
    views = [prefill("p"), mixed("m"), decode("d")]
    assert taken(lent(1, 600), views=views) == [1]
    assert taken(lent(1, 400), views=views) == []
    assert taken(lent(1, 600, predicted_ms=5_000), views=views) == [1]  # it was expected to wait for long
    slow = prefill("p", speed=replace(SPEED, step_time=SPEED.step_time.scaled(100)))
    assert taken(lent(1, 600, predicted_ms=2_000), views=[slow, mixed("m")]) == []
    assert taken(lent(1, 2_000, predicted_ms=2_000), views=[slow, mixed("m")]) == [1]


def test_a_late_prompt_stays_where_no_prefill_worker_is_free_or_no_place_to_decode() -> None:
    late = lent(1, 5_000)
    for busy in (
        prefill("p", prefill_credits=0),
        prefill("p", prompt_tokens=1),
        prefill("p", reported_backlog_ns=1e6),
        mixed("other"),
    ):
        assert taken(late, views=[busy, mixed("m"), decode("d")]) == []
    assert taken(late, views=[prefill("p"), mixed("m", decode_credits=0)]) == []
    assert taken(late, views=[prefill("p"), mixed("m")]) == [1]  # it may decode where it waited


def test_the_prompts_that_have_waited_longest_go_first_and_only_as_many_as_fit() -> None:
    late = [lent(key, 1_000 + key) for key in range(MOST_TAKEN + 5)]
    found = taken(*late, views=[prefill("p", prefill_credits=3), mixed("m"), decode("d")])
    assert found == [MOST_TAKEN + 4, MOST_TAKEN + 3, MOST_TAKEN + 2]
    assert len(taken(*late, views=[prefill("p", prefill_credits=99, speed=UNKNOWN_SPEED), mixed("m")])) <= MOST_TAKEN


VIEWS = st.lists(
    st.one_of(
        st.builds(
            lambda free, tokens, backlog: prefill(
                "", prefill_credits=free, prompt_tokens=tokens, reported_backlog_ns=backlog, speed=SPEED
            ),
            st.integers(0, 2), st.sampled_from([0, 0, 500]), st.sampled_from([0.0, 0.0, 1e8]),
        ),
        st.builds(lambda free: mixed("", decode_credits=free), st.integers(0, 3)),
        st.builds(lambda free: decode("", decode_credits=free), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip
WAITS = st.lists(st.tuples(st.integers(0, 8_000), st.integers(0, 3_000)), max_size=8)


@given(VIEWS, WAITS)
def test_no_prompt_is_late_on_a_decode_worker_while_a_prefill_worker_could_compute_it_at_once(
    drawn: list[WorkerView], waits: list[tuple[int, int]]
) -> None:
    views = [replace(each, id=f"w{number}") for number, each in enumerate(drawn)]
    prompts = [lent(key, waited, predicted, worker="none") for key, (waited, predicted) in enumerate(waits)]
    idle = [WorkerRoom.of(each, 0) for each in views if has_nothing_to_do(each, 0)]
    places = sum(each.decode_credits for each in views if each.takes_decode)
    moved = taken(*prompts, views=views)
    left = [each for each in prompts if each.request.sequence_id not in moved]
    for each in left:
        rest_ns = each.predicted_ns - each.waited_ns
        soon_ns = min((prompt_ns(each.request, room) for room in idle), default=0.0)
        too_long = each.waited_ns >= max(PATIENCE_NS, each.predicted_ns)
        too_long |= each.waited_ns >= PATIENCE_NS and rest_ns >= WORTH * soon_ns
        # Each worker that had nothing to do has one of the prompts now, or no place to decode is left.
        assert not too_long or len(moved) >= min(len(idle), places)
    assert all(prompts[key].waited_ns >= PATIENCE_NS for key in moved)


def test_a_placement_leaves_a_decode_worker_only_before_its_first_token_and_a_bounded_number_of_times() -> None:
    placement = Placement("m")
    for number in range(MAX_TAKEN_BACK):
        placement.queued(number)
        placement.bound(("m", 1), ("m", 1), 0)
        *_, last = placement.take_back("late")
        assert last == Requeue("late") and placement.resumed and "m" in placement.avoid
    placement.queued(99)
    placement.bound(("m", 1), ("m", 1), 0)
    assert placement.take_back("late") == ()
    other = Placement("m")
    other.bound(("m", 1), ("m", 1), 0)
    assert other.prompt_attempt is not None
    other.prompt_attempt.tokens = 1
    assert other.take_back("late") == ()


@dataclass
class FakeLink:
    """A worker that computes nothing by itself; its view is what a test makes it."""

    shown: WorkerView
    submitted: list[Attempt] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    model = "m"

    def __post_init__(self) -> None:
        self.id = self.shown.id
        self.key = (self.id, 1)
        self.outlook = WorkerOutlook("device", SPEED, 0)

    def partner(self) -> Partner:
        return Partner(self.shown.takes_decode, "k", streams_kv=True)

    def submit(self, attempt: Attempt, work: object, blocks: object) -> None:
        self.submitted.append(attempt)
        if self.shown.takes_prefill:
            self.shown = replace(self.shown, prefill_credits=0, prompt_tokens=300)

    def forget(self, sequence_id: int, *, abort: bool) -> None:
        self.aborted += [sequence_id] if abort else []

    def reserve(self, prompt_tokens: int) -> None: ...

    def release(self, prompt_tokens: int) -> None: ...

    def set_demand(self, demand: object) -> None: ...


class FakeLinks:
    quiet: frozenset[str] = frozenset()

    def __init__(self, *links: FakeLink) -> None:
        self.links = links

    def link(self, key: tuple[str, int]) -> FakeLink | None:
        return next((each for each in self.links if each.key == key), None)

    def serving(self) -> dict[str, FakeLink]:
        return {each.id: each for each in self.links}

    def views(self) -> list[WorkerView]:
        return [each.shown for each in self.links]


class Turns:
    """A scheduler of which a test runs the calls that are due."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.calls: list[tuple[int, Any]] = []

    def soon(self, call: Any) -> None:
        self.at(0, call)

    def at(self, unix_ns: int, call: Any) -> None:
        self.calls.append((unix_ns, call))

    def run(self, seconds: float = 0.0) -> None:
        """Run what is due, then step by step what becomes due within so many seconds."""
        for _ in range(round(seconds * 1e9 / EXPIRY_INTERVAL_NS) + 1):
            while due := [each for each in self.calls if each[0] <= self.clock.now_ns()]:
                self.calls = [each for each in self.calls if each[0] > self.clock.now_ns()]
                for _, call in due:
                    call()
            if seconds:
                self.clock.advance_ms(EXPIRY_INTERVAL_NS / 1e6)


def dispatcher_of(*links: FakeLink) -> tuple[Dispatcher, Turns]:
    turns = Turns(ManualClock())
    made = Dispatcher(
        links=FakeLinks(*links),  # type: ignore[arg-type]
        router=Router(LeastLoaded()),
        clock=turns.clock,
        scheduler=turns,
        ended=lambda generation, ending: None,
        suspects=Suspects(turns.clock, 60.0, lambda attempt: False),
        bounds=Bounds(16, WaitBounds(60_000, 60_000), max_reroutes=1),
    )
    made.watch_time()
    return made, turns


def choice(turns: Turns, *, batch: bool = False) -> Generation:
    class Sink:
        def token(self, *_: object) -> bool:
            return False

    return Generation(
        request_id="r", model="m", prompt=b"", prompt_tokens=300, max_output_tokens=9, sampling=pb.Sampling(),
        context=pb.RequestContext(), end_token_ids=frozenset(), sink=Sink(),  # type: ignore[arg-type]
        timeline=RequestTimes(turns.clock.now_ns()), batch=batch,
    )  # fmt: skip


def test_a_gateway_moves_a_late_prompt_to_an_idle_prefill_worker_and_ends_it_at_the_decode_worker() -> None:
    idle, lender = FakeLink(prefill("p", load=1)), FakeLink(mixed("m"))
    dispatcher, turns = dispatcher_of(idle, lender)
    dispatcher.submit([choice(turns)])
    turns.run()
    (first,) = lender.submitted
    assert first.phase is Phase.BOTH and not idle.submitted
    turns.run(seconds=0.4)
    assert not idle.submitted
    turns.run(seconds=0.3)
    (again,) = idle.submitted
    assert again.phase is Phase.PREFILL and lender.aborted == [first.sequence_id]


def test_a_gateway_leaves_an_answered_prompt_and_a_line_of_a_batch_job_on_their_decode_worker() -> None:
    for batch in (False, True):
        idle, lender = FakeLink(prefill("p", load=1)), FakeLink(mixed("m"))
        dispatcher, turns = dispatcher_of(idle, lender)
        dispatcher.submit([choice(turns, batch=batch)])
        turns.run()
        if not batch:
            update = WorkerUpdate(False, False, Tokens([lender.submitted[0].sequence_id], [7], {}), ())
            dispatcher.received(lender, update)  # type: ignore[arg-type]
        turns.run(seconds=3)
        assert not idle.submitted and not lender.aborted
