"""Tests of tokens of vLLM engines, whole and disaggregated, against vLLM's own LLM class."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from libs.engine.config import EngineConfig
from libs.engine.kv_port import KvHandle
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.model.grammar import json_rule
from libs.model.info import load_model_info
from libs.model.tokenizer import load_tokenizer
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EventReader
from libs.testing.engines.real_model import real_model_folder
from libs.testing.engines.vllm_core import NoFetcher, processes_of
from libs.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = 40
OUTPUT_TOKENS = 12
CONTEXT_TOKENS = 512
LONG_OUTPUT_TOKENS = 200
PULL_ENDS_S = 30.0
"""Bound on UCX's timeout for a vanished peer."""
IDLE = EngineIntegrity(0, 0, 0)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
GUIDED = SamplingParams(temperature=0.0)
GUIDED_TOKENS = 100
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99_999_999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, presence_penalty=0.5, ignore_eos=True)
ARGUMENTS: Mapping[str, Any] = {"max_model_len": CONTEXT_TOKENS}

Pair = tuple[tuple[VllmEngine, EventReader], tuple[VllmEngine, EventReader]]


def prompts() -> list[NDArray[np.int32]]:
    """Draw prompts of 1 to 300 tokens, none a prefix of another, some of whole blocks."""
    rng = np.random.default_rng(3)
    lengths = [1, 31, 32, 33, 64, 96, *(int(length) for length in rng.integers(2, 300, PROMPTS - 6))]
    return [rng.integers(200, 40_000, length, dtype=np.int32) for length in lengths]


@pytest.fixture(scope="module")
def model() -> Path:
    return real_model_folder()


@pytest.fixture(scope="module")
def cores() -> list[VllmCore]:
    """Return the cores of `pair`."""
    return [VllmCore(), VllmCore()]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path, cores: list[VllmCore]) -> AsyncIterator[Pair]:
    config = EngineConfig(
        model, "real", threads=1, block_size_tokens=32, kv_memory_mb=256, max_sequences=8, vllm_arguments=ARGUMENTS
    )
    engines = []
    for name, core in zip(("prefill", "decode"), cores, strict=True):
        engine = VllmEngine(config, SystemClock(), core)
        await engine.start(EngineIdentity(name, 1, "127.0.0.1:1"), NoFetcher(), lambda _stage, _fraction: None)
        engines.append((engine, EventReader(engine)))
    yield engines[0], engines[1]
    await asyncio.gather(*(engine.close() for engine, _ in engines))  # each waits seconds for its processes
    for _, reader in engines:
        await reader.close()


@pytest.fixture(scope="module")
def truth(model: Path, pair: Pair) -> dict[str, list[list[int]]]:
    """Return vLLM's own tokens. After `pair`, so that the engines find the process in a worker's state."""
    import vllm

    with pytest.MonkeyPatch.context() as patched:  # suites that start later inherit the environment
        patched.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = vllm.LLM(
            str(model), dtype="float32", block_size=32, enforce_eager=True, skip_tokenizer_init=True,
            kv_cache_memory_bytes=256 << 20, max_num_seqs=8, generation_config="vllm", **ARGUMENTS,
        )  # fmt: skip
    answers = {}
    for name, sampling in {"greedy": GREEDY, "seeded": SEEDED}.items():
        parameters = vllm.SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed, detokenize=False,
            presence_penalty=sampling.presence_penalty, ignore_eos=True, max_tokens=OUTPUT_TOKENS,
        )  # fmt: skip
        requested = [vllm.TokensPrompt(prompt_token_ids=prompt.tolist()) for prompt in prompts()]
        outputs = llm.generate(requested, parameters, use_tqdm=False)
        answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    return answers


def request(
    key: int, phase: EnginePhase, prompt: NDArray[np.int32], sampling: SamplingParams, kv: KvHandle | None = None
) -> EngineRequest:
    return EngineRequest(key, f"request-{key}", phase, prompt, len(prompt), OUTPUT_TOKENS, sampling, b"", kv)


@pytest.mark.parametrize(("name", "sampling"), [("greedy", GREEDY), ("seeded", SEEDED)])
async def test_disaggregated_tokens_equal_those_of_vllm_itself(
    pair: Pair, truth: dict[str, list[list[int]]], name: str, sampling: SamplingParams
) -> None:
    (source, source_reader), (target, target_reader) = pair
    target.set_prefill_budget(0)

    async def ask(number: int, prompt: NDArray[np.int32]) -> list[int]:
        key = number + (1000 if name == "seeded" else 0)
        source.submit(request(key, EnginePhase.PREFILL, prompt, sampling))
        prefilled = (await source_reader.ended(key)).end
        assert prefilled is not None and prefilled.finish is FinishReason.PREFILLED
        target.submit(request(key, EnginePhase.DECODE, prompt, sampling, prefilled.handle))
        log = await target_reader.ended(key)
        assert log.end is not None and log.end.finish is FinishReason.LENGTH, log.end
        return log.token_ids

    found = await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts(), 1)))
    different = [number for number, (one, other) in enumerate(zip(found, truth[name], strict=True)) if one != other]
    assert not different
    await until(lambda: source.integrity() == target.integrity() == IDLE)


async def test_tokens_of_whole_sequences_equal_those_of_vllm_itself(
    pair: Pair, truth: dict[str, list[list[int]]]
) -> None:
    engine, reader = pair[0]
    for key, prompt in enumerate(prompts()[:10], 2001):
        engine.submit(request(key, EnginePhase.BOTH, prompt, SEEDED))
    found = [(await reader.ended(key)).token_ids for key in range(2001, 2011)]
    assert found == truth["seeded"][:10]


