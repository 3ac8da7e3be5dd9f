"""Contract tests of an engine's events, measured steps, sleep and shutdown."""

import asyncio
import itertools

import pytest

from libs.contracts.errors import KvLost
from libs.engine.port import EnginePhase
from libs.engine.reports import FinishReason
from libs.testing.engines.engine import EngineBench, EventReader
from libs.testing.wait import until
from tests.contract.engine.engine_rig import (
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


@on_our_core
async def test_steps_are_in_order_and_never_during_a_kv_wait(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    before = await prefill(source, source_reader)
    bench.fetcher.gate.clear()
    request = sequence(EnginePhase.DECODE, generated=before[1], kv=before[0])
    target.submit(request)
    await until(lambda: bench.fetcher.fetching == 1)
    assert target.load().kv_wait_since_unix_ns > 0
    assert finish(await complete(target, target_reader, sequence())) is FinishReason.LENGTH
    bench.fetcher.gate.set()
    await target_reader.ended(request.sequence_id)
    steps = [
        (event.step.start_unix_ns, event.step.end_unix_ns)
        for event in target_reader.events
        if event.step and event.step.end_unix_ns
    ]
    waits = [wait for event in target_reader.events for wait in event.kv_waits]
    assert waits and all(start < end for start, end in waits)
    spans = sorted(steps + waits)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert target.load().kv_wait_since_unix_ns == 0


async def test_a_new_consumer_resumes_where_a_cancelled_one_stopped(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    request = sequence(output=200)
    engine.submit(request)
    await reader.tokens(request.sequence_id, 5)
    await reader.close()
    read = list(reader.log(request.sequence_id).token_ids)
    later = EventReader(engine)
    rest = await later.ended(request.sequence_id)
    assert len(read) + len(rest.token_ids) == 200 and finish(rest) is FinishReason.LENGTH
    await later.close()


async def test_closing_a_busy_engine_aborts_and_ends_the_events(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", max_sequences=2)
    requests = [sequence(output=engine.capabilities.max_context_tokens) for _ in range(4)]
    for request in requests:
        engine.submit(request)
    await reader.tokens(requests[0].sequence_id, 2)
    await asyncio.gather(engine.close(), engine.close())
    for request in requests:
        assert finish(await reader.ended(request.sequence_id)) is FinishReason.ABORTED
    await reader.finished()
    await until(lambda: engine.integrity() == IDLE)


async def test_an_idle_engine_has_no_open_work(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    await complete(engine, reader, sequence(root=ROOT))
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_prefill_tokens, load.awaiting_kv) == (0, 0, 0, 0)
    assert load.free_kv_blocks == engine.capabilities.kv_blocks
    assert (load.kv_wait_since_unix_ns, load.reported_to_unix_ns) == (0, 0)


async def test_a_measured_step_is_reported_and_leaves_no_state_behind(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    duration_ns = await engine.measure_prefill(40)
    assert duration_ns is not None and duration_ns > 0
    await reader.until(lambda: any(event.step and event.step.prefill_tokens == 40 for event in reader.events))
    await until(lambda: engine.integrity() == IDLE)
    assert await engine.measure_prefill(10**8) is None, "there is no room for it"


async def test_a_chunk_bounds_steps_whatever_the_budget(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", prefill_chunk_tokens=64)
    engine.set_prefill_budget(1 << 30)
    engine.set_prefill_chunk(32)
    request = sequence(EnginePhase.BOTH, prompt=LONG[:100], output=1)
    engine.submit(request)
    await reader.ended(request.sequence_id)
    sizes = [event.step.prefill_tokens for event in reader.events if event.step and event.step.end_unix_ns]
    assert sizes == [32, 32, 32, 4]


async def test_an_engine_that_slept_repeats_its_tokens_and_rejects_older_handles(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    assert engine.capabilities.sleeps
    before = [await complete(engine, reader, sequence(sampling=sampling)) for sampling in (GREEDY, SEEDED)]
    handle, _ = await prefill(engine, reader)
    for incarnation in (2, 3):
        await engine.sleep()
        await engine.sleep()
        await reader.finished()
        reader = await bench.woken("one", incarnation)
        after = [await complete(engine, reader, sequence(sampling=sampling)) for sampling in (GREEDY, SEEDED)]
        assert [log.token_ids for log in after] == [log.token_ids for log in before]
    with pytest.raises(KvLost):
        engine.export(handle.opaque, engine.capabilities.kv_layout, 0, news=lambda: None)
    await until(lambda: engine.integrity() == IDLE)


async def test_an_engine_that_slept_reuses_no_older_prefix(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    await complete(engine, reader, sequence(prompt=LONG[:100], root=ROOT))
    assert (await complete(engine, reader, sequence(prompt=LONG[:100], root=ROOT))).end.cached_tokens > 0
    await engine.sleep()
    reader = await bench.woken("one", 2)
    assert (await complete(engine, reader, sequence(prompt=LONG[:100], root=ROOT))).end.cached_tokens == 0


async def test_an_engine_that_drops_its_weights_in_sleep_repeats_its_tokens(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    if not engine.capabilities.drops_weights:
        pytest.skip("it keeps them")
    before = [await complete(engine, reader, sequence(sampling=sampling)) for sampling in (GREEDY, SEEDED)]
    await engine.sleep(keep_weights=False)
    await reader.finished()
    reader = await bench.woken("one", 2)
    after = [await complete(engine, reader, sequence(sampling=sampling)) for sampling in (GREEDY, SEEDED)]
    assert [log.token_ids for log in after] == [log.token_ids for log in before]


async def test_sleep_aborts_running_sequences_and_a_sleeping_engine_can_be_closed(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    request = sequence(output=500)
    engine.submit(request)
    await reader.tokens(request.sequence_id, 1)
    await engine.sleep()
    await reader.finished()
    assert finish(reader.log(request.sequence_id)) is FinishReason.ABORTED
    await engine.close()
    await engine.close()
