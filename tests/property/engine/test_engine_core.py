"""Properties of two engine cores under any schedule: tokens equal the sequential reference, every block returns, waits
are exact.

The device is a checker: it keeps which token's KV lies in which slot, and refuses a step whose context is not there.
"""

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.contracts.errors import InvalidRequest, KvLost, QueueFull
from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.kv_blocks import ReceivedTotals
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import FinishReason
from libs.engine.runner import Batch
from libs.engine.sequence import Sequence, Stage
from libs.engine.sim_tokens import SPACE
from libs.testing.engines.engine import CheckingDevice, reference
from libs.testing.examples import examples

BLOCK = 4
BLOCKS = 12  # just enough for one whole context
CONTEXT = 48
LEASE_MS = 20
CONFIG = EngineConfig(
    None, "sim", block_size_tokens=BLOCK, max_waiting=4, prefill_chunk_tokens=16, kv_lease_ms=LEASE_MS
)
CAPABILITIES = Capabilities(
    block_size_tokens=BLOCK,
    kv_blocks=BLOCKS,
    kv_block_bytes=64,
    max_context_tokens=CONTEXT,
    max_sequences=5,
    kv_layout="check",
    vocab_size=260,
    streams_kv=True,
)
EOS = frozenset({ord("a")})


@dataclass
class Worker:
    """A core, its device, and what an observer has seen of it."""

    core: Core
    device: CheckingDevice = field(default_factory=lambda: CheckingDevice(BLOCKS, BLOCK))
    batch: Batch | None = None
    fetching: list[Sequence] = field(default_factory=list)
    live: dict[int, EngineRequest] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    handles: dict[bytes, tuple[EngineRequest, list[int], KvHandle]] = field(default_factory=dict)
    opened: dict[bytes, tuple[EngineRequest, KvHandle]] = field(default_factory=dict)
    """The streamed handles whose prompt may still be in computation."""
    first: dict[bytes, list[int]] = field(default_factory=dict)
    """The tokens that a streamed prompt ended in."""
    listed: set[bytes] = field(default_factory=set)
    waited_ns: int = 0
    reported_wait_ns: int = 0

    def awaiting(self) -> list[Sequence]:
        return [sequence for sequence in self.fetching if sequence.stage is Stage.FETCHING]


