"""Images on the vllm engine: transformers' greedy tokens over a hand-off, and KV by the content of images."""

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import pytest_asyncio

from libs.contracts.errors import InvalidRequest
from libs.contracts.hashing import block_hashes, image_hash
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, PromptImage, SamplingParams
from libs.engine.reports import FinishReason, SequenceOutput
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.engine import VllmEngine
from libs.model.info import load_model_info
from libs.model.vision import Vision, spans
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind
from libs.runtime.tasks import TaskOwner
from libs.testing.engines.engine import EventReader
from libs.testing.engines.vision_model import IMAGE_TOKENS, Reference, picture, write_random_llava
from libs.testing.engines.vllm_core import NoFetcher
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingBus, RecordingKvIndex, local_worker
from services.gateway.request.prompt import load_catalog
from services.gateway.run import GatewayPorts, open_gateway
from services.gateway.settings import GatewaySettings

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

MODEL = "small-llava"
TOKENS = 10
WAIT_S = 300
BLOCK = 32
KV_MB = 1
"""Room for 16 blocks, so that a few sequences that grow take them from each other."""
ROOT = b"r" * 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
TEXT = "user: <image> beside <image>, what is it, and where does the fox go from here?\nassistant:"
SHAPE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


async def test_chats_about_pictures_are_answered_over_a_hand_off_behind_a_gateway(tmp_path: Path) -> None:
    folder = write_random_llava(tmp_path / MODEL, **SHAPE)
    reference = Reference(folder, backend="torchvision")
    registry, clock, tasks = ListedRegistry(), SystemClock(), TaskOwner()
    own: dict[str, Any] = {
        "engine": "vllm", "model_path": str(folder), "threads": 1, "kv_memory_mb": 8, "block_size_tokens": BLOCK,
        "vllm_arguments": {"max_model_len": 512}, "registry": registry,
    }  # fmt: skip
    settings = GatewaySettings.model_validate({"port": 0, "drain_s": 1, "models": {MODEL: str(folder)}})
    sock, catalog = bind(settings.host, 0, "FULCRUM_GATEWAY_PORT"), load_catalog(settings.models)
    ports = GatewayPorts(RecordingBus(), registry, RecordingKvIndex())
    async with (
        local_worker("prefill-0", "prefill", **own) as prefill,
        local_worker("decode-0", "decode", **own) as decode,
        open_gateway(settings=settings, ports=ports, catalog=catalog, sock=sock, clock=clock, tasks=tasks) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client,
    ):
        await until(lambda: len(gateway.fleet.views()) == 2, what="both workers", timeout_s=WAIT_S)
        for seeds in ((1,), (2,), (1,), (2, 1)):
            files = [picture(seed) for seed in seeds]
            urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
            text: Any = {"type": "text", "text": "what is in this picture, and is it a fox?"}
            content: Any = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), text]
            found = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=TOKENS, temperature=0
            )
            requested = [{"role": "user", "content": [*[{"type": "image"}] * len(files), text]}]
            prompt, expected = reference.chat(requested, files, TOKENS)
            assert found.choices[0].message.content == expected
            assert found.usage is not None and found.usage.prompt_tokens == len(prompt)
        assert prefill.host.engine.load().images_encoded == 2, "the others were kept, or their KV was"
        assert decode.host.engine.load().images_encoded == 0
        await until(lambda: sum(step.encoded_images for step in prefill.steps()) == 2, what="their telemetry")
    await tasks.close()


class Pair:
    """A prefill and a decode engine, with what they have reported."""

    def __init__(self, prefill: VllmEngine, decode: VllmEngine, vision: Vision) -> None:
        self.prefill, self.decode, self.vision = prefill, decode, vision
        self.readers = {id(engine): EventReader(engine) for engine in (prefill, decode)}
        self._keys = 0

    def request(
        self, prompt: Sequence[int], files: Sequence[bytes], phase: EnginePhase, **changes: Any
    ) -> EngineRequest:
        self._keys += 1
        output_tokens = changes.pop("output_tokens", TOKENS)
        places = spans(list(prompt), [image_hash(file) for file in files], self.vision)
        sent = [b""] * len(files) if phase is EnginePhase.DECODE else files
        images = tuple(map(PromptImage, places, sent))
        own = {"chain_root": ROOT, "images": images} | changes
        token_ids = np.array(prompt, np.int32)
        return EngineRequest(self._keys, "r", phase, token_ids, len(prompt), output_tokens, GREEDY, **own)

    async def run(self, engine: VllmEngine, request: EngineRequest) -> tuple[list[int], SequenceOutput]:
        engine.submit(request)
        log = await self.readers[id(engine)].ended(request.sequence_id)
        assert log.end is not None
        return log.token_ids, log.end

    async def answer(self, prompt: Sequence[int], files: Sequence[bytes]) -> tuple[list[int], int, int]:
        """Return (tokens, prompt tokens that the prefill engine found cached, those of the decode engine)."""
        _, first = await self.run(self.prefill, self.request(prompt, files, EnginePhase.PREFILL))
        assert first.finish is FinishReason.PREFILLED and first.handle is not None, first
        tokens, last = await self.run(self.decode, self.request(prompt, files, EnginePhase.DECODE, kv=first.handle))
        assert last.finish is FinishReason.LENGTH, last
        return tokens, first.cached_tokens, last.cached_tokens