async def test_steps_never_overlap_and_never_lie_within_a_kv_wait(pair: Pair, truth: object) -> None:
    for _, reader in pair:
        reported = [event.step for event in reader.events if event.step]
        steps = [(step.start_unix_ns, step.end_unix_ns) for step in reported if step.end_unix_ns]  # not announcements
        waits = [wait for event in reader.events for wait in event.kv_waits]
        spans = sorted(steps + waits)
        assert steps and all(start < end for start, end in spans)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    assert any(event.kv_waits for event in pair[1][1].events)


async def test_blocks_of_another_layout_or_past_their_lease_are_refused(pair: Pair) -> None:
    from libs.engine.vllm.wire import Handover, pack_handover

    (source, source_reader), (target, target_reader) = pair
    prompt = prompts()[1]
    source.submit(request(3000, EnginePhase.PREFILL, prompt, GREEDY))
    end = (await source_reader.ended(3000)).end
    assert end is not None and end.handle is not None
    other = replace(end.handle, kv_layout="vllm/0.31.0/NixlConnector/float32")
    target.submit(request(3001, EnginePhase.DECODE, prompt, GREEDY, other))
    refused = (await target_reader.ended(3001)).end
    assert refused is not None and refused.finish is FinishReason.FAILED and "kv_mismatch" in refused.detail
    late = replace(end.handle, opaque=pack_handover(Handover({}, 1)))
    target.submit(request(3002, EnginePhase.DECODE, prompt, GREEDY, late))
    refused = (await target_reader.ended(3002)).end
    assert refused is not None and refused.finish is FinishReason.KV_LOST
    source.abort(3000)
    await until(lambda: source.integrity() == IDLE)


async def test_guided_sequences_follow_their_guide_over_a_hand_off_and_resume_from_generated_tokens(
    pair: Pair, model: Path
) -> None:
    (source, source_reader), (target, target_reader) = pair
    tokenizer = load_tokenizer(load_model_info(model))
    guide = "start: " + json_rule(CITY)
    requested = [{"role": "user", "content": "Name a city and how many people live there, in JSON."}]
    prompt = np.array(tokenizer.encode(tokenizer.render_chat(requested), add_special_tokens=False), np.int32)
    whole = []
    greedy = replace(GUIDED, guide=guide)
    for key, sampling in enumerate((greedy, replace(greedy, temperature=0.9, seed=7)), 5000):
        source.submit(replace(request(key, EnginePhase.PREFILL, prompt, sampling), max_output_tokens=GUIDED_TOKENS))
        prefilled = (await source_reader.ended(key)).end
        assert prefilled is not None and prefilled.handle is not None
        going_on = replace(request(key, EnginePhase.DECODE, prompt, sampling, prefilled.handle))
        target.submit(replace(going_on, max_output_tokens=GUIDED_TOKENS))
        log = await target_reader.ended(key)
        assert log.end is not None and log.end.finish is FinishReason.STOP, log.end
        city = json.loads(tokenizer.decode(log.token_ids))
        assert set(city) == {"city", "people"} and len(city["city"]) <= 20 and isinstance(city["people"], int)
        whole.append(log.token_ids)
    for key, tokens in enumerate(range(1, len(whole[0]), 3), 5100):  # as where its worker was lost after so many
        so_far = np.concatenate([prompt, np.array(whole[0][:tokens], np.int32)])
        resumed = replace(request(key, EnginePhase.BOTH, so_far, greedy), prompt_tokens=len(prompt))
        source.submit(replace(resumed, max_output_tokens=GUIDED_TOKENS))
        assert (await source_reader.ended(key)).token_ids == whole[0][tokens:]
    astray = np.concatenate([prompt, prompt[:3]])
    source.submit(replace(request(5200, EnginePhase.BOTH, astray, greedy), prompt_tokens=len(prompt)))
    end = (await source_reader.ended(5200)).end
    assert end is not None and end.finish is FinishReason.FAILED
    await until(lambda: source.integrity() == target.integrity() == IDLE)


async def test_a_source_that_dies_during_a_pull_costs_the_target_only_that_sequence(
    pair: Pair, cores: list[VllmCore]
) -> None:
    """The last test here, as one engine is dead after it. The pull has the opposite direction of all others, so that
    it begins with a handshake and hangs at the frozen source."""
    (target, target_reader), (source, source_reader) = pair
    prompt, other = prompts()[5], prompts()[6]
    source.set_prefill_budget(512)
    source.submit(request(4000, EnginePhase.PREFILL, prompt, GREEDY))
    end = (await source_reader.ended(4000)).end
    assert end is not None and end.handle is not None
    target.submit(replace(request(4001, EnginePhase.BOTH, other, GREEDY), max_output_tokens=LONG_OUTPUT_TOKENS))
    await target_reader.tokens(4001, 1)
    processes = processes_of(cores[1])
    for process in processes:
        process.suspend()
    target.submit(request(4002, EnginePhase.DECODE, prompt, GREEDY, end.handle))
    await target_reader.until(lambda: target_reader.log(4002).pulled == 1)
    seen = len(target_reader.log(4001).token_ids)
    await target_reader.tokens(4001, seen + 5)
    assert target_reader.log(4002).end is None, "it was to be caught in mid-pull"
    for process in processes:
        process.kill()
    async with asyncio.timeout(PULL_ENDS_S):
        lost = (await target_reader.ended(4002)).end
    assert lost is not None and lost.finish is FinishReason.KV_LOST, lost
    whole = await target_reader.ended(4001)
    assert whole.end is not None and whole.end.finish is FinishReason.LENGTH
    with pytest.raises(Exception, match=r"(?i)engine ?core"):
        await source_reader.finished()
    await until(lambda: target.integrity() == IDLE)
