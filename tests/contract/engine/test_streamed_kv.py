"""Contract tests of KV pulled while its prompt is computed, or found in the cache."""

import pytest

from libs.contracts.errors import InvalidRequest, KvLost
from libs.engine.kv_port import KvHandle
from libs.engine.port import EnginePhase, SamplingParams
from libs.engine.reports import FinishReason
from libs.testing.engines.engine import EngineBench, EventReader, exported
from libs.testing.wait import until
from tests.contract.engine.engine_rig import (
    BLOCK,
    GREEDY,
    IDLE,
    LONG,
    ROOT,
    SEEDED,
    complete,
    finish,
    on_our_core,
    prefill,
    sequence,
)


async def streamed_handle_of(reader: EventReader, sequence_id: int) -> KvHandle:
    await reader.until(lambda: reader.log(sequence_id).streamed_handle is not None)
    handle = reader.log(sequence_id).streamed_handle
    assert handle is not None and handle.streamed
    return handle


@on_our_core
async def test_blocks_arrive_while_their_prompt_is_computed(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", prefill_chunk_tokens=64)
    request = sequence(EnginePhase.PREFILL, prompt=LONG)
    engine.submit(request)
    handle = await streamed_handle_of(reader, request.sequence_id)
    assert (handle.tokens, handle.blocks) == (len(LONG), len(LONG) // BLOCK)
    early = blocks = 0
    async for chunk in exported(engine, handle.opaque, engine.capabilities.kv_layout):
        assert chunk.first_block == blocks
        blocks += chunk.blocks
        early += chunk.blocks if engine.integrity().live_sequences else 0
    assert blocks == handle.blocks
    assert early >= handle.blocks // 2
    engine.release(handle.opaque)
    assert finish(await reader.ended(request.sequence_id)) is FinishReason.PREFILLED
    await until(lambda: engine.integrity() == IDLE)


@on_our_core
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("size", [75, 800])
async def test_a_streamed_sequence_continues_as_if_it_had_stayed(
    bench: EngineBench, sampling: SamplingParams, size: int
) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=64)
    target, target_reader = await bench.start("decode")
    target.set_prefill_budget(0)
    prompt = LONG[:size]
    stayed = await complete(source, source_reader, sequence(prompt=prompt, sampling=sampling))
    begun = sequence(EnginePhase.PREFILL, prompt=prompt, sampling=sampling)
    source.submit(begun)
    handle = await streamed_handle_of(source_reader, begun.sequence_id)
    moved = sequence(EnginePhase.DECODE, prompt=prompt, sampling=sampling, kv=handle)
    target.submit(moved)
    first = (await source_reader.ended(begun.sequence_id)).token_ids
    await until(lambda: source.integrity() == IDLE)
    assert target.load().awaiting_kv == 1  # the KV is there, the token is not
    assert target.load().kv_wait_since_unix_ns == 0
    target.proceed(moved.sequence_id, tuple(first))
    target.proceed(moved.sequence_id, tuple(first))
    log = await target_reader.ended(moved.sequence_id)
    assert first + log.token_ids == stayed.token_ids
    assert log.end is not None and (log.pulled, log.end.computed_prompt_tokens) == (1, 0)
    assert target.integrity() == IDLE


@on_our_core
async def test_a_prompt_computed_in_one_step_is_not_streamed(bench: EngineBench) -> None:
    """The blocks of such a prompt are ready with it, so there is nothing to stream."""
    engine, reader = await bench.start("prefill", prefill_chunk_tokens=64)
    request = sequence(EnginePhase.PREFILL, prompt=LONG[:64])
    engine.submit(request)
    log = await reader.ended(request.sequence_id)
    assert (finish(log), log.streamed_handle) == (FinishReason.PREFILLED, None)


@on_our_core
async def test_tokens_that_arrive_before_their_blocks_wait_for_them(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=16)
    target, target_reader = await bench.start("decode")
    stayed = await complete(source, source_reader, sequence())
    bench.fetcher.gate.clear()
    begun = sequence(EnginePhase.PREFILL)
    source.submit(begun)
    moved = sequence(EnginePhase.DECODE, kv=await streamed_handle_of(source_reader, begun.sequence_id))
    target.submit(moved)
    first = (await source_reader.ended(begun.sequence_id)).token_ids
    with pytest.raises(InvalidRequest):
        target.proceed(moved.sequence_id, (-1,) if target.capabilities.vocab_size else (1,) * 20)
    target.proceed(moved.sequence_id, tuple(first))
    target.proceed(10**9, (1,))
    bench.fetcher.gate.set()
    assert first + (await target_reader.ended(moved.sequence_id)).token_ids == stayed.token_ids


@on_our_core
async def test_cached_blocks_are_sent_before_any_step_ends(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", prefill_chunk_tokens=16)
    await complete(engine, reader, sequence(EnginePhase.BOTH, prompt=LONG[:640], root=ROOT, output=1))
    request = sequence(EnginePhase.PREFILL, prompt=LONG, root=ROOT)
    engine.submit(request)
    handle = await streamed_handle_of(reader, request.sequence_id)
    chunks = aiter(exported(engine, handle.opaque, engine.capabilities.kv_layout))
    assert (await anext(chunks)).blocks >= 1
    assert engine.load().waiting_prefill_tokens >= 100
    engine.abort(request.sequence_id)
    with pytest.raises(KvLost):
        while True:
            await anext(chunks)
    await until(lambda: engine.integrity() == IDLE)


@on_our_core
@pytest.mark.parametrize("ended", ["aborted", "by its first token"])
async def test_a_prompt_that_leaves_no_blocks_ends_its_receiver_with_kv_lost(bench: EngineBench, ended: str) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=16)
    target, target_reader = await bench.start("decode")
    begun = sequence(EnginePhase.PREFILL, prompt=LONG, output=1 if ended == "by its first token" else 12)
    source.submit(begun)
    moved = sequence(EnginePhase.DECODE, prompt=LONG, kv=await streamed_handle_of(source_reader, begun.sequence_id))
    target.submit(moved)
    await until(lambda: bench.fetcher.fetching == 1)
    if ended == "aborted":
        source.abort(begun.sequence_id)
    assert finish(await target_reader.ended(moved.sequence_id)) is FinishReason.KV_LOST
    assert finish(await source_reader.ended(begun.sequence_id)) in (FinishReason.ABORTED, FinishReason.LENGTH)
    assert source.integrity() == target.integrity() == IDLE


@on_our_core
async def test_blocks_of_a_receiver_that_left_stay_until_their_lease_ends(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=16, kv_lease_ms=50)
    target, target_reader = await bench.start("decode")
    begun = sequence(EnginePhase.PREFILL, prompt=LONG)
    source.submit(begun)
    moved = sequence(EnginePhase.DECODE, prompt=LONG, kv=await streamed_handle_of(source_reader, begun.sequence_id))
    target.submit(moved)
    await until(lambda: bench.fetcher.fetching == 1)
    target.abort(moved.sequence_id)
    assert finish(await target_reader.ended(moved.sequence_id)) is FinishReason.ABORTED
    assert finish(await source_reader.ended(begun.sequence_id)) is FinishReason.PREFILLED
    await until(lambda: source.integrity() == IDLE)
    assert target.integrity() == IDLE


def blocks_received(reader: EventReader) -> list[int]:
    return [transfer.blocks for event in reader.events for transfer in event.kv_transfers]


@on_our_core
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("size", "rest"), [(64, 0), (75, 1), (800, 0)])
async def test_only_the_last_blocks_of_a_cached_prompt_are_pulled(
    bench: EngineBench, size: int, rest: int, streamed: bool
) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=32)
    target, target_reader = await bench.start("decode")
    prompt = LONG[:size]
    stayed = (await complete(source, source_reader, sequence(prompt=prompt))).token_ids
    for _ in range(2):
        begun = sequence(EnginePhase.PREFILL, prompt=prompt)
        source.submit(begun)
        if streamed:
            moved = sequence(
                EnginePhase.DECODE,
                prompt=prompt,
                root=ROOT,
                kv=await streamed_handle_of(source_reader, begun.sequence_id),
            )
            target.submit(moved)
            first = (await source_reader.ended(begun.sequence_id)).token_ids
            target.proceed(moved.sequence_id, tuple(first))
        else:
            prefilled = await source_reader.ended(begun.sequence_id)
            assert prefilled.end is not None
            first = prefilled.token_ids
            moved = sequence(EnginePhase.DECODE, prompt=prompt, root=ROOT, generated=first, kv=prefilled.end.handle)
            target.submit(moved)
        log = await target_reader.ended(moved.sequence_id)
        assert first + log.token_ids == stayed
        await until(lambda: source.integrity() == target.integrity() == IDLE)
    whole = -(-size // BLOCK)
    # The last block of a streamed prompt is pulled even if it is full, since its first token is not known yet.
    assert blocks_received(target_reader) == [whole, rest or int(streamed)]


@on_our_core
async def test_blocks_of_an_aborted_pull_stay_for_the_next_pull(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    stayed = (await complete(source, source_reader, sequence(prompt=LONG))).token_ids
    seen, first = await prefill(source, source_reader, prompt=LONG[:320], root=ROOT)
    await complete(
        target, target_reader, sequence(EnginePhase.DECODE, prompt=LONG[:320], root=ROOT, generated=first, kv=seen)
    )
    handle, first = await prefill(source, source_reader, prompt=LONG, root=ROOT)
    bench.fetcher.gate.clear()
    for _ in range(2):
        moved = sequence(EnginePhase.DECODE, prompt=LONG, root=ROOT, generated=first, kv=handle)
        target.submit(moved)
        await until(lambda: bench.fetcher.fetching == 1)
        assert target.integrity().referenced_blocks == handle.blocks + 1  # one for the tokens to come
        target.abort(moved.sequence_id)
        assert finish(await target_reader.ended(moved.sequence_id)) is FinishReason.ABORTED
        await until(lambda: bench.fetcher.fetching == 0)
        assert target.integrity() == IDLE
    bench.fetcher.gate.set()
    moved = sequence(EnginePhase.DECODE, prompt=LONG, root=ROOT, generated=first, kv=handle)
    assert first + (await complete(target, target_reader, moved)).token_ids == stayed
    assert blocks_received(target_reader) == [20, 30]