class Shared(NamedTuple):
    pair: Pair
    reference: Reference


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["clip", "siglip"])
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    folder = tmp_path_factory.mktemp("llava") / "model"
    write_random_llava(folder, siglip=request.param == "siglip", **SHAPE)
    config = EngineConfig(
        folder, "small", threads=1, block_size_tokens=BLOCK, kv_memory_mb=KV_MB, max_sequences=8,
        prefill_chunk_tokens=24, vllm_arguments={"max_model_len": 256},
    )  # fmt: skip
    engines = [VllmEngine(config, SystemClock(), VllmCore()) for _ in range(2)]
    for name, engine in zip(("prefill", "decode"), engines, strict=True):  # ports are set for the whole process
        await engine.start(EngineIdentity(name, 1, "127.0.0.1:1"), NoFetcher(), lambda _stage, _fraction: None)
    vision = load_model_info(folder).vision
    assert vision is not None
    pair = Pair(engines[0], engines[1], vision)
    yield Shared(pair, Reference(folder, backend="torchvision"))
    await asyncio.gather(*(engine.close() for engine in engines))
    for reader in pair.readers.values():
        await reader.close()


async def test_greedy_tokens_are_those_of_generate_in_chunks_smaller_than_two_images(shared: Shared) -> None:
    assert shared.pair.prefill.capabilities.images and shared.pair.decode.capabilities.images
    for files in ([picture(1), picture(2)], [picture(2), picture(1)], [picture(1), picture(1)]):
        prompt, expected = shared.reference.generate(TEXT, files, TOKENS)
        tokens, _, _ = await shared.pair.answer(prompt, files)
        assert tokens[: len(expected)] == expected


async def test_equal_texts_with_other_images_share_no_block_on_either_side(shared: Shared) -> None:
    pair, reference = shared
    one, other = [picture(11), picture(12)], [picture(13), picture(12)]
    prompt, expected = reference.generate(TEXT, one, TOKENS)
    same_prompt, expected_other = reference.generate(TEXT, other, TOKENS)
    assert prompt == same_prompt and expected != expected_other
    found = [await pair.answer(prompt, files) for files in (one, other, one)]
    assert [tokens for tokens, _, _ in found] == [expected, expected_other, expected]
    whole = (len(prompt) - 1) // BLOCK * BLOCK
    cached = [(prefill, decode) for _, prefill, decode in found]
    # The first image begins in the first block. Blocks that were pulled are reused as those computed here.
    assert cached == [(0, 0), (0, 0), (whole, whole)]


async def test_the_hashes_of_blocks_are_those_that_gateways_compute(shared: Shared) -> None:
    pair, files = shared.pair, [picture(21), picture(22)]
    prompt, _ = shared.reference.generate(TEXT, files, 1)
    await pair.answer(prompt, files)
    places = spans(prompt, [image_hash(file) for file in files], pair.vision)
    hashes = block_hashes(ROOT, prompt, BLOCK, places)
    assert len(hashes) > 1
    for reader in pair.readers.values():
        stored = {each for event in reader.events for each in event.blocks.stored}
        assert set(hashes) <= stored


