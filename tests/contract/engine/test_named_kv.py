"""Contract tests of KV under a name that was chosen before its prompt began."""

from dataclasses import replace

import pytest

from libs.contracts.errors import InvalidRequest
from libs.engine.kv_port import KvHandle
from libs.engine.port import Engine, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import FinishReason
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EngineBench
from libs.testing.wait import until
from tests.contract.engine.engine_rig import (
    BLOCK,
    GREEDY,
    IDLE,
    LONG,
    SEEDED,
    complete,
    finish,
    on_our_core,
    sequence,
)

NAME = b"sixteen bytes..."


def named(request: EngineRequest) -> EngineRequest:
    return replace(request, kv_name=NAME)


def handle(source: Engine, worker_id: str, tokens: int) -> KvHandle:
    layout = source.capabilities.kv_layout
    blocks = -(-tokens // BLOCK)
    return KvHandle(worker_id, 1, "", NAME, tokens, blocks, layout, streamed=True, named=True)


@on_our_core
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("size", [64, 75, 800])
@pytest.mark.parametrize("receiver", ["first", "last"])
async def test_a_sequence_continues_as_if_it_had_stayed(
    bench: EngineBench, sampling: SamplingParams, size: int, receiver: str
) -> None:
    """Whichever of the two workers gets its submit first, and with prompts of one step and of several."""
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=128)
    target, target_reader = await bench.start("decode")
    target.set_prefill_budget(0)
    prompt = LONG[:size]
    stayed = await complete(source, source_reader, sequence(prompt=prompt, sampling=sampling))
    begun = named(sequence(EnginePhase.PREFILL, prompt=prompt, sampling=sampling))
    moved = sequence(EnginePhase.DECODE, prompt=prompt, sampling=sampling, kv=handle(source, "prefill", size))
    if receiver == "first":
        target.submit(moved)
        await until(lambda: bench.fetcher.fetching == 1)
    source.submit(begun)
    first = await source_reader.ended(begun.sequence_id)
    if receiver == "last":
        target.submit(moved)
    log = await target_reader.ended(moved.sequence_id)
    assert first.streamed_handle is None  # its gateway knows the name
    assert first.token_ids + log.token_ids == stayed.token_ids
    assert log.end is not None and (log.pulled, log.end.computed_prompt_tokens) == (1, 0)
    await until(lambda: source.integrity() == target.integrity() == IDLE)


@on_our_core
async def test_tokens_that_arrive_before_the_named_blocks_are_not_awaited_again(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    stayed = await complete(source, source_reader, sequence())
    source.set_prefill_budget(0)
    begun = named(sequence(EnginePhase.PREFILL))
    source.submit(begun)
    moved = sequence(EnginePhase.DECODE, kv=handle(source, "prefill", len(begun.token_ids)))
    target.submit(moved)
    await until(lambda: bench.fetcher.fetching == 1)
    target.proceed(moved.sequence_id, stayed.token_ids[:1])
    source.set_prefill_budget(1024)
    first, log = await source_reader.ended(begun.sequence_id), await target_reader.ended(moved.sequence_id)
    assert first.token_ids + log.token_ids == stayed.token_ids
    await until(lambda: source.integrity() == target.integrity() == IDLE)


@on_our_core
async def test_a_transfer_begins_when_there_is_something_to_transfer(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    source.set_prefill_budget(0)
    begun = named(sequence(EnginePhase.PREFILL))
    moved = sequence(EnginePhase.DECODE, kv=handle(source, "prefill", len(begun.token_ids)))
    target.submit(moved)
    await until(lambda: bench.fetcher.fetching == 1)
    source.submit(begun)
    begins_ns = SystemClock().now_ns()
    source.set_prefill_budget(1024)
    await source_reader.ended(begun.sequence_id)
    await target_reader.ended(moved.sequence_id)
    (report,) = [each for event in target_reader.events for each in event.kv_transfers]
    assert report.named
    assert begins_ns <= report.start_unix_ns <= report.end_unix_ns
    await until(lambda: source.integrity() == target.integrity() == IDLE)


@on_our_core
async def test_a_name_in_use_is_refused(bench: EngineBench) -> None:
    source, _ = await bench.start("prefill")
    source.submit(named(sequence(EnginePhase.PREFILL)))
    with pytest.raises(InvalidRequest, match="kv_name"):
        source.submit(named(sequence(EnginePhase.PREFILL)))
    with pytest.raises(InvalidRequest, match="16 bytes"):
        source.submit(replace(sequence(EnginePhase.PREFILL), kv_name=b"short"))


@on_our_core
async def test_a_prompt_aborted_before_it_begins_ends_its_receiver_with_kv_lost(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    source.set_prefill_budget(0)
    begun = named(sequence(EnginePhase.PREFILL))
    source.submit(begun)
    moved = sequence(EnginePhase.DECODE, kv=handle(source, "prefill", len(begun.token_ids)))
    target.submit(moved)
    await until(lambda: bench.fetcher.fetching == 1)
    source.abort(begun.sequence_id)
    assert finish(await target_reader.ended(moved.sequence_id)) is FinishReason.KV_LOST
    assert finish(await source_reader.ended(begun.sequence_id)) is FinishReason.ABORTED
    assert source.integrity() == target.integrity() == IDLE


@on_our_core
async def test_a_prompt_that_never_comes_ends_its_receiver_with_kv_lost(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.engine.local.MAX_UNKNOWN_MS", 0)
    source, _ = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    moved = sequence(EnginePhase.DECODE, kv=handle(source, "prefill", 75))
    target.submit(moved)
    assert finish(await target_reader.ended(moved.sequence_id)) is FinishReason.KV_LOST
    assert target.integrity() == IDLE
