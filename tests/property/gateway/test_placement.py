"""Properties of placements: nothing is held twice or left behind, and each sequence ends once."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.policy.gateway.placement import (
    Attempt,
    Blocks,
    Effects,
    End,
    EndReason,
    Forget,
    HandOver,
    Partner,
    Placement,
    Proceed,
    Release,
    Requeue,
    Reserve,
    Submit,
    WorkerKey,
)
from libs.policy.roles import Phase, Refusal
from libs.testing.examples import examples

WORKERS: list[WorkerKey] = [(name, incarnation) for name in ("a", "b", "c") for incarnation in (1, 2)]
KINDS = ("k", "other")
WORKER, KIND, FLAG = st.sampled_from(WORKERS), st.sampled_from(KINDS), st.booleans()


@dataclass
class AnyCluster:
    """A cluster whose facts about workers are set by a test."""

    max_reroutes: int = 3
    partners: dict[WorkerKey, Partner] = field(default_factory=dict)
    has_readers: bool = True

    def partner(self, worker: WorkerKey) -> Partner | None:
        return self.partners.get(worker)

    def decodes(self, model: str, kv_kind: str) -> bool:
        return self.has_readers and model == "m" and kv_kind in KINDS


class PoolDecision(RuleBasedStateMachine):
    """A gateway that carries effects out, and keeps its own books of them."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = Placement("m")
        self.cluster = AnyCluster(partners=dict.fromkeys(WORKERS, Partner(True, "k", True)))
        self.ids = count(1)
        self.output = 0
        self.open: list[Attempt] = []
        self.reserved: list[WorkerKey] = []
        self.ever: set[tuple[WorkerKey, int]] = set()
        self.ends: list[EndReason] = []
        self.readers: dict[int, Attempt | None] = {}
        """The source of blocks that can be read once, by the identity of the attempt that reads them."""
        self.placement.queued(next(self.ids))

    # ------------------------------------------------------------ actions of a gateway

    def carry_out(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Submit(attempt, blocks):
                    assert (attempt.worker, attempt.sequence_id) not in self.ever, "a worker got a sequence id twice"
                    self.ever.add((attempt.worker, attempt.sequence_id))
                    self.open.append(attempt)
                    if blocks is not None and blocks.named and attempt.phase is Phase.PREFILL:
                        blocks = None  # it leaves these, and does not continue from them
                    assert (blocks is not None) == (attempt.phase is Phase.DECODE)
                    if attempt.phase is not Phase.PREFILL:
                        self.reserved.remove(attempt.worker)
                    if blocks is not None and blocks.once:
                        assert self.placement.prompt_attempt not in self.readers.values(), "read a second time"
                        self.readers[id(attempt)] = self.placement.prompt_attempt
                case Forget(attempt, abort):
                    self.open.remove(attempt)
                    assert not (abort and attempt in self.readers.values()), "freed under its only reader"
                case Reserve(worker):
                    self.reserved.append(worker)
                case Release(worker):
                    self.reserved.remove(worker)
                case Requeue():
                    assert not self.placement.waiting
                    self.placement.queued(next(self.ids))
                case End(why):
                    self.ends.append(why)
                    self.carry_out(self.placement.over())
                case Proceed(attempt) | HandOver(attempt):
                    assert attempt in self.open

    def whole(self) -> bool:
        return self.output >= 6

    @property
    def alive(self) -> bool:
        return not self.placement.ended

    # ------------------------------------------------------------ events

    @rule(data=st.data())
    def cluster_changes(self, data: st.DataObject) -> None:
        self.cluster.has_readers = data.draw(FLAG)
        for worker in WORKERS:
            partner = Partner(data.draw(FLAG), data.draw(KIND), data.draw(FLAG))
            self.cluster.partners[worker] = partner

    @precondition(lambda self: self.alive and self.placement.waiting)
    @rule(prompt=WORKER, decode=WORKER)
    def is_bound(self, prompt: WorkerKey, decode: WorkerKey) -> None:
        computed = self.placement.blocks is not None
        self.carry_out(self.placement.bound(None if computed else prompt, decode, self.output))

    @precondition(lambda self: self.alive and self.placement.waiting and self.placement.blocks is None)
    @rule(prompt=WORKER, decode=WORKER)
    def is_bound_by_name(self, prompt: WorkerKey, decode: WorkerKey) -> None:
        name = Blocks(object(), prompt[0], "k", once=False, named=True)
        self.carry_out(self.placement.bound(prompt, decode, self.output, name))

    @precondition(lambda self: self.alive and self.placement.waiting and self.placement.blocks is not None)
    @rule()
    def nobody_can_read(self) -> None:
        self.carry_out(self.placement.drop_stale_kv())
        assert self.placement.blocks is None and self.placement.waiting

    @precondition(lambda self: self.alive and self.placement.prefilling)
    @rule(once=FLAG, kind=KIND)
    def blocks_open(self, once: bool, kind: str) -> None:
        attempt = self.placement.prompt_attempt
        assert attempt is not None
        blocks = Blocks(object(), attempt.worker[0], kind, once)
        left = 6 - self.output
        self.carry_out(self.placement.opened_blocks(attempt, blocks, self.cluster, self.output, left))

    @precondition(lambda self: self.alive and self.placement.prefilling)
    @rule(once=FLAG, kind=KIND)
    def prompt_is_computed(self, once: bool, kind: str) -> None:
        attempt = self.placement.prompt_attempt
        assert attempt is not None
        once = once and self.placement.streamed_blocks is None  # such blocks are never opened early
        self.output += 1
        blocks = Blocks(object(), attempt.worker[0], kind, once)
        self.carry_out(self.placement.prefilled(blocks, self.cluster, self.output, complete=self.whole()))

    @precondition(
        lambda self: self.alive and self.placement.decode_attempt is not None and not self.placement.prefilling
    )
    @rule()
    def token_comes(self) -> None:
        attempt = self.placement.decode_attempt
        assert attempt is not None
        self.output, attempt.tokens = self.output + 1, attempt.tokens + 1
        if attempt.tokens == 1:
            self.readers.pop(id(attempt), None)
            self.carry_out(self.placement.first_decoded())
        if self.whole():
            self.carry_out(self.placement.finished(attempt, self.cluster, well=True, complete=True))

    @precondition(lambda self: self.alive and self.open)
    @rule(data=st.data(), moved=FLAG)
    def worker_leaves(self, data: st.DataObject, moved: bool) -> None:
        attempt = data.draw(st.sampled_from(self.open))
        if attempt.phase is Phase.PREFILL or (not attempt.tokens and attempt.phase is Phase.DECODE):
            return
        if self.placement.hands_over(attempt, next(self.ids)):
            elsewhere = data.draw(WORKER.filter(lambda each: each != attempt.worker))
            self.carry_out(self.placement.place_found(attempt, elsewhere))
            if moved and attempt in self.open:
                blocks = Blocks(object(), attempt.worker[0], data.draw(KIND), data.draw(FLAG))
                effects = self.placement.handed_over(attempt, blocks, self.cluster, self.output, complete=self.whole())
                self.carry_out(effects)

    @precondition(lambda self: self.alive)
    @rule()
    def another_tenant_needs_its_place(self) -> None:
        runs, given_up = self.placement.runs, self.placement.given_up
        self.carry_out(self.placement.gives_way("another tenant waits"))
        assert self.placement.given_up == given_up + runs
        if runs:
            assert self.placement.waiting and not self.open and self.placement.blocks is None

    @precondition(lambda self: self.alive and self.open)
    @rule(data=st.data(), well=FLAG)
    def worker_ends_it(self, data: st.DataObject, well: bool) -> None:
        attempt = data.draw(st.sampled_from(self.open))
        self.readers.pop(id(attempt), None)
        self.carry_out(self.placement.finished(attempt, self.cluster, well=well, complete=self.whole()))

    @precondition(lambda self: self.alive and self.open)
    @rule(data=st.data(), why=st.sampled_from([*Refusal, None]))
    def worker_refuses_it(self, data: st.DataObject, why: Refusal | None) -> None:
        attempt = data.draw(st.sampled_from(self.open))
        self.readers.pop(id(attempt), None)
        self.carry_out(self.placement.refused(attempt, why, "", self.cluster, complete=self.whole()))

    @precondition(lambda self: self.alive and self.open)
    @rule(data=st.data(), blocks_lost=FLAG)
    def worker_fails_it(self, data: st.DataObject, blocks_lost: bool) -> None:
        attempt = data.draw(st.sampled_from(self.open))
        self.readers.pop(id(attempt), None)
        effects = self.placement.failed(attempt, "", self.cluster, blocks_lost=blocks_lost, complete=self.whole())
        self.carry_out(effects)

    @precondition(lambda self: self.alive)
    @rule(worker=WORKER, silent=FLAG)
    def worker_is_lost(self, worker: WorkerKey, silent: bool) -> None:
        self.cluster.partners.pop(worker, None)
        if worker in self.reserved:
            self.reserved.remove(worker)
            self.placement.reservation_lost()
        for attempt in [attempt for attempt in self.open if attempt.worker == worker]:
            if attempt in self.open:
                self.carry_out(self.placement.lost(attempt, self.cluster, silent=silent, complete=self.whole()))

    @precondition(lambda self: self.alive and self.output)
    @rule()
    def client_leaves(self) -> None:
        self.carry_out(self.placement.over())

    # ------------------------------------------------------------ invariants

    @invariant()
    def books_agree(self) -> None:
        placement = self.placement
        known = [attempt for attempt in (placement.prompt_attempt, placement.decode_attempt) if attempt is not None]
        assert sorted(map(id, self.open)) == sorted(map(id, known))
        assert self.reserved == ([placement.reserved] if placement.reserved is not None else [])

    @invariant()
    def it_is_somewhere_or_over(self) -> None:
        placement = self.placement
        if placement.ended:
            assert not self.open and not self.reserved and not placement.waiting
        elif placement.waiting:
            assert placement.decode_attempt is None and not self.reserved
            assert (placement.prompt_attempt is not None) <= (placement.blocks is not None)
        else:
            assert self.open

    @invariant()
    def it_ends_once_and_goes_elsewhere_so_often_at_most(self) -> None:
        assert len(self.ends) <= 1
        assert self.placement.reroutes <= self.cluster.max_reroutes + 1


TestPlaced = PoolDecision.TestCase
TestPlaced.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)


