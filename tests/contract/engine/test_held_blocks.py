"""Contract tests of blocks held for a receiver: leases, aborts, losses and exports."""

from dataclasses import replace

import numpy as np
import pytest

from libs.contracts.errors import KvLost, KvMismatch
from libs.engine.port import EnginePhase
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.testing.engines.engine import EngineBench, exported
from libs.testing.wait import until
from tests.contract.engine.engine_rig import (
    IDLE,
    PROMPT,
    complete,
    finish,
    on_our_core,
    prefill,
    sequence,
)


@on_our_core
async def test_an_abort_in_any_state_frees_everything(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", max_sequences=2)
    handle, first = await prefill(engine, reader)
    bench.fetcher.gate.clear()
    long = engine.capabilities.max_context_tokens
    running, fetching = sequence(output=long), sequence(EnginePhase.DECODE, generated=first, output=long, kv=handle)
    queued = sequence()
    for request in (running, fetching, queued):
        engine.submit(request)
    await reader.tokens(running.sequence_id, 3)
    await until(lambda: bench.fetcher.fetching == 1)
    assert (engine.load().running, engine.load().awaiting_kv, engine.load().waiting) == (1, 1, 1)
    engine.abort(10**9)
    for request in (queued, fetching, running):
        engine.abort(request.sequence_id)
        assert finish(await reader.ended(request.sequence_id)) is FinishReason.ABORTED
    await until(lambda: bench.fetcher.fetching == 0)
    assert engine.integrity() == EngineIntegrity(0, handle.blocks, 1)  # the sender's lease lives on
    engine.release(handle.opaque)
    await until(lambda: engine.integrity() == IDLE)


async def test_an_abort_of_a_prefilled_sequence_ends_its_lease(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    request = sequence(EnginePhase.PREFILL)
    assert finish(await complete(engine, reader, request)) is FinishReason.PREFILLED
    engine.abort(request.sequence_id)
    await until(lambda: engine.integrity() == IDLE)


@on_our_core
async def test_a_lease_expires_without_a_call(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", kv_lease_ms=50)
    handle, _ = await prefill(engine, reader)
    await until(lambda: engine.integrity() == IDLE)
    with pytest.raises(KvLost):
        await anext(aiter(exported(engine, handle.opaque, engine.capabilities.kv_layout)))


@on_our_core
@pytest.mark.parametrize("loss", ["released", "gone", "half-way", "more blocks than said"])
async def test_lost_kv_ends_a_sequence_as_kv_lost(bench: EngineBench, loss: str) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    prompt = np.resize(PROMPT, 800)
    handle, first = await prefill(source, source_reader, prompt=prompt)
    if loss == "released":
        source.release(handle.opaque)
    lost = replace(handle, worker_id="nobody") if loss == "gone" else handle
    if loss == "more blocks than said":
        lost = replace(handle, blocks=handle.blocks - 1)
    bench.fetcher.dies = loss == "half-way"
    log = await complete(
        target, target_reader, sequence(EnginePhase.DECODE, prompt=prompt, generated=first, kv=lost, output=20)
    )
    assert (finish(log), log.token_ids, log.pulled) == (FinishReason.KV_LOST, [], 1)
    assert log.end is not None and log.end.detail
    assert target.integrity() == IDLE
    source.release(handle.opaque)


@on_our_core
async def test_blocks_of_another_layout_are_refused(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode", block_size_tokens=32)
    handle, first = await prefill(source, source_reader)
    with pytest.raises(KvMismatch):
        await anext(aiter(exported(source, handle.opaque, target.capabilities.kv_layout)))
    assert handle.kv_layout == source.capabilities.kv_layout != target.capabilities.kv_layout
    log = await complete(target, target_reader, sequence(EnginePhase.DECODE, generated=first, kv=handle))
    assert finish(log) is FinishReason.FAILED
    assert log.end is not None and log.end.detail.startswith("kv_mismatch")
    source.release(handle.opaque)


@on_our_core
async def test_an_export_resumes_from_any_block_in_bounded_chunks(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    handle, _ = await prefill(engine, reader, prompt=np.resize(PROMPT, 500))
    layout = engine.capabilities.kv_layout
    chunks = [chunk async for chunk in exported(engine, handle.opaque, layout, 2)]
    assert chunks[0].first_block == 2 and sum(chunk.blocks for chunk in chunks) == handle.blocks - 2
    assert all(chunk.data_bytes == chunk.blocks * engine.capabilities.kv_block_bytes for chunk in chunks)
    assert all(sum(map(len, chunk.data)) in (0, chunk.data_bytes) for chunk in chunks)
    assert all(len(chunk.pool_blocks) == chunk.blocks for chunk in chunks)
    assert all(len(chunk.checksums) == len(chunk.data) for chunk in chunks)
    assert all(chunk.blocks == 1 or sum(map(len, chunk.data)) <= 1024 * 1024 for chunk in chunks)
    engine.release(handle.opaque)
