"""Tests that the torch engine's tokens equal transformers' `generate`, wherever and beside whatever a sequence runs.

A part of the prompts runs by default; `make test-exact` runs all 60, of 1 to 1,500 tokens, and shows how far it is.

The reference is `generate` on one prompt at a time, in float32 on the same CPU. Sums in float32 depend on how a product
is cut, so logits of a batch differ from it in the sixth digit: were two tokens nearer to each other than that, either
would be right, and the test would name the prompt. None of these prompts has such a tie.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from libs.engine.config import EngineConfig
from libs.engine.local import LocalEngine, make_engine
from libs.engine.port import Engine, EnginePhase, EngineRequest, SamplingParams
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EngineBench, EventReader, SequenceLog
from libs.testing.engines.real_model import real_model_folder

pytestmark = [pytest.mark.alone, pytest.mark.torch, pytest.mark.timeout(1800)]

OUTPUT_TOKENS = 8
PROMPTS, LONGEST, FAST_STRIDE = 60, 1500, 12
GROUP, TINY_BLOCK, TOKENS_PER_MB = 8, 2, 22
"""For preemption: so many sequences at once, in blocks so small that they are outgrown; KV of the model in a MB."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    seed=7,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logprobs=True,
    top_logprobs=2,
    ignore_eos=True,
)
TEXT = (
    "In the mountains the snow melts late. A river of {n} miles runs south past mills and orchards to the sea, and in "
    "the year {y} the people of the valley built a bridge. def bridge(length): return [length // {n}, 'stone'] "
)
Tokens = NDArray[np.int32]
keys = itertools.count(1)


@dataclass
class Case:
    """Prompts, and the output of `generate` for them."""

    prompts: list[Tokens]
    greedy: list[list[int]]


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model_folder()


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.exact)])
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    lengths = [max(n + 1, round(length)) for n, length in enumerate(np.geomspace(1, LONGEST, PROMPTS))]
    some = range(PROMPTS) if request.param == "all" else range(FAST_STRIDE - 1, PROMPTS, FAST_STRIDE)
    prompts = [text_tokens(folder, n, lengths[n]) for n in some]
    return Case(prompts, generated(folder, prompts))