def test_a_sequence_that_moves_there_and_back_has_another_id_each_time() -> None:
    partners = {worker: Partner(takes_decode=True, kv_kind="k", streams_kv=True) for worker in WORKERS}
    cluster, ids, placement = AnyCluster(partners=partners), count(1), Placement("m")
    placement.queued(next(ids))
    placement.bound(WORKERS[0], WORKERS[0], 0)
    found = []
    for number in range(1, 6):
        attempt = placement.decode_attempt or placement.prompt_attempt
        assert attempt is not None
        found.append(attempt.sequence_id)
        assert placement.hands_over(attempt, next(ids))
        placement.place_found(attempt, WORKERS[number % 2])
        left = Blocks(object(), attempt.worker[0], "k", once=False)
        placement.handed_over(attempt, left, cluster, number, complete=False)
        placement.first_decoded()
    assert len(set(found)) == len(found)
    assert placement.hand_overs == 5


def test_blocks_that_a_lost_worker_may_still_read_are_neither_freed_nor_read_by_another() -> None:
    cluster, placement = AnyCluster(partners=dict.fromkeys(WORKERS, Partner(True, "k", True))), Placement("m")
    placement.queued(1)
    placement.bound(WORKERS[0], WORKERS[2], 0)
    source = placement.prompt_attempt
    placement.prefilled(Blocks(object(), "a", "k", once=True), cluster, 1, complete=False)
    reader = placement.decode_attempt
    assert source is not None and reader is not None
    effects = placement.lost(reader, cluster, silent=False, complete=False)
    assert Forget(source, abort=False) in effects
    assert placement.blocks is None