class CoreMachine(RuleBasedStateMachine):
    """Submits, steps, transfers, aborts and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000
        self.ids = 0
        self.workers = [
            Worker(
                Core(
                    CONFIG, CAPABILITIES, EOS, EngineIdentity(f"w{index}", 7, ""), random_bytes=Random(index).randbytes
                )
            )
            for index in range(2)
        ]

    # ------------------------------------------------------------------ rules

    @rule(
        index=st.integers(0, 1),
        phase=st.sampled_from((EnginePhase.PREFILL, EnginePhase.BOTH)),
        family=st.integers(0, 1),
        size=st.one_of(st.integers(1, CONTEXT), st.sampled_from((BLOCK, 2 * BLOCK, 5 * BLOCK))),
        output=st.integers(1, 40),
        seed=st.integers(0, 3),
        reuse=st.sampled_from((True, True, False)),
        stops=st.booleans(),
        yields=st.booleans(),
    )
    def submit(
        self,
        *,
        index: int,
        phase: EnginePhase,
        family: int,
        size: int,
        output: int,
        seed: int,
        reuse: bool,
        stops: bool,
        yields: bool,
    ) -> None:
        prompt = (np.arange(size, dtype=np.int32) * (family + 3)) % 250
        sampling = SamplingParams(
            temperature=float(seed > 0),
            seed=seed,
            stop_token_ids=frozenset({SPACE}) if stops else frozenset(),
            ignore_eos=not stops,
        )
        request = EngineRequest(0, "r", phase, prompt, size, output, sampling, b"root" if reuse else b"", yields=yields)
        self.take(self.workers[index], request)

    @precondition(lambda self: any(worker.handles for worker in self.workers))
    @rule(receiver=st.integers(0, 1), data=st.data())
    def transfer(self, receiver: int, data: st.DataObject) -> None:
        held = [entry for worker in self.workers for entry in worker.handles.values()]
        request, new, handle = data.draw(st.sampled_from(held))
        token_ids = np.array([*request.token_ids, *new], dtype=np.int32)
        self.take(self.workers[receiver], replace(request, phase=EnginePhase.DECODE, token_ids=token_ids, kv=handle))

    @precondition(lambda self: any(worker.opened for worker in self.workers))
    @rule(receiver=st.integers(0, 1), data=st.data())
    def stream(self, receiver: int, data: st.DataObject) -> None:
        opened = [entry for worker in self.workers for entry in worker.opened.values()]
        request, handle = data.draw(st.sampled_from(opened))
        self.take(self.workers[receiver], replace(request, phase=EnginePhase.DECODE, kv=handle))

    @precondition(lambda self: any(worker.awaiting() for worker in self.workers))
    @rule(data=st.data())
    def finish_fetch(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker in self.workers if worker.awaiting()]))
        self.complete(worker, data.draw(st.sampled_from(worker.awaiting())))

    @precondition(lambda self: any(worker.awaiting() for worker in self.workers))
    @rule(data=st.data())
    def hand_tokens(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker in self.workers if worker.awaiting()]))
        self.proceed(worker, data.draw(st.sampled_from(worker.awaiting())))

    def proceed(self, worker: Worker, sequence: Sequence) -> None:
        """Send the receiver of a streamed prompt its sampled token, if that is known and it may continue."""
        handle = sequence.request.kv
        assert handle is not None
        first = self.workers[int(handle.worker_id[1:])].first.get(handle.opaque)
        if handle.streamed and first is not None and not worker.tokens.get(sequence.sequence_id):
            worker.core.proceed(sequence.sequence_id, tuple(first), self.now)
            worker.tokens[sequence.sequence_id] = list(first)
            self.observe(worker)

    def complete(self, worker: Worker, sequence: Sequence) -> None:
        handle = sequence.request.kv
        assert handle is not None
        source = self.workers[int(handle.worker_id[1:])]
        if sequence.kv_arrived:
            self.proceed(worker, sequence)
            return
        try:
            held = source.core.offers.find(handle.opaque, self.now)
        except KvLost:
            worker.fetching.remove(sequence)
            worker.core.kv_failed(sequence, FinishReason.KV_LOST, "gone", self.now)
            self.observe(worker)
            return
        blocks = held.blocks[: held.ready]
        found = sequence.found_blocks
        worker.device.slots[sequence.blocks[found : len(blocks)]] = source.device.slots[blocks[found:]]
        if held.whole:
            worker.core.kv_requested(sequence)
            pulled = len(blocks) - found
            worker.core.kv_arrived(sequence, ReceivedTotals(pulled, 64 * pulled), self.now, self.now)
            source.core.release(handle.opaque, self.now)
            source.handles.pop(handle.opaque)
            self.observe(source)
        self.observe(worker)

    @rule(index=st.integers(0, 1))
    def begin_step(self, index: int) -> None:
        worker = self.workers[index]
        if worker.batch is None and (batch := worker.core.plan(self.now)) is not None:
            worker.batch = batch
            worker.core.begin(batch, self.now)
        self.observe(worker)

    @rule(index=st.integers(0, 1))
    def end_step(self, index: int) -> None:
        worker = self.workers[index]
        if worker.batch is not None:
            report = worker.core.apply(worker.batch, worker.device.run(worker.batch), self.now)
            computed = sum(len(chunk.token_ids) for chunk in worker.batch.chunks)
            assert report.prefill_tokens + report.decode_sequences == computed
            worker.batch = None
            self.observe(worker)

    @rule(index=st.integers(0, 1), steps=st.integers(2, 30))
    def run(self, index: int, steps: int) -> None:
        for _ in range(steps):
            self.end_step(index)
            self.begin_step(index)
        self.end_step(index)

    @rule(index=st.integers(0, 1), data=st.data(), resume=st.booleans())
    def abort(self, index: int, data: st.DataObject, resume: bool) -> None:
        worker = self.workers[index]
        if not worker.live:
            return
        sequence_id = data.draw(st.sampled_from(sorted(worker.live)))
        request, so_far = worker.live[sequence_id], worker.tokens.get(sequence_id, [])
        worker.core.abort(sequence_id, self.now)
        self.observe(worker)
        if resume:
            token_ids = np.array([*request.token_ids, *so_far], dtype=np.int32)
            self.take(self.workers[1 - index], replace(request, phase=EnginePhase.BOTH, token_ids=token_ids, kv=None))

    @precondition(lambda self: any(worker.live for worker in self.workers))
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker in self.workers if worker.live]))
        worker.core.hand_over(data.draw(st.sampled_from(sorted(worker.live))), self.now)
        self.observe(worker)

    @rule(index=st.integers(0, 1), tokens=st.integers(0, 20))
    def budget(self, index: int, tokens: int) -> None:
        self.workers[index].core.set_prefill_budget(tokens)

    @rule(nanoseconds=st.integers(1, LEASE_MS * 100_000))
    def time_passes(self, nanoseconds: int) -> None:
        self.now += nanoseconds
        for worker in self.workers:
            if worker.batch is None and any(not sequence.kv_arrived for sequence in worker.awaiting()):
                worker.waited_ns += nanoseconds

    # ------------------------------------------------------------------ checks

    @invariant()
    def blocks_add_up(self) -> None:
        for worker in self.workers:
            integrity, load = worker.core.integrity(), worker.core.load()
            assert integrity.referenced_blocks + load.free_kv_blocks == BLOCKS
            assert worker.core.pool_fault() == ""
            assert integrity.live_sequences == load.running + load.waiting + load.awaiting_kv
            roster = worker.core._sequences
            prompts = [*roster.at(Stage.QUEUED_PROMPT), *roster.at(Stage.PREFILL), *roster.at(Stage.QUEUED_PREEMPTED)]
            assert load.waiting_prefill_tokens == sum(each.pending for each in prompts)
            assert load.waiting_prefill_squares == sum(each.length**2 - each.computed**2 for each in prompts)
            assert integrity.live_sequences == len(worker.live)

    @invariant()
    def kv_waits_are_exact(self) -> None:
        for worker in self.workers:
            load = worker.core.load()
            assert not (load.kv_wait_since_unix_ns and load.starved_since_unix_ns)
            since = load.kv_wait_since_unix_ns or load.starved_since_unix_ns
            assert worker.reported_wait_ns + (self.now - since if since else 0) == worker.waited_ns

    def take(self, worker: Worker, request: EngineRequest) -> None:
        self.ids += 1
        request = replace(request, sequence_id=self.ids)
        try:
            worker.core.submit(request, self.now)
        except (InvalidRequest, QueueFull):
            return
        worker.live[request.sequence_id] = request
        self.observe(worker)

    def observe(self, worker: Worker) -> None:
        worker.fetching += worker.core.take_fetches()
        event = worker.core.take_event()
        if event is None:
            return
        worker.reported_wait_ns += sum(end - start for start, end in event.kv_waits + event.starved)
        assert not set(event.blocks.stored) & worker.listed and set(event.blocks.removed) <= worker.listed
        worker.listed = (worker.listed | set(event.blocks.stored)) - set(event.blocks.removed)
        for output in event.outputs:
            request = worker.live[output.sequence_id]
            tokens = worker.tokens.setdefault(output.sequence_id, [])
            tokens += output.token_ids
            expected, reason = reference(request, EOS, CONTEXT)
            assert tokens == expected[: len(tokens)]
            if output.streamed_handle is not None:
                worker.opened[output.streamed_handle.opaque] = (request, output.streamed_handle)
            if output.finish is None:
                continue
            del worker.live[output.sequence_id]
            over = [opaque for opaque, (opened, _) in worker.opened.items() if opened.sequence_id == output.sequence_id]
            for opaque in over:
                del worker.opened[opaque]
            if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
                assert (tokens, output.finish) == (expected, reason)
            if output.finish is FinishReason.PREFILLED:
                assert len(tokens) == 1 and output.handle is not None
                assert over in ([], [output.handle.opaque])  # none where one step computed all of it
                worker.first[output.handle.opaque] = tokens
                worker.handles[output.handle.opaque] = (request, tokens, output.handle)
            if output.finish is FinishReason.HANDED_OVER:
                assert output.handle is not None and request.phase is not EnginePhase.PREFILL
                assert output.handle.tokens == len(request.token_ids) + len(tokens) - 1
                assert output.handle.blocks == -(-output.handle.tokens // BLOCK)
                worker.handles[output.handle.opaque] = (request, tokens, output.handle)

    def teardown(self) -> None:
        for worker in self.workers:
            worker.core.set_prefill_budget(16)
        for _ in range(2000):
            if not any(worker.live for worker in self.workers):
                break
            for index in range(2):
                self.end_step(index)
                worker = self.workers[index]
                for sequence in worker.awaiting():
                    self.complete(worker, sequence)
                    if sequence in worker.awaiting():
                        self.proceed(worker, sequence)
                self.begin_step(index)
                self.now += LEASE_MS * 100_000  # so that blocks under a lease come back
        for worker in self.workers:
            assert not worker.live, "a sequence was never finished"
            self.now += LEASE_MS * 1_000_000
            worker.core.admit(self.now)
            integrity = worker.core.integrity()
            assert (integrity.live_sequences, integrity.referenced_blocks, integrity.leased_handles) == (0, 0, 0)


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)
