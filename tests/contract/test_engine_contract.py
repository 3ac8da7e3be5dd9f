"""What every engine does behind the port. A new engine joins by one entry in `KINDS`."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest, KvLost, KvMismatch, QueueFull
from libs.contracts.hashing import block_hashes
from libs.engine.config import EngineConfig
from libs.engine.factory import make_engine
from libs.engine.kv.pool_file import PREFIX
from libs.engine.kv_port import KvHandle
from libs.engine.port import Engine, EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.engine.vllm.engine import VllmEngine
from libs.model.builtin import SIM_EOS, sim_tokenizer
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EngineBench, EventReader, SequenceLog, exported
from libs.testing.engines.vllm_core import SharedCore
from libs.testing.wait import until

BLOCK = 16
PROMPT: NDArray[np.int32] = (np.arange(75, dtype=np.int32) * 7) % 250
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=11, ignore_eos=True)
ROOT = b"weights, dtype, tenant"
IDLE = EngineIntegrity(0, 0, 0)
Make = Callable[..., Engine]


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    pytest.importorskip("torch")
    from libs.testing.engines.real_model import write_random_llama

    # 32 a head: vLLM's attention takes no smaller ones.
    folder = write_random_llama(tmp_path_factory.mktemp("model") / "llama", hidden_size=128, eos_token_id=257)
    sim_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def sim_make() -> Make:
    """The built-in model on a device so fast that a test is short, and slow enough to be caught at work."""
    base = EngineConfig(None, "contract", block_size_tokens=BLOCK, sim_speedup=20.0)
    return lambda **changes: make_engine("sim", replace(base, **changes), SystemClock())


@pytest.fixture
def torch_make(random_llama: Path, pytestconfig: pytest.Config) -> Make:
    """Real attention over real blocks, in float32: bfloat16 rounds so coarsely that company changes near ties."""
    device = pytestconfig.getoption("device")
    base = EngineConfig(
        random_llama,
        "contract",
        device=device,
        dtype="float32",
        threads=1,
        block_size_tokens=BLOCK,
        kv_memory_mb=4,
        max_sequences=16,
    )
    return lambda **changes: make_engine("torch", replace(base, **changes), SystemClock())


@pytest.fixture
def torch_shared_make(torch_make: Make, tmp_path: Path) -> Make:
    """The same, with pools that engines read in one another's files."""
    return partial(torch_make, kv_shared_dir=tmp_path)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_cores(random_llama: Path) -> AsyncIterator[tuple[SharedCore, ...]]:
    """Two EngineCores for all tests: no test needs more engines, and each would take many seconds to start."""
    cores = tuple(SharedCore(_vllm_config(random_llama)) for _ in range(2))
    yield cores
    await asyncio.gather(*(core.end() for core in cores))


