"""Tests of KV transfers in the lab whose receiver is submitted before the prompt has begun at its source."""

from typing import Any, cast

import pytest

from libs.dispatch.ports import Failed
from libs.engine.kv_blocks import HANDLE_BYTES
from libs.engine.kv_port import KvHandle
from libs.engine.port import EnginePhase
from libs.lab.cluster.sequence import GREEDY, CountedRequest, CountedTokens, ToGateway, ToWorker
from libs.lab.cluster.time import PS_PER_NS, START_PS, StepDurations, VirtualTime
from libs.lab.cluster.worker import LabWorker
from libs.policy.roles import Assignment, Role
from tests.lab_rig import BLOCK, MODEL, MS, shape

TOKENS = 4 * BLOCK
NAME = bytes([1]) * HANDLE_BYTES
PROMPT, RECEIVER = 1, 2
LIMIT_MS = 5_000
LONG_TOKENS = 100_000  # computed in more than the limit
SHAPE = shape(LONG_TOKENS // BLOCK + 100)


class Gateway:
    """A gateway that records when sequences lost their blocks, and their tokens."""

    heeds_tokens = True

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.lost_ms: dict[int, float] = {}
        self.first_ms: dict[int, float] = {}
        self.tokens: list[int] = []

    def deliver(self, worker: LabWorker, frame: ToGateway) -> None:
        passed_ms = (self._time.now_ps - START_PS) / PS_PER_NS / MS
        self.lost_ms.update((each.sequence_id, passed_ms) for each in frame.events if isinstance(each, Failed))
        for sequence_id in frame.tokens:
            self.first_ms.setdefault(sequence_id, passed_ms)
        self.tokens += frame.tokens


class Bench:
    """A prefill and a decode worker without a dispatcher."""

    def __init__(self) -> None:
        self.time = VirtualTime()
        self.gateway = Gateway(self.time)
        roles = (Role.PREFILL, 0), (Role.MIXED, 0)
        self.source, self.target = (
            LabWorker(index, SHAPE, Assignment("m", role, budget, 1), self.time, StepDurations(MODEL))
            for index, (role, budget) in enumerate(roles)
        )
        peers = {worker.id: worker for worker in (self.source, self.target)}
        for worker in peers.values():
            worker.start(cast(Any, self.gateway), peers)

    def at_ms(self, at_ms: float, worker: LabWorker, frame: ToWorker) -> None:
        self.time.at_ps(START_PS + round(at_ms * MS * PS_PER_NS), lambda: worker.receive(frame))

    def submit_receiver(self) -> None:
        handle = KvHandle(self.source.id, 1, "", NAME, TOKENS, 4, SHAPE.kv_kind, streamed=True, named=True)
        self.at_ms(0, self.target, ToWorker(submits=[request(RECEIVER, EnginePhase.DECODE, kv=handle)]))

    def run(self) -> None:
        """Run to a time by which everything has ended but a lease."""
        self.time.run(lambda: self.time.now_ps < START_PS + 4 * LIMIT_MS * MS * PS_PER_NS)


def request(sequence_id: int, phase: EnginePhase, *, tokens: int = TOKENS, **others: Any) -> CountedRequest:
    name = f"r{sequence_id}"
    return CountedRequest(
        sequence_id, name, phase, cast(Any, CountedTokens(tokens)), tokens, 4, GREEDY, output_tokens=4, **others
    )


def prompt() -> CountedRequest:
    return request(PROMPT, EnginePhase.PREFILL, kv_name=NAME)


def test_a_receiver_whose_prompt_never_comes_fails_at_the_limit_of_live_workers() -> None:
    bench = Bench()
    bench.submit_receiver()
    bench.run()
    hops_ms = 3 * bench.source.shape.hop_ps / PS_PER_NS / MS
    assert bench.gateway.lost_ms == {RECEIVER: pytest.approx(LIMIT_MS + hops_ms)}


def test_a_prompt_that_comes_within_the_limit_is_received() -> None:
    bench = Bench()
    bench.submit_receiver()
    bench.at_ms(LIMIT_MS - 100, bench.source, ToWorker(submits=[prompt()]))
    bench.run()
    assert not bench.gateway.lost_ms
    assert bench.gateway.tokens.count(RECEIVER) == 3


def test_a_prompt_that_waits_its_turn_for_longer_than_the_limit_is_received() -> None:
    bench = Bench()
    longest = request(3, EnginePhase.PREFILL, tokens=LONG_TOKENS)
    bench.at_ms(0, bench.source, ToWorker(submits=[longest]))
    bench.at_ms(0, bench.source, ToWorker(submits=[prompt()]))
    bench.submit_receiver()
    bench.run()
    assert not bench.gateway.lost_ms
    assert bench.gateway.first_ms[RECEIVER] > LIMIT_MS
    assert bench.gateway.tokens.count(RECEIVER) == 3


def test_a_prompt_that_is_aborted_before_it_begins_fails_its_receiver_at_once() -> None:
    bench = Bench()
    bench.at_ms(0, bench.source, ToWorker(submits=[request(3, EnginePhase.PREFILL, tokens=LONG_TOKENS)]))
    bench.at_ms(0, bench.source, ToWorker(submits=[prompt()]))
    bench.submit_receiver()
    bench.at_ms(50, bench.source, ToWorker(aborts=[PROMPT]))
    bench.run()
    hops_ms = 2 * bench.source.shape.hop_ps / PS_PER_NS / MS
    assert bench.gateway.lost_ms == {RECEIVER: pytest.approx(50 + hops_ms)}