async def test_an_image_is_encoded_once_in_a_step_of_its_own(shared: Shared) -> None:
    engine, files = shared.pair.prefill, [picture(31), picture(32)]
    reader = shared.pair.readers[id(engine)]
    prompt, _ = shared.reference.generate(TEXT, files, 1)
    before, seen = engine.load(), len(reader.events)
    await shared.pair.answer(prompt, files)
    # Other tokens before the images, so that no block is found.
    await shared.pair.answer([5, *prompt], files)
    steps = [event.step for event in reader.events[seen:] if event.step and event.step.end_unix_ns]
    encodes = [step for step in steps if step.encoded_images]
    assert sum(step.encoded_images for step in encodes) == 2
    assert all(step.prefill_tokens == step.decode_sequences == 0 for step in encodes)
    assert all(one.end_unix_ns <= after.start_unix_ns for one, after in itertools.pairwise(steps))
    load = engine.load()
    assert (load.images_used - before.images_used, load.images_encoded - before.images_encoded) == (4, 2)
    encode_ns = sum(step.end_unix_ns - step.start_unix_ns for step in encodes)
    assert load.image_encode_ns - before.image_encode_ns == encode_ns > 0
    assert load.image_cache_bytes >= 2 * IMAGE_TOKENS * SHAPE["hidden_size"] * 4
    assert shared.pair.decode.load().images_encoded == 0


async def test_one_engine_answers_a_whole_request(shared: Shared) -> None:
    files = [picture(41), picture(42)]
    prompt, expected = shared.reference.generate(TEXT, files, TOKENS)
    request = shared.pair.request(prompt, files, EnginePhase.BOTH)
    tokens, last = await shared.pair.run(shared.pair.decode, request)
    assert (tokens, last.finish) == (expected, FinishReason.LENGTH)


async def test_a_damaged_image_ends_its_own_sequence(shared: Shared) -> None:
    pair, files = shared.pair, [picture(51), picture(52)]
    prompt, expected = shared.reference.generate(TEXT, files, TOKENS)
    damaged = pair.request(prompt, files, EnginePhase.BOTH)
    images = damaged.images[0], PromptImage(damaged.images[1].span, files[1][:-9])
    broken = pair.run(pair.prefill, pair.request(prompt, files, EnginePhase.BOTH, images=images))
    (tokens, last), (beside, _) = await asyncio.gather(
        broken, pair.run(pair.prefill, pair.request(prompt, files, EnginePhase.BOTH))
    )
    assert (tokens, last.finish) == ([], FinishReason.FAILED) and "damaged" in last.detail
    assert beside == expected


async def test_a_sequence_aborted_while_its_images_are_read_ends_at_once(shared: Shared) -> None:
    pair, files = shared.pair, [picture(61, width=900, height=700), picture(62)]
    prompt, _ = shared.reference.generate(TEXT, files, 1)
    sent = pair.prefill.load()
    request = pair.request(prompt, files, EnginePhase.BOTH)
    pair.prefill.submit(request)
    pair.prefill.abort(request.sequence_id)
    log = await pair.readers[id(pair.prefill)].ended(request.sequence_id)
    assert log.end is not None and (log.end.finish, log.token_ids) == (FinishReason.ABORTED, [])
    assert pair.prefill.integrity().live_sequences == 0
    assert pair.prefill.load().waiting == sent.waiting


async def test_a_prompt_that_an_image_ends_is_not_handed_over(shared: Shared) -> None:
    pair, files = shared.pair, [picture(71)]
    prompt, _ = shared.reference.generate("user: <image>", files, 1)
    with pytest.raises(InvalidRequest, match="let text follow it"):
        pair.prefill.submit(pair.request(prompt, files, EnginePhase.PREFILL))


async def test_preempted_sequences_whose_images_are_elsewhere_end_as_lost(shared: Shared) -> None:
    pair = shared.pair
    count, output_tokens = 5, 120
    decodes = []
    for seed in range(count):
        files = [picture(80 + seed), picture(90 + seed)]
        prompt, _ = shared.reference.generate(TEXT, files, 1)
        _, first = await pair.run(pair.prefill, pair.request(prompt, files, EnginePhase.PREFILL))
        assert first.handle is not None
        decoding = pair.request(
            prompt, files, EnginePhase.DECODE, kv=first.handle, output_tokens=output_tokens, chain_root=b""
        )
        # Its pull frees the blocks of the prefill engine, which has no room for all.
        decodes.append(asyncio.create_task(pair.run(pair.decode, decoding)))
    found = await asyncio.gather(*decodes)
    ends = [last.finish for _, last in found]
    assert set(ends) == {FinishReason.LENGTH, FinishReason.KV_LOST}
    assert all("its images are not here" in last.detail for _, last in found if last.finish is FinishReason.KV_LOST)
    assert pair.decode.load().preemptions >= ends.count(FinishReason.KV_LOST)
    files = [picture(1), picture(2)]
    prompt, expected = shared.reference.generate(TEXT, files, TOKENS)
    assert (await pair.answer(prompt, files))[0] == expected, "the engine serves on"