def test_a_refusal_for_its_role_while_the_prompt_is_computed_counts_as_one_when_it_is() -> None:
    cluster, placement = AnyCluster(partners=dict.fromkeys(WORKERS, Partner(True, "k", True, True))), Placement("m")
    placement.queued(1)
    name = Blocks(object(), "a", "k", once=False, named=True)
    effects = placement.bound(WORKERS[0], WORKERS[2], 0, name)
    prompt, decode = placement.prompt_attempt, placement.decode_attempt
    assert prompt is not None and decode is not None
    assert effects == [Reserve(WORKERS[2]), Submit(prompt, name), Submit(decode, name)]
    placement.refused(decode, Refusal.STALE_ROLE, "", cluster, complete=False)
    effects = placement.prefilled(name, cluster, 1, complete=False)
    assert [type(effect) for effect in effects] == [Requeue]
    assert (placement.reroutes, placement.stale_role_retries) == (0, 1)


def test_a_decode_from_named_blocks_needs_no_proceed() -> None:
    cluster, placement = AnyCluster(partners=dict.fromkeys(WORKERS, Partner(True, "k", True, True))), Placement("m")
    placement.queued(1)
    name = Blocks(object(), "a", "k", once=False, named=True)
    placement.bound(WORKERS[0], WORKERS[2], 0, name)
    assert not placement.prefilled(name, cluster, 1, complete=False)
    assert placement.decode_attempt is not None


