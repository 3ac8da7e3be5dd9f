"""Contract tests of running sequences that continue on another engine."""

from dataclasses import replace

import pytest

from libs.engine.kv_port import KvHandle
from libs.engine.port import EnginePhase, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.testing.engines.engine import EngineBench, SequenceLog
from libs.testing.wait import until
from tests.contract.engine.engine_rig import (
    BLOCK,
    GREEDY,
    IDLE,
    LONG,
    PROMPT,
    SEEDED,
    complete,
    finish,
    moved,
    on_our_core,
    sequence,
)

PENALISED = replace(
    SEEDED, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=True, top_logprobs=2
)


GUIDED = replace(SEEDED, logprobs=True, guide="start: /[a-z ]{200}/")


def left_with(log: SequenceLog) -> KvHandle:
    assert log.end is not None and log.end.finish is FinishReason.HANDED_OVER and log.end.handle is not None
    return log.end.handle


@on_our_core
@pytest.mark.parametrize("sampling", [GREEDY, PENALISED, GUIDED], ids=["greedy", "penalised", "guided"])
@pytest.mark.parametrize("size", [1, 16, 75])
async def test_a_running_sequence_moved_twice_continues_as_if_it_had_stayed(
    bench: EngineBench, sampling: SamplingParams, size: int
) -> None:
    one, one_reader = await bench.start("one")
    two, two_reader = await bench.start("two")
    two.set_prefill_budget(0)
    assert one.capabilities.hands_over_running_kv
    prompt = PROMPT[:size]
    stayed = await complete(one, one_reader, sequence(prompt=prompt, sampling=sampling, output=100))
    first = await moved(one, one_reader, sequence(prompt=prompt, sampling=sampling, output=100), 5)
    handle = left_with(first)
    assert (handle.tokens, handle.blocks) == (
        size + len(first.token_ids) - 1,
        -(-(size + len(first.token_ids) - 1) // BLOCK),
    )
    assert not handle.streamed and one.integrity() == EngineIntegrity(0, handle.blocks, 1)
    second = await moved(
        two,
        two_reader,
        sequence(
            EnginePhase.DECODE, prompt=prompt, generated=first.token_ids, sampling=sampling, output=100, kv=handle
        ),
        5,
    )
    so_far = first.token_ids + second.token_ids
    back = sequence(
        EnginePhase.DECODE, prompt=prompt, generated=so_far, sampling=sampling, output=100, kv=left_with(second)
    )
    third = await complete(one, one_reader, back)
    assert so_far + third.token_ids == stayed.token_ids
    assert first.logprobs + second.logprobs + third.logprobs == stayed.logprobs
    assert third.end is not None and third.end.computed_prompt_tokens == 0
    assert one.integrity() == two.integrity() == IDLE


@on_our_core
async def test_a_sequence_that_leaves_does_not_disturb_its_neighbours(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    alone = await complete(engine, reader, sequence(output=60))
    staying = sequence(output=60)
    engine.submit(staying)
    left_with(await moved(engine, reader, sequence(sampling=SEEDED, output=60), 3))
    assert (await reader.ended(staying.sequence_id)).token_ids == alone.token_ids


@on_our_core
async def test_a_prompt_under_a_hand_over_order_leaves_with_its_first_token(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", prefill_chunk_tokens=64)
    request = sequence(prompt=LONG)
    engine.submit(request)
    engine.hand_over(request.sequence_id)
    log = await reader.ended(request.sequence_id)
    assert len(log.token_ids) == 1 and left_with(log).tokens == len(LONG)


async def test_a_hand_over_order_moves_only_running_sequences(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    engine.hand_over(10**9)
    prompt_only = sequence(EnginePhase.PREFILL)
    engine.submit(prompt_only)
    engine.hand_over(prompt_only.sequence_id)
    prefilled = await reader.ended(prompt_only.sequence_id)
    assert finish(prefilled) is FinishReason.PREFILLED and prefilled.end is not None and prefilled.end.handle
    engine.release(prefilled.end.handle.opaque)
    last = sequence(output=1)
    engine.submit(last)
    engine.hand_over(last.sequence_id)
    assert finish(await reader.ended(last.sequence_id)) is FinishReason.LENGTH
    given_up = sequence(output=500)
    engine.submit(given_up)
    await reader.tokens(given_up.sequence_id, 2)
    engine.abort(given_up.sequence_id)
    engine.hand_over(given_up.sequence_id)
    assert finish(await reader.ended(given_up.sequence_id)) is FinishReason.ABORTED
    await until(lambda: engine.integrity() == IDLE)


@on_our_core
async def test_a_sequence_that_no_worker_takes_over_is_freed_when_its_lease_ends(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", kv_lease_ms=50)
    handle = left_with(await moved(engine, reader, sequence(output=200), 3))
    await until(lambda: engine.integrity() == IDLE)
    target, target_reader = await bench.start("two")
    request = sequence(EnginePhase.DECODE, generated=[1] * (handle.tokens + 1 - len(PROMPT)), output=200, kv=handle)
    assert finish(await complete(target, target_reader, request)) is FinishReason.KV_LOST
