"""Properties of preemption in a pool that is too small: nothing is lost, repeated or stuck."""

from dataclasses import dataclass, replace
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event, given, settings

from libs.contracts.errors import InvalidRequest
from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.kv_blocks import ReceivedTotals
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest
from libs.engine.port import SamplingParams as Sampling
from libs.engine.reports import EngineIntegrity
from libs.testing.engines.engine import CheckingDevice, reference
from libs.testing.examples import examples

BLOCK, BLOCKS, CONTEXT, CHUNK = 4, 12, 48, 8
NOW = 1_000
CONFIG = EngineConfig(None, "sim", block_size_tokens=BLOCK, prefill_chunk_tokens=CHUNK)
CAPABILITIES = Capabilities(BLOCK, BLOCKS, 64, CONTEXT, 6, "check", 260)


@dataclass(frozen=True)
class Wanted:
    """A sequence to come: of one of two families of prompts that share their beginning, or moved from elsewhere."""

    family: int
    prompt: int
    output: int
    reuse: bool
    moved: bool
    after_steps: int


wanted = st.builds(
    Wanted,
    st.integers(0, 1),
    st.integers(1, 24),
    st.integers(4, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 20),
)


def request(sequence_id: int, one: Wanted) -> EngineRequest:
    prompt = np.arange(one.prompt, dtype=np.int32) * (one.family + 3) % 250
    sampling = Sampling(temperature=0.8, seed=sequence_id, ignore_eos=True)
    requested = EngineRequest(
        sequence_id, "r", EnginePhase.BOTH, prompt, one.prompt, one.output, sampling, b"root" if one.reuse else b""
    )
    if not one.moved:
        return requested
    first = reference(requested, frozenset(), CONTEXT)[0][:1]
    kv = KvHandle("other", 1, "", b"", tokens=one.prompt, blocks=-(-one.prompt // BLOCK))
    return replace(requested, phase=EnginePhase.DECODE, token_ids=np.append(prompt, first).astype(np.int32), kv=kv)


class Run:
    """One core driven to the end of all its sequences, checked after each step."""

    def __init__(self, budget_tokens: int) -> None:
        self.core = Core(
            CONFIG, CAPABILITIES, frozenset(), EngineIdentity("w", 1, ""), random_bytes=Random(1).randbytes
        )
        self.core.set_prefill_budget(budget_tokens)
        self.device = CheckingDevice(BLOCKS, BLOCK)
        self.live: dict[int, EngineRequest] = {}
        self.tokens: dict[int, list[int]] = {}
        self.oldest_start: tuple[int, int] = (0, 0)
        self.computed = 0

    def submit(self, requested: EngineRequest) -> None:
        self.core.submit(requested, NOW)
        self.live[requested.sequence_id] = requested
        self.tokens[requested.sequence_id] = []
        self.observe()

    def step(self) -> None:
        for sequence in self.core.take_fetches():
            kv = sequence.request.kv
            assert kv is not None
            self.device.fill(np.array(sequence.blocks), sequence.request.token_ids[: kv.tokens])
            self.core.kv_arrived(sequence, ReceivedTotals(kv.blocks, 1), NOW, NOW)
        batch = self.core.plan(NOW)
        if batch is None:
            assert self.core.load().awaiting_kv, "something lives, and nothing is done for it"
            return
        oldest = next(iter(self.live))
        (start,) = [chunk.start for chunk in batch.chunks if chunk.sequence_id == oldest] or [-1]
        if self.oldest_start[0] == oldest:
            assert start > self.oldest_start[1], "the oldest lost ground"
        if start >= 0:
            self.oldest_start = (oldest, start)
        self.core.begin(batch, NOW)
        self.core.apply(batch, self.device.run(batch), NOW)
        self.computed += sum(len(chunk.token_ids) for chunk in batch.chunks)
        self.observe()

    def observe(self) -> None:
        assert self.core.pool_fault() == ""
        happened = self.core.take_event()
        for output in happened.outputs if happened else ():
            self.tokens[output.sequence_id] += output.token_ids
            if output.finish is not None:
                requested = self.live.pop(output.sequence_id)
                assert (self.tokens[output.sequence_id], output.finish) == reference(requested, frozenset(), CONTEXT)
                assert output.cached_tokens + output.computed_prompt_tokens <= requested.prompt_tokens


@given(st.lists(wanted, min_size=2, max_size=8), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_every_sequence_ends_with_the_tokens_it_would_have_alone(to_come: list[Wanted], decode_role: bool) -> None:
    """This includes budget 0, where all sequences are moved in and only recomputation computes their prompts."""
    to_come = [replace(one, moved=one.moved or decode_role) for one in to_come]
    run = Run(0 if decode_role else CHUNK)
    queue = [(one.after_steps, request(sequence_id, one)) for sequence_id, one in enumerate(to_come, start=1)]
    bound = sum(requested.prompt_tokens + requested.max_output_tokens for _, requested in queue) + 20
    for step in range(bound):
        for after, requested in queue:
            if after == step:
                run.submit(requested)
        if run.live:
            run.step()
    assert not run.live and len(run.tokens) == len(queue), "a sequence was never finished"
    assert run.core.integrity() == EngineIntegrity(0, 0, 0)
    load = run.core.load()
    event(f"preempted {min(load.preemptions, 3)} times")
    assert (load.recomputed_tokens == 0) or load.preemptions
    sent = sum(requested.kv.tokens if requested.kv else 0 for _, requested in queue)
    tokens = sum(len(requested.token_ids) + len(run.tokens[requested.sequence_id]) - 1 for _, requested in queue)
    assert run.computed - load.recomputed_tokens <= tokens - sent + load.preemptions


def busy(**changes: object) -> Run:
    """Run three growing sequences in a pool for hardly more than one."""
    run = Run(CHUNK)
    base = Wanted(family=0, prompt=8, output=36, reuse=False, moved=False, after_steps=0)
    for sequence_id in (1, 2, 3):
        run.submit(request(sequence_id, replace(base, family=sequence_id, **changes)))  # type: ignore[arg-type]
    while run.live:
        run.step()
    return run


def test_preemptions_and_their_cost_are_counted() -> None:
    load = busy().core.load()
    assert load.preemptions > 0 and load.recomputed_tokens > 0


def test_full_blocks_of_a_preempted_sequence_are_reused() -> None:
    assert busy(reuse=True).core.load().recomputed_tokens < busy().core.load().recomputed_tokens


def test_thrash_is_bounded() -> None:
    """A sequence admitted beside others gains a block before any is preempted: few preemptions for 108 tokens."""
    assert busy().core.load().preemptions <= 2 * 36 // BLOCK


def test_a_sequence_that_cannot_fit_alone_is_refused_at_submit() -> None:
    small = replace(CAPABILITIES, kv_blocks=4)
    core = Core(CONFIG, small, frozenset(), EngineIdentity("w", 1, ""), random_bytes=Random(1).randbytes)
    fits = Wanted(0, 8, 9, reuse=False, moved=False, after_steps=0)
    core.submit(request(1, fits), NOW)
    with pytest.raises(InvalidRequest, match="5 KV blocks"):
        core.submit(request(2, replace(fits, output=10)), NOW)