def named_placement(cluster: AnyCluster) -> tuple[Placement, Blocks, Attempt]:
    """Return a placement whose decode was submitted with its prompt, with the blocks' name and that decode."""
    placement, name = Placement("m"), Blocks(object(), "a", "k", once=False, named=True)
    placement.queued(1)
    placement.bound(WORKERS[0], WORKERS[2], 0, name)
    assert placement.decode_attempt is not None
    return placement, name, placement.decode_attempt


def test_blocks_that_a_lost_decode_has_read_are_computed_again() -> None:
    cluster = AnyCluster(partners=dict.fromkeys(WORKERS, Partner(True, "k", True, True)))
    placement, name, decode = named_placement(cluster)
    source = placement.prompt_attempt
    placement.note_blocks_read()
    assert placement.lost(decode, cluster, silent=False, complete=False) == [Forget(decode, abort=False)]
    effects = placement.prefilled(name, cluster, 1, complete=False)
    assert [type(effect) for effect in effects] == [Forget, Requeue]
    assert placement.blocks is None and placement.prompt_attempt is None and source is not None


def test_blocks_that_a_lost_decode_has_not_read_serve_another_one() -> None:
    cluster = AnyCluster(partners=dict.fromkeys(WORKERS, Partner(True, "k", True, True)))
    placement, name, decode = named_placement(cluster)
    placement.lost(decode, cluster, silent=False, complete=False)
    assert [type(effect) for effect in placement.prefilled(name, cluster, 1, complete=False)] == [Requeue]
    assert placement.blocks is name


def test_a_decode_after_one_that_had_read_its_blocks_may_keep_its_own() -> None:
    cluster = AnyCluster(partners=dict.fromkeys(WORKERS, Partner(True, "k", True, True)))
    placement, name, decode = named_placement(cluster)
    placement.note_blocks_read()
    placement.lost(decode, cluster, silent=False, complete=False)
    placement.prefilled(name, cluster, 1, complete=False)
    placement.queued(2)
    placement.bound(WORKERS[0], WORKERS[4], 1, name)
    again = placement.decode_attempt
    assert again is not None
    placement.refused(again, Refusal.DRAINING, "", cluster, complete=False)
    placement.prefilled(name, cluster, 2, complete=False)
    assert placement.blocks is name


@pytest.mark.parametrize("decoded", [True, False])
def test_blocks_that_a_hand_over_leaves_are_kept_although_those_before_were_read(decoded: bool) -> None:
    """The place for the sequence is lost before its worker has handed it over, with and without a decoded token."""
    cluster = AnyCluster(partners=dict.fromkeys(WORKERS, Partner(True, "k", True, True)))
    placement, name, decode = named_placement(cluster)
    placement.note_blocks_read()
    if decoded:
        placement.prefilled(name, cluster, 1, complete=False)
        placement.first_decoded()
        assert not placement.blocks_read
    assert placement.hands_over(decode, 2)
    placement.place_found(decode, WORKERS[4])
    placement.reservation_lost()
    if not decoded:
        placement.prefilled(name, cluster, 1, complete=False)
    left = Blocks(object(), decode.worker[0], "k", once=False)
    effects = placement.handed_over(decode, left, cluster, 2, complete=False)
    assert Forget(decode, abort=True) not in effects
    assert isinstance(effects[-1], Requeue)
    assert placement.blocks is left