def text_tokens(folder: Path, variant: int, length: int) -> Tokens:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(TEXT.format(n=variant + i, y=1700 + 7 * variant + i) for i in range(length // 40 + 2))
    return np.array(tokenizer.encode(text[variant:]).ids[:length], np.int32)


def generated(folder: Path, prompts: list[Tokens]) -> list[list[int]]:
    """Return greedy tokens from transformers, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        print(f"generate: {len(found) + 1} of {len(prompts)}, {len(prompt)} tokens", flush=True)
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT_TOKENS, pad_token_id=0
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[EngineBench]:
    base = EngineConfig(folder, "real", device="cpu", kv_memory_mb=1024)
    bench = EngineBench(lambda **changes: make_engine("torch", replace(base, **changes), SystemClock()))
    yield bench
    await bench.close()


def engine_request(
    prompt: Tokens, sampling: SamplingParams, phase: EnginePhase = EnginePhase.BOTH, **more: Any
) -> EngineRequest:
    key = next(keys)
    seeded = replace(sampling, seed=sampling.seed + len(prompt))
    return EngineRequest(
        key, f"r{key}", phase, more.pop("tokens", prompt), len(prompt), OUTPUT_TOKENS, seeded, b"root", **more
    )


async def together(engine: Engine, reader: EventReader, requests: list[EngineRequest]) -> list[SequenceLog]:
    for request in requests:
        engine.submit(request)
    return [await ended(reader, request) for request in requests]


async def ended(reader: EventReader, request: EngineRequest) -> SequenceLog:
    log = await reader.ended(request.sequence_id)
    print(f"{request.request_id}: {len(request.token_ids)} tokens, then {log.token_ids}", flush=True)
    return log


async def alone(bench: EngineBench, case: Case, sampling: SamplingParams) -> list[SequenceLog]:
    engine, reader = await bench.start("alone")
    return [(await together(engine, reader, [engine_request(prompt, sampling)]))[0] for prompt in case.prompts]


async def batched(bench: EngineBench, case: Case, sampling: SamplingParams) -> list[SequenceLog]:
    engine, reader = await bench.start("batched")
    return await together(engine, reader, [engine_request(prompt, sampling) for prompt in case.prompts])


async def cached(bench: EngineBench, case: Case, sampling: SamplingParams) -> list[SequenceLog]:
    engine, reader = await bench.start("cached")
    await together(engine, reader, [engine_request(prompt, sampling, EnginePhase.BOTH) for prompt in case.prompts])
    logs = await together(engine, reader, [engine_request(prompt, sampling) for prompt in case.prompts])
    size = engine.capabilities.block_size_tokens
    for prompt, log in zip(case.prompts, logs, strict=True):
        assert log.end is not None and log.end.cached_tokens == (len(prompt) - 1) // size * size
    return logs


async def split(bench: EngineBench, case: Case, sampling: SamplingParams) -> list[SequenceLog]:
    source, source_reader = await bench.start("prefill")
    target, target_reader = await bench.start("decode")
    target.set_prefill_budget(0)

    async def one(prompt: Tokens) -> SequenceLog:
        request = engine_request(prompt, sampling, EnginePhase.PREFILL)
        source.submit(request)
        first = await ended(source_reader, request)
        assert first.end is not None
        tokens = np.append(prompt, first.token_ids).astype(np.int32)
        moved = engine_request(prompt, sampling, EnginePhase.DECODE, tokens=tokens, kv=first.end.handle)
        (rest,) = await together(target, target_reader, [moved])
        return SequenceLog(first.token_ids + rest.token_ids, first.logprobs + rest.logprobs, end=rest.end)

    logs = await asyncio.gather(*map(one, case.prompts))
    assert target.load().recomputed_tokens == 0
    return logs


async def preempted(bench: EngineBench, case: Case, sampling: SamplingParams) -> list[SequenceLog]:
    """In groups, each with room for its prompts and one block more each: the longest or the shortest give way."""
    logs: list[SequenceLog] = [SequenceLog()] * len(case.prompts)
    groups = -(-len(case.prompts) // GROUP)
    for group in range(groups):
        places = range(group, len(case.prompts), groups)
        blocks = sum(-(-len(case.prompts[place]) // TINY_BLOCK) + 1 for place in places)
        memory_mb = -(-blocks * TINY_BLOCK // TOKENS_PER_MB)
        engine, reader = await bench.start(f"tiny {group}", block_size_tokens=TINY_BLOCK, kv_memory_mb=memory_mb)
        rest = engine.capabilities.kv_blocks - blocks
        if rest:  # held under a lease meanwhile
            await together(
                engine,
                reader,
                [engine_request(np.arange(rest * TINY_BLOCK, dtype=np.int32), GREEDY, EnginePhase.PREFILL)],
            )
        assert engine.load().free_kv_blocks == blocks
        # Without prefix reuse, which would leave hardly anything to compute again.
        requests = {place: replace(engine_request(case.prompts[place], sampling), chain_root=b"") for place in places}
        for request in list(requests.values())[:: -1 if group % 2 else 1]:
            engine.submit(request)
        for place, request in requests.items():
            logs[place] = await ended(reader, request)
        await engine.close()
        assert engine.load().preemptions > 0 and engine.load().recomputed_tokens > 0
    return logs


Way = Callable[[EngineBench, Case, SamplingParams], Coroutine[Any, Any, list[SequenceLog]]]


@pytest.mark.parametrize("way", [batched, cached, split, preempted])
async def test_greedy_tokens_equal_generate(bench: EngineBench, case: Case, way: Way) -> None:
    logs = await way(bench, case, GREEDY)
    wrong = {
        len(prompt): (log.token_ids, expected)
        for prompt, log, expected in zip(case.prompts, logs, case.greedy, strict=True)
        if log.token_ids != expected
    }
    assert not wrong


@pytest.mark.exact
async def test_sampled_tokens_depend_on_the_sequence_alone(bench: EngineBench, case: Case) -> None:
    expected = await alone(bench, case, SAMPLED)
    for way in (cached, split, preempted):  # the second time all are in one batch, too
        logs = await way(bench, case, SAMPLED)
        for prompt, log, one in zip(case.prompts, logs, expected, strict=True):
            assert log.token_ids == one.token_ids, f"{way.__name__}: {len(prompt)} tokens"
            found = [logprob.logprob for logprob in log.logprobs]
            assert found == pytest.approx([logprob.logprob for logprob in one.logprobs], abs=1e-3)


async def test_two_requests_that_share_1400_tokens_share_their_blocks(bench: EngineBench, folder: Path) -> None:
    engine, reader = await bench.start("one")
    assert isinstance(engine, LocalEngine)
    prompt = text_tokens(folder, 1, 1450)
    other = np.append(prompt[:1400], prompt[:50]).astype(np.int32)
    first, second = replace(engine_request(prompt, GREEDY), max_output_tokens=500), engine_request(other, GREEDY)
    engine.submit(first)
    await reader.tokens(first.sequence_id, 1)
    engine.submit(second)
    await reader.tokens(second.sequence_id, 1)
    pool = engine._core._pool
    shared = [block for block in range(pool.size) if pool.references(block) == 2]
    whole = 1400 // engine.capabilities.block_size_tokens
    assert len(shared) == whole
    assert pool.referenced < whole + 2 * 8
    engine.abort(first.sequence_id)
    await reader.ended(first.sequence_id)
    await reader.ended(second.sequence_id)
