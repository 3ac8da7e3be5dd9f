"""Contract tests of the engine port. A new engine joins by one entry in `KINDS`."""

import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.contracts.hashing import block_hashes
from libs.engine.port import EnginePhase, Pooling, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.model.info import SIM_EOS
from libs.testing.engines.engine import EngineBench, SequenceLog
from libs.testing.wait import until
from tests.contract.engine.engine_rig import (
    GREEDY,
    IDLE,
    PROMPT,
    ROOT,
    SEEDED,
    complete,
    finish,
    on_our_core,
    prefill,
    sequence,
)

# ---------------------------------------------------------------- phases


async def test_a_sequence_runs_from_its_prompt_to_its_length(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    log = await complete(engine, reader, sequence(output=12))
    assert len(log.token_ids) == 12 and finish(log) is FinishReason.LENGTH
    assert log.end is not None
    assert (log.end.cached_tokens, log.end.computed_prompt_tokens, log.end.handle) == (0, len(PROMPT), None)
    await until(lambda: engine.integrity() == IDLE)


async def test_prefill_samples_one_token_and_holds_the_prompts_blocks(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    handle, first = await prefill(engine, reader)
    blocks = -(-len(PROMPT) // engine.capabilities.block_size_tokens)
    assert len(first) == (engine.capabilities.first_token_from == "prefill")
    assert (handle.worker_id, handle.tokens, handle.blocks) == ("one", len(PROMPT), blocks)
    assert engine.integrity() == EngineIntegrity(0, blocks, 1)
    engine.release(handle.opaque)
    engine.release(handle.opaque)
    await until(lambda: engine.integrity() == IDLE)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 75])
async def test_a_moved_sequence_goes_on_as_if_it_had_stayed(
    bench: EngineBench, sampling: SamplingParams, size: int
) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    target.set_prefill_budget(0)
    prompt = PROMPT[:size]
    stayed = await complete(source, source_reader, sequence(prompt=prompt, sampling=sampling))
    handle, first = await prefill(source, source_reader, prompt=prompt, sampling=sampling)
    request = sequence(EnginePhase.DECODE, prompt=prompt, generated=first, sampling=sampling, kv=handle)
    log = await complete(target, target_reader, request)
    assert first + log.token_ids == stayed.token_ids
    assert (log.pulled, finish(log)) == (1, FinishReason.LENGTH)
    data_bytes = handle.blocks * target.capabilities.kv_block_bytes
    assert log.end is not None and log.end.kv_bytes_received == data_bytes
    again = int(target.capabilities.first_token_from == "decode")
    assert log.end.computed_prompt_tokens == again
    (transfer,) = [transfer for event in target_reader.events for transfer in event.kv_transfers]
    assert (transfer.request_id, transfer.from_worker_id) == (request.request_id, "prefill")
    assert (transfer.blocks, transfer.data_bytes, transfer.prompt_tokens_computed) == (handle.blocks, data_bytes, again)
    assert transfer.shared is (bench.fetcher.maps is not None)
    assert 0 < transfer.start_unix_ns <= transfer.end_unix_ns
    # The last of several prompt tokens costs a step as much as a decode, and is reported as one.
    reported = again if size == 1 else 0
    ended = [each.step for each in target_reader.events if each.step and each.step.end_unix_ns]  # else only announced
    assert sum(step.prefill_tokens for step in ended) == reported
    await until(lambda: source.integrity() == target.integrity() == IDLE)


@on_our_core
async def test_a_missing_last_prompt_token_is_computed_even_with_budget_0(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    target.set_prefill_budget(0)
    stayed = await complete(source, source_reader, sequence())
    handle, _ = await prefill(source, source_reader)
    log = await complete(
        target, target_reader, sequence(EnginePhase.DECODE, kv=replace(handle, tokens=len(PROMPT) - 1))
    )
    assert log.token_ids == stayed.token_ids
    assert log.end is not None and log.end.computed_prompt_tokens == 1


async def test_a_sequence_resumed_from_its_tokens_goes_on_identically(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    sampling = SEEDED if engine.capabilities.seeds_by_position else GREEDY
    whole = (await complete(engine, reader, sequence(sampling=sampling))).token_ids
    log = await complete(engine, reader, sequence(sampling=sampling, generated=whole[:5]))
    assert log.token_ids == whole[5:]
    handle, first = await prefill(engine, reader, sampling=sampling, generated=whole[:5])
    moved = sequence(EnginePhase.DECODE, sampling=sampling, generated=whole[:5] + first, kv=handle)
    target, target_reader = await bench.start("two")
    assert first + (await complete(target, target_reader, moved)).token_ids == whole[5:]


@on_our_core
async def test_a_first_token_that_ends_the_sequence_leaves_no_handle(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    log = await complete(engine, reader, sequence(EnginePhase.PREFILL, output=1))
    assert (len(log.token_ids), finish(log)) == (1, FinishReason.LENGTH)
    stop = replace(GREEDY, stop_token_ids=frozenset(log.token_ids))
    stopped = await complete(engine, reader, sequence(EnginePhase.PREFILL, sampling=stop))
    assert (stopped.token_ids, finish(stopped)) == (log.token_ids, FinishReason.STOP)
    await until(lambda: engine.integrity() == IDLE)


@on_our_core
async def test_a_guided_sequence_follows_its_guide_and_ends_with_it(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    guide = 'start: "{" /[a-c]{3}/ "}"'
    guided = [sequence(sampling=SamplingParams(temperature=1.0, seed=seed, guide=guide)) for seed in range(4)]
    free = sequence(output=6)
    for request in (*guided, free):
        engine.submit(request)
    for request in guided:
        log = await reader.ended(request.sequence_id)
        *text, end = log.token_ids
        assert re.fullmatch(rb"\{[a-c]{3}\}", bytes(text))
        assert end in (SIM_EOS, SIM_EOS + 2) and finish(log) is FinishReason.STOP
    assert finish(await reader.ended(free.sequence_id)) is FinishReason.LENGTH


@on_our_core
async def test_tokens_that_violate_the_guide_end_only_their_own_sequence(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    other, lost = sequence(), sequence(generated=list(b"xy"), sampling=replace(GREEDY, guide='start: "{" /[a-c]{90}/'))
    engine.submit(other)
    engine.submit(lost)
    log = await reader.ended(lost.sequence_id)
    assert finish(log) is FinishReason.FAILED
    assert log.end is not None and "guide" in log.end.detail
    assert finish(await reader.ended(other.sequence_id)) is FinishReason.LENGTH
    await until(lambda: engine.integrity() == IDLE)


@on_our_core
@pytest.mark.parametrize("chunk", [7, 512])
async def test_prompt_logprobs_come_with_the_first_token_however_the_prompt_was_computed(
    bench: EngineBench, chunk: int
) -> None:
    engine, reader = await bench.start("one")
    engine.set_prefill_chunk(chunk)
    scoring = replace(GREEDY, logprobs=True, prompt_logprobs=True, prompt_top_logprobs=3)
    log = await complete(engine, reader, sequence(sampling=scoring, root=b""))
    first, *others = log.logprobs
    assert len(first.prompt) == len(PROMPT) - 1 and not any(other.prompt for other in others)
    for place, token in enumerate(first.prompt, 1):
        top = dict(token.top)
        assert len(top) == 3 and all(value <= 0 for value in top.values())
        assert top.get(int(PROMPT[place]), token.logprob) == token.logprob
    # A prompt's logprobs equal those of the same tokens in a longer prompt.
    shorter = await complete(engine, reader, sequence(prompt=PROMPT[:-1], sampling=scoring, root=b""))
    before = [token.logprob for token in shorter.logprobs[0].prompt]
    assert before == pytest.approx([token.logprob for token in first.prompt[:-1]], abs=1e-4)


@on_our_core
async def test_a_scored_prompt_of_one_token_has_no_prompt_logprobs(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    scoring = replace(GREEDY, logprobs=True, prompt_logprobs=True)
    log = await complete(engine, reader, sequence(prompt=PROMPT[:1], sampling=scoring, output=1, root=b""))
    assert log.logprobs[0].prompt == () and len(log.token_ids) == 1


def vector(log: SequenceLog) -> NDArray[np.float32]:
    assert log.end is not None
    return np.frombuffer(log.end.pooled, dtype="<f4")


@on_our_core
@pytest.mark.parametrize("phase", [EnginePhase.PREFILL, EnginePhase.BOTH])
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
async def test_a_pooled_prompt_ends_with_its_vector_and_frees_its_blocks(
    bench: EngineBench, phase: EnginePhase, pooling: Pooling
) -> None:
    engine, reader = await bench.start("one")
    pooled = replace(sequence(phase, output=1), pooling=pooling)
    plain = sequence()
    engine.submit(plain)
    log = await complete(engine, reader, pooled)
    assert (log.token_ids, finish(log)) == ([], FinishReason.STOP)
    assert log.end is not None and log.end.handle is None and log.streamed_handle is None
    assert np.linalg.norm(vector(log)) > 0
    assert log.end.computed_prompt_tokens == len(PROMPT)
    assert len((await reader.ended(plain.sequence_id)).token_ids) == 12
    await until(lambda: engine.integrity() == IDLE)


@on_our_core
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
async def test_a_vector_is_the_same_however_its_prompt_was_computed(bench: EngineBench, pooling: Pooling) -> None:
    engine, reader = await bench.start("one")
    root = ROOT if pooling is Pooling.LAST else b""
    whole = vector(await complete(engine, reader, replace(sequence(root=b"", output=1), pooling=pooling)))
    other = replace(sequence(prompt=PROMPT[::-1].copy(), output=1), pooling=pooling)
    assert not np.allclose(vector(await complete(engine, reader, other)), whole, atol=1e-3)
    engine.set_prefill_chunk(7)
    cached = 0
    for _ in range(2):  # the second time a prefix of it is cached, where it may be reused
        log = await complete(engine, reader, replace(sequence(root=root, output=1), pooling=pooling))
        assert vector(log) == pytest.approx(whole, abs=1e-4)
        assert log.end is not None
        cached = log.end.cached_tokens
    assert (cached > 0) is (pooling is Pooling.LAST)


async def test_an_engine_refuses_unsupported_pooling(bench: EngineBench) -> None:
    engine, _ = await bench.start("one")
    wrong = [replace(sequence(generated=[1, 2]), pooling=Pooling.LAST)]
    wrong.append(replace(sequence(root=ROOT), pooling=Pooling.MEAN))
    if not engine.capabilities.pools:
        wrong.append(replace(sequence(), pooling=Pooling.LAST))
    for request in wrong:
        with pytest.raises(InvalidRequest):
            engine.submit(request)


async def test_no_token_ends_a_sequence_before_min_tokens(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    free = (await complete(engine, reader, sequence())).token_ids
    stops = frozenset(free[:2])
    held = await complete(engine, reader, sequence(sampling=replace(GREEDY, stop_token_ids=stops, min_tokens=5)))
    assert not stops.intersection(held.token_ids[:5])
    assert len(held.token_ids) >= 6


async def test_a_stop_token_is_the_last_token(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    tokens = (await complete(engine, reader, sequence())).token_ids
    stop = tokens[6]
    log = await complete(engine, reader, sequence(sampling=replace(GREEDY, stop_token_ids=frozenset({stop}))))
    assert log.token_ids == tokens[: tokens.index(stop) + 1]
    assert finish(log) is FinishReason.STOP


async def test_a_sequence_ends_at_the_end_of_the_context(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    context = engine.capabilities.max_context_tokens
    prompt = np.resize(PROMPT, context - 3)
    log = await complete(engine, reader, sequence(prompt=prompt, output=50))
    assert (len(log.token_ids), finish(log)) == (3, FinishReason.LENGTH)


async def test_logprobs_come_with_each_token_on_request(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    log = await complete(engine, reader, sequence(sampling=replace(GREEDY, logprobs=True, top_logprobs=3)))
    assert len(log.logprobs) == len(log.token_ids)
    for token, logprob in zip(log.token_ids, log.logprobs, strict=True):
        assert logprob.top[0] == (token, logprob.logprob)
        assert [value for _, value in logprob.top] == sorted((value for _, value in logprob.top), reverse=True)
        assert len({other for other, _ in logprob.top}) == 3


# ---------------------------------------------------------------- batches, chunks, prefixes


async def test_neighbours_in_the_batch_and_chunk_size_do_not_change_tokens(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    sampling = SEEDED if engine.capabilities.seeds_by_position else GREEDY
    prompts = [np.roll(PROMPT, shift)[: 10 + 9 * shift] for shift in range(7)]
    alone = [
        (await complete(engine, reader, sequence(prompt=prompt, sampling=sampling))).token_ids for prompt in prompts
    ]
    engine.set_prefill_budget(13)
    before = len(reader.events)
    together = [sequence(prompt=prompt, sampling=sampling) for prompt in prompts]
    for request in together:
        engine.submit(request)
    assert [(await reader.ended(request.sequence_id)).token_ids for request in together] == alone
    assert max(event.step.prefill_tokens for event in reader.events[before:] if event.step) == 13
    await until(lambda: engine.integrity() == IDLE)


async def test_a_seed_gives_the_same_tokens_however_the_prompt_is_chunked(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    whole = await complete(engine, reader, sequence(sampling=SEEDED))
    engine.set_prefill_budget(13)
    cut = await complete(engine, reader, sequence(sampling=SEEDED))
    assert cut.token_ids == whole.token_ids and finish(cut) is FinishReason.LENGTH


async def test_a_repeated_prompt_is_served_from_cached_blocks(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    first = await complete(engine, reader, sequence(root=ROOT))
    again = await complete(engine, reader, sequence(root=ROOT))
    assert again.token_ids == first.token_ids
    assert again.end is not None
    assert (again.end.cached_tokens, again.end.computed_prompt_tokens) == (64, len(PROMPT) - 64)
    stored = [content for event in reader.events for content in event.blocks.stored]
    hashes = block_hashes(ROOT, PROMPT, engine.capabilities.block_size_tokens)
    assert stored[: len(hashes)] == hashes
    other = await complete(engine, reader, sequence(root=b"another tenant"))
    assert other.end is not None and other.end.cached_tokens == 0


async def test_the_last_block_of_a_fully_cached_prompt_is_computed_again(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    first = await complete(engine, reader, sequence(root=ROOT, prompt=PROMPT[:64]))
    again = await complete(engine, reader, sequence(root=ROOT, prompt=PROMPT[:64]))
    assert again.end is not None and again.end.cached_tokens == 64 - engine.capabilities.block_size_tokens
    assert again.token_ids == first.token_ids


async def test_with_budget_0_prompts_wait(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    engine.set_prefill_budget(0)
    request = sequence()
    engine.submit(request)
    other = sequence(output=2)
    engine.submit(other)
    engine.abort(other.sequence_id)
    assert finish(await reader.ended(other.sequence_id)) is FinishReason.ABORTED
    assert not any(event.step for event in reader.events)
    engine.set_prefill_budget(100)
    assert finish(await reader.ended(request.sequence_id)) is FinishReason.LENGTH


async def test_a_sequence_that_can_never_run_is_refused(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    context = engine.capabilities.max_context_tokens
    handle, first = await prefill(engine, reader)
    impossible = [
        sequence(prompt=PROMPT[:0]),
        sequence(prompt=np.resize(PROMPT, context)),
        sequence(output=0),
        sequence(prompt=np.array([engine.capabilities.vocab_size], dtype=np.int32)),
        sequence(prompt=np.array([-1], dtype=np.int32)),
        sequence(EnginePhase.DECODE, generated=first),
        sequence(EnginePhase.BOTH, generated=first, kv=handle),
        sequence(EnginePhase.DECODE, generated=first, kv=replace(handle, tokens=len(PROMPT) - 2)),
        sequence(EnginePhase.DECODE, generated=first, kv=replace(handle, blocks=engine.capabilities.kv_blocks + 1)),
    ]
    for request in impossible:
        with pytest.raises(InvalidRequest):
            engine.submit(request)
    engine.release(handle.opaque)
    await until(lambda: engine.integrity() == IDLE)


async def test_the_queue_is_bounded(bench: EngineBench) -> None:
    engine, _ = await bench.start("one", max_sequences=1, max_waiting=2)
    engine.set_prefill_budget(0)
    for _ in range(3):
        engine.submit(sequence())
    with pytest.raises(QueueFull):
        engine.submit(sequence())
