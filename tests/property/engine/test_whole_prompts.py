"""Properties of prompts that cannot be chunked: one step each, within the budget, and none starves."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest, Pooling, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.engine.runner import Sampled

CHUNK, CONTEXT = 16, 48
CAPABILITIES = Capabilities(
    block_size_tokens=4,
    kv_blocks=40,
    kv_block_bytes=1,
    max_context_tokens=CONTEXT + 1,
    max_sequences=5,
    kv_layout="none",
    pools=frozenset({Pooling.CLS}),
    generates=False,
    whole_prompts=True,
)


def request(place: int, tokens: int, phase: EnginePhase) -> EngineRequest:
    ids = np.arange(tokens, dtype=np.int32)
    return EngineRequest(place, f"r{place}", phase, ids, tokens, 1, SamplingParams(), pooling=Pooling.CLS)


@given(
    st.lists(st.integers(1, CONTEXT), min_size=1, max_size=20), st.sampled_from([EnginePhase.PREFILL, EnginePhase.BOTH])
)
def test_each_prompt_is_computed_in_one_step_and_in_order(lengths: list[int], phase: EnginePhase) -> None:
    config = EngineConfig(None, "encoder", block_size_tokens=4, max_waiting=len(lengths), prefill_chunk_tokens=CHUNK)
    identity = EngineIdentity("w", 1, "")
    core = Core(config, CAPABILITIES, frozenset(), identity, random_bytes=Random(1).randbytes)
    for place, tokens in enumerate(lengths):
        core.submit(request(place, tokens, phase), now_ns=place)
    order: list[int] = []
    now_ns = len(lengths)
    while (batch := core.plan(now_ns)) is not None:
        assert len(order) < len(lengths)
        core.begin(batch, now_ns)
        assert all((chunk.start, chunk.sample) == (0, True) for chunk in batch.chunks)
        assert sum(len(chunk.token_ids) for chunk in batch.chunks) <= CHUNK or len(batch.chunks) == 1
        vectors = {chunk.sequence_id: Sampled(0, pooled=np.ones(2, np.float32)) for chunk in batch.chunks}
        core.apply(batch, vectors, now_ns + 1)
        event = core.take_event()
        assert event is not None
        ended = [output for output in event.outputs if output.finish is not None]
        assert {output.finish for output in ended} == {FinishReason.STOP} and all(output.pooled for output in ended)
        order += [chunk.sequence_id for chunk in batch.chunks]
        now_ns += 2
    assert order == list(range(len(lengths)))
    assert core.integrity() == EngineIntegrity(0, 0, 0)