@pytest.fixture
def vllm_make(vllm_cores: tuple[SharedCore, ...], random_llama: Path) -> Make:
    """vLLM on the CPU, over NIXL."""
    free = iter(vllm_cores)
    return lambda **changes: VllmEngine(replace(_vllm_config(random_llama), **changes), SystemClock(), next(free))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_async_cores(random_llama: Path) -> AsyncIterator[tuple[SharedCore, ...]]:
    """The same two, which decide a step while the one before runs."""
    from libs.engine.vllm.starting import launch
    from libs.testing.engines.async_executor import configured_asynchronously

    cores = tuple(SharedCore(_vllm_config(random_llama)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "configured", configured_asynchronously)
        for core in cores:
            await core.start(_vllm_config(random_llama), EngineIdentity("shared", 1, "127.0.0.1:1"), lambda *_: None)
    yield cores
    await asyncio.gather(*(core.end() for core in cores))


@pytest.fixture
def vllm_async_make(vllm_async_cores: tuple[SharedCore, ...], random_llama: Path) -> Make:
    """vLLM with asynchronous scheduling, as on GPUs, over NIXL."""
    free = iter(vllm_async_cores)
    return lambda **changes: VllmEngine(replace(_vllm_config(random_llama), **changes), SystemClock(), next(free))


def _vllm_config(model: Path) -> EngineConfig:
    return EngineConfig(model, "contract", threads=1, block_size_tokens=32, kv_memory_mb=16, max_sequences=16)


CORE_KINDS = ("sim", *(pytest.param(kind, marks=pytest.mark.torch) for kind in ("torch", "torch_shared")))
VLLM_KINDS = tuple(pytest.param(kind, marks=pytest.mark.vllm) for kind in ("vllm", "vllm_async"))
KINDS = (*CORE_KINDS, *VLLM_KINDS)
on_our_core = pytest.mark.parametrize("kind", CORE_KINDS, indirect=True)
"""What others' capabilities leave out, or what a test brings about through our own fetcher or our own core."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of engine."""
    return str(request.param)


@pytest.fixture
def make(kind: str, request: pytest.FixtureRequest) -> Make:
    """Makes engines of this kind."""
    return request.getfixturevalue(f"{kind}_make")


@pytest.fixture
async def bench(kind: str, make: Make, tmp_path: Path) -> AsyncIterator[EngineBench]:
    """Engines of each kind in turn."""
    bench = EngineBench(make, tmp_path if kind == "torch_shared" else None)
    yield bench
    bench.fetcher.gate.set()
    await bench.close()
    assert not list(tmp_path.glob(f"{PREFIX}*"))


ids = itertools.count(1 << 60, -(1 << 32) - 1)
"""Of sequences: large and falling, since an engine is to read nothing from them."""


def sequence(
    phase: EnginePhase = EnginePhase.BOTH,
    *,
    prompt: NDArray[np.int32] = PROMPT,
    generated: list[int] | None = None,
    output: int = 12,
    sampling: SamplingParams = GREEDY,
    root: bytes = b"",
    kv: KvHandle | None = None,
) -> EngineRequest:
    sequence_id = next(ids)
    token_ids = np.concatenate([prompt, np.array(generated or [], dtype=np.int32)])
    return EngineRequest(
        sequence_id, f"request-{sequence_id}", phase, token_ids, len(prompt), output, sampling, root, kv
    )


async def complete(engine: Engine, reader: EventReader, request: EngineRequest) -> SequenceLog:
    engine.submit(request)
    return await reader.ended(request.sequence_id)


async def prefill(engine: Engine, reader: EventReader, **request: object) -> tuple[KvHandle, list[int]]:
    """A handle under a lease, and the first token."""
    log = await complete(engine, reader, sequence(EnginePhase.PREFILL, **request))  # type: ignore[arg-type]
    assert log.end is not None and log.end.finish is FinishReason.PREFILLED and log.end.handle is not None
    return log.end.handle, log.token_ids


def finish(log: SequenceLog) -> FinishReason | None:
    assert log.end is not None
    return log.end.finish


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
    # The last of several prompt tokens costs a step what a decode does, and is told as one.
    told = again if size == 1 else 0
    assert sum(event.step.prefill_tokens for event in target_reader.events if event.step) == told
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
async def test_a_guided_sequence_keeps_to_its_guide_and_ends_with_it(bench: EngineBench) -> None:
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
async def test_tokens_that_do_not_fit_their_guide_end_their_sequence_alone(bench: EngineBench) -> None:
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
async def test_a_prompts_logprobs_come_with_the_first_token_however_it_was_computed(
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
    # What follows a prompt is what the same tokens have in a longer one.
    shorter = await complete(engine, reader, sequence(prompt=PROMPT[:-1], sampling=scoring, root=b""))
    before = [token.logprob for token in shorter.logprobs[0].prompt]
    assert before == pytest.approx([token.logprob for token in first.prompt[:-1]], abs=1e-4)


@on_our_core
async def test_a_scored_prompt_of_one_token_has_nothing_before_it(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    scoring = replace(GREEDY, logprobs=True, prompt_logprobs=True)
    log = await complete(engine, reader, sequence(prompt=PROMPT[:1], sampling=scoring, output=1, root=b""))
    assert log.logprobs[0].prompt == () and len(log.token_ids) == 1


async def test_no_token_ends_a_sequence_before_it_has_its_minimum(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    free = (await complete(engine, reader, sequence())).token_ids
    stops = frozenset(free[:2])
    held = await complete(engine, reader, sequence(sampling=replace(GREEDY, stop_token_ids=stops, min_tokens=5)))
    assert not stops.intersection(held.token_ids[:5])
    assert len(held.token_ids) >= 6


async def test_a_stop_token_is_the_last_one(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    tokens = (await complete(engine, reader, sequence())).token_ids
    stop = tokens[6]
    log = await complete(engine, reader, sequence(sampling=replace(GREEDY, stop_token_ids=frozenset({stop}))))
    assert log.token_ids == tokens[: tokens.index(stop) + 1]
    assert finish(log) is FinishReason.STOP


async def test_the_end_of_the_context_ends_a_sequence(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    context = engine.capabilities.max_context_tokens
    prompt = np.resize(PROMPT, context - 3)
    log = await complete(engine, reader, sequence(prompt=prompt, output=50))
    assert (len(log.token_ids), finish(log)) == (3, FinishReason.LENGTH)


async def test_logprobs_come_with_each_token_when_asked_for(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    log = await complete(engine, reader, sequence(sampling=replace(GREEDY, logprobs=True, top_logprobs=3)))
    assert len(log.logprobs) == len(log.token_ids)
    for token, logprob in zip(log.token_ids, log.logprobs, strict=True):
        assert logprob.top[0] == (token, logprob.logprob)
        assert [value for _, value in logprob.top] == sorted((value for _, value in logprob.top), reverse=True)
        assert len({other for other, _ in logprob.top}) == 3


# ---------------------------------------------------------------- hand-off while the prompt is computed

LONG = np.resize(PROMPT, 800)


async def opened(reader: EventReader, sequence_id: int) -> KvHandle:
    await reader.until(lambda: reader.log(sequence_id).opened is not None)
    handle = reader.log(sequence_id).opened
    assert handle is not None and handle.streamed
    return handle


@on_our_core
async def test_blocks_come_while_their_prompt_is_computed(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", prefill_chunk_tokens=64)
    request = sequence(EnginePhase.PREFILL, prompt=LONG)
    engine.submit(request)
    handle = await opened(reader, request.sequence_id)
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
async def test_a_streamed_sequence_goes_on_as_if_it_had_stayed(
    bench: EngineBench, sampling: SamplingParams, size: int
) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=64)
    target, target_reader = await bench.start("decode")
    target.set_prefill_budget(0)
    prompt = LONG[:size]
    stayed = await complete(source, source_reader, sequence(prompt=prompt, sampling=sampling))
    begun = sequence(EnginePhase.PREFILL, prompt=prompt, sampling=sampling)
    source.submit(begun)
    handle = await opened(source_reader, begun.sequence_id)
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
async def test_a_prompt_that_one_step_computes_is_not_opened(bench: EngineBench) -> None:
    """Its blocks are ready when it is: there is nothing to stream."""
    engine, reader = await bench.start("prefill", prefill_chunk_tokens=64)
    request = sequence(EnginePhase.PREFILL, prompt=LONG[:64])
    engine.submit(request)
    log = await reader.ended(request.sequence_id)
    assert (finish(log), log.opened) == (FinishReason.PREFILLED, None)


@on_our_core
async def test_tokens_that_come_before_the_blocks_wait_for_them(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=16)
    target, target_reader = await bench.start("decode")
    stayed = await complete(source, source_reader, sequence())
    bench.fetcher.gate.clear()
    begun = sequence(EnginePhase.PREFILL)
    source.submit(begun)
    moved = sequence(EnginePhase.DECODE, kv=await opened(source_reader, begun.sequence_id))
    target.submit(moved)
    first = (await source_reader.ended(begun.sequence_id)).token_ids
    with pytest.raises(InvalidRequest):
        target.proceed(moved.sequence_id, (-1,) if target.capabilities.vocab_size else (1,) * 20)
    target.proceed(moved.sequence_id, tuple(first))
    target.proceed(10**9, (1,))
    bench.fetcher.gate.set()
    assert first + (await target_reader.ended(moved.sequence_id)).token_ids == stayed.token_ids


@on_our_core
async def test_blocks_found_cached_are_sent_before_any_step_ends(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", prefill_chunk_tokens=16)
    await complete(engine, reader, sequence(EnginePhase.BOTH, prompt=LONG[:640], root=ROOT, output=1))
    request = sequence(EnginePhase.PREFILL, prompt=LONG, root=ROOT)
    engine.submit(request)
    handle = await opened(reader, request.sequence_id)
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
async def test_a_prompt_that_leaves_no_blocks_ends_its_receiver_as_kv_lost(bench: EngineBench, ended: str) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=16)
    target, target_reader = await bench.start("decode")
    begun = sequence(EnginePhase.PREFILL, prompt=LONG, output=1 if ended == "by its first token" else 12)
    source.submit(begun)
    moved = sequence(EnginePhase.DECODE, prompt=LONG, kv=await opened(source_reader, begun.sequence_id))
    target.submit(moved)
    await until(lambda: bench.fetcher.fetching == 1)
    if ended == "aborted":
        source.abort(begun.sequence_id)
    assert finish(await target_reader.ended(moved.sequence_id)) is FinishReason.KV_LOST
    assert finish(await source_reader.ended(begun.sequence_id)) in (FinishReason.ABORTED, FinishReason.LENGTH)
    assert source.integrity() == target.integrity() == IDLE


@on_our_core
async def test_blocks_of_a_receiver_that_left_wait_out_their_lease(bench: EngineBench) -> None:
    source, source_reader = await bench.start("prefill", prefill_chunk_tokens=16, kv_lease_ms=50)
    target, target_reader = await bench.start("decode")
    begun = sequence(EnginePhase.PREFILL, prompt=LONG)
    source.submit(begun)
    moved = sequence(EnginePhase.DECODE, prompt=LONG, kv=await opened(source_reader, begun.sequence_id))
    target.submit(moved)
    await until(lambda: bench.fetcher.fetching == 1)
    target.abort(moved.sequence_id)
    assert finish(await target_reader.ended(moved.sequence_id)) is FinishReason.ABORTED
    assert finish(await source_reader.ended(begun.sequence_id)) is FinishReason.PREFILLED
    await until(lambda: source.integrity() == IDLE)
    assert target.integrity() == IDLE


# ---------------------------------------------------------------- running sequences that leave

PENALISED = replace(
    SEEDED, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=True, top_logprobs=2
)
GUIDED = replace(SEEDED, logprobs=True, guide="start: /[a-z ]{200}/")


async def moved(engine: Engine, reader: EventReader, request: EngineRequest, after_tokens: int) -> SequenceLog:
    """Start a sequence and hand it over once it has so many tokens; what it brought before it left."""
    engine.submit(request)
    await reader.tokens(request.sequence_id, after_tokens)
    engine.hand_over(request.sequence_id)
    return await reader.ended(request.sequence_id)


def left_with(log: SequenceLog) -> KvHandle:
    assert log.end is not None and log.end.finish is FinishReason.MOVED and log.end.handle is not None
    return log.end.handle


@on_our_core
@pytest.mark.parametrize("sampling", [GREEDY, PENALISED, GUIDED], ids=["greedy", "penalised", "guided"])
@pytest.mark.parametrize("size", [1, 16, 75])
async def test_a_running_sequence_moves_twice_and_goes_on_as_if_it_had_stayed(
    bench: EngineBench, sampling: SamplingParams, size: int
) -> None:
    one, one_reader = await bench.start("one")
    two, two_reader = await bench.start("two")
    two.set_prefill_budget(0)
    assert one.capabilities.moves_running_kv
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
async def test_sequences_beside_one_that_leaves_do_not_notice(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    alone = await complete(engine, reader, sequence(output=60))
    staying = sequence(output=60)
    engine.submit(staying)
    left_with(await moved(engine, reader, sequence(sampling=SEEDED, output=60), 3))
    assert (await reader.ended(staying.sequence_id)).token_ids == alone.token_ids


@on_our_core
async def test_a_prompt_that_is_told_to_leave_does_so_with_its_first_token(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", prefill_chunk_tokens=64)
    request = sequence(prompt=LONG)
    engine.submit(request)
    engine.hand_over(request.sequence_id)
    log = await reader.ended(request.sequence_id)
    assert len(log.token_ids) == 1 and left_with(log).tokens == len(LONG)


async def test_nothing_else_leaves(bench: EngineBench) -> None:
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
async def test_a_sequence_that_nobody_takes_over_costs_no_more_than_its_lease(bench: EngineBench) -> None:
    engine, reader = await bench.start("one", kv_lease_ms=50)
    handle = left_with(await moved(engine, reader, sequence(output=200), 3))
    await until(lambda: engine.integrity() == IDLE)
    target, target_reader = await bench.start("two")
    request = sequence(EnginePhase.DECODE, generated=[1] * (handle.tokens + 1 - len(PROMPT)), output=200, kv=handle)
    assert finish(await complete(target, target_reader, request)) is FinishReason.KV_LOST


# ---------------------------------------------------------------- blocks that the receiver has already


def blocks_received(reader: EventReader) -> list[int]:
    return [transfer.blocks for event in reader.events for transfer in event.kv_transfers]


@on_our_core
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("size", "rest"), [(64, 0), (75, 1), (800, 0)])
async def test_of_a_prompt_seen_before_only_the_last_blocks_are_pulled(
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
                EnginePhase.DECODE, prompt=prompt, root=ROOT, kv=await opened(source_reader, begun.sequence_id)
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
    # Of a streamed prompt of whole blocks the last one is pulled too: its first token is not known yet.
    assert blocks_received(target_reader) == [whole, rest or int(streamed)]


@on_our_core
async def test_blocks_of_an_aborted_pull_stay_for_the_next(bench: EngineBench) -> None:
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


# ---------------------------------------------------------------- batches, chunks, prefixes


async def test_company_and_chunk_size_do_not_change_tokens(bench: EngineBench) -> None:
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


async def test_a_seed_gives_the_same_tokens_however_its_prompt_is_cut(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    whole = await complete(engine, reader, sequence(sampling=SEEDED))
    engine.set_prefill_budget(13)
    cut = await complete(engine, reader, sequence(sampling=SEEDED))
    assert cut.token_ids == whole.token_ids and finish(cut) is FinishReason.LENGTH


async def test_a_prompt_seen_before_is_served_from_its_blocks(bench: EngineBench) -> None:
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


async def test_of_a_fully_known_prompt_the_last_block_is_computed_again(bench: EngineBench) -> None:
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


# ---------------------------------------------------------------- ends before the end


@on_our_core
async def test_abort_in_any_state_frees_everything(bench: EngineBench) -> None:
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


async def test_abort_of_a_prefilled_sequence_ends_its_lease(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    request = sequence(EnginePhase.PREFILL)
    assert finish(await complete(engine, reader, request)) is FinishReason.PREFILLED
    engine.abort(request.sequence_id)
    await until(lambda: engine.integrity() == IDLE)


@on_our_core
async def test_a_lease_ends_by_itself(bench: EngineBench) -> None:
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
async def test_export_goes_on_from_any_block_in_bounded_chunks(bench: EngineBench) -> None:
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


async def test_what_can_never_run_is_refused(bench: EngineBench) -> None:
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


# ---------------------------------------------------------------- events and life


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


async def test_another_consumer_goes_on_where_a_cancelled_one_stopped(bench: EngineBench) -> None:
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


async def test_an_idle_engine_has_nothing_open(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    await complete(engine, reader, sequence(root=ROOT))
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_prefill_tokens, load.awaiting_kv) == (0, 0, 0, 0)
    assert load.free_kv_blocks == engine.capabilities.kv_blocks
    assert (load.kv_wait_since_unix_ns, load.reported_to_unix_ns) == (0, 0)


async def test_a_measured_step_is_told_and_leaves_nothing_behind(bench: EngineBench) -> None:
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


# ---------------------------------------------------------------- sleep


@on_our_core
async def test_an_engine_that_slept_says_what_it_said_before_and_knows_no_handle_of_then(bench: EngineBench) -> None:
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


@on_our_core
async def test_sleep_aborts_what_runs_and_a_sleeping_engine_can_be_closed(bench: EngineBench) -> None:
    engine, reader = await bench.start("one")
    request = sequence(output=500)
    engine.submit(request)
    await reader.tokens(request.sequence_id, 1)
    await engine.sleep()
    await reader.finished()
    assert finish(reader.log(request.sequence_id)) is FinishReason.ABORTED
    await engine.close()
    await engine.close()
