"""Tests of prompts with images on the torch engine: greedy tokens, encode steps and KV by content."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from libs.contracts.errors import InvalidRequest
from libs.contracts.hashing import ImageSpan, image_hash
from libs.engine.config import EngineConfig
from libs.engine.local import make_engine
from libs.engine.port import Engine, EngineIdentity, EnginePhase, EngineRequest, PromptImage, SamplingParams
from libs.engine.reports import EngineEvent, FinishReason, SequenceOutput, StepReport
from libs.model.info import load_model_info
from libs.model.vision import spans
from libs.runtime.clock import SystemClock
from libs.testing.engines.vision_model import IMAGE_TOKENS, Reference, picture, write_random_llava

TOKENS = 10
ROOT = b"r" * 16
TEXT = "user: <image> beside <image>, what is it?\nassistant:"


@pytest.fixture(scope="module", params=["clip", "siglip"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llava(tmp_path_factory.mktemp("llava") / "model", siglip=request.param == "siglip")


class Running:
    """An engine with what it has reported so far."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.vision = load_model_info(folder).vision
        self.steps: list[StepReport] = []
        self._tokens: dict[int, list[int]] = {}
        self._ends: dict[int, asyncio.Future[SequenceOutput]] = {}

    def take(self, event: EngineEvent) -> None:
        if event.step is not None and event.step.end_unix_ns:
            self.steps.append(event.step)
        for output in event.outputs:
            self._tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
            if output.finish is not None:
                self._ends[output.sequence_id].set_result(output)

    async def run(
        self, prompt: Sequence[int], files: Sequence[bytes], **changes: Any
    ) -> tuple[list[int], SequenceOutput]:
        """Submit a prompt and return (its tokens, its last output)."""
        assert self.vision is not None
        sequence_id = len(self._ends)
        places = spans(list(prompt), [image_hash(file) for file in files], self.vision)
        images = changes.pop("images", tuple(map(PromptImage, places, files)))
        self._ends[sequence_id] = asyncio.get_running_loop().create_future()
        self.engine.submit(
            EngineRequest(
                sequence_id,
                "r",
                EnginePhase.BOTH,
                np.array(prompt, np.int32),
                len(prompt),
                TOKENS,
                SamplingParams(temperature=0.0, ignore_eos=True),
                chain_root=ROOT,
                images=images,
                **changes,
            )
        )
        last = await self._ends[sequence_id]
        return self._tokens.get(sequence_id, []), last


@asynccontextmanager
async def running(folder: Path, **changes: Any) -> AsyncIterator[Running]:
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_memory_mb": 4, "prefill_chunk_tokens": 8}
    engine = make_engine("torch", EngineConfig(folder, "small", **(settings | changes)), SystemClock())
    await engine.start(EngineIdentity("one", 1, ""), None, lambda _stage, _fraction: None)  # type: ignore[arg-type]
    found = Running(engine, folder)

    async def read() -> None:
        async for event in engine.events():
            found.take(event)

    reading = asyncio.create_task(read())
    try:
        yield found
        assert engine.integrity().referenced_blocks == 0
    finally:
        await engine.close()
        await reading


async def test_greedy_tokens_equal_generate_in_chunks_smaller_than_an_image(folder: Path) -> None:
    reference = Reference(folder)
    async with running(folder) as found:
        for files in ([picture(1), picture(2)], [picture(2), picture(1)], [picture(1), picture(1)]):
            prompt, expected = reference.generate(TEXT, files, TOKENS)
            assert len(prompt) > 2 * IMAGE_TOKENS
            tokens, last = await found.run(prompt, files)
            assert tokens[: len(expected)] == expected
            assert last.finish is FinishReason.LENGTH


async def test_equal_tokens_with_different_images_share_no_block_from_the_image_on(folder: Path) -> None:
    reference = Reference(folder)
    one, other = [picture(1), picture(2)], [picture(3), picture(2)]
    prompt, expected = reference.generate(TEXT, one, TOKENS)
    same_prompt, expected_other = reference.generate(TEXT, other, TOKENS)
    assert prompt == same_prompt
    async with running(folder) as found:
        first, _ = await found.run(prompt, one)
        second, last = await found.run(prompt, other)
        assert last.cached_tokens == 0  # the first image begins in the first block
        third, last = await found.run(prompt, one)
        assert last.cached_tokens >= 2 * IMAGE_TOKENS
        assert (first, second, third) == (expected, expected_other, expected)
        assert expected != expected_other


async def test_an_image_is_encoded_once_in_its_own_step(folder: Path) -> None:
    files = [picture(1), picture(2)]
    prompt, _ = Reference(folder).generate(TEXT, files, 1)
    async with running(folder) as found:
        await found.run(prompt, files)
        # Other tokens before the images, so that no block is found.
        await found.run([5, *prompt], files)
        encodes = [step for step in found.steps if step.encoded_images]
        assert sum(step.encoded_images for step in encodes) == 2
        assert all(step.prefill_tokens == step.decode_sequences == 0 for step in encodes)
        assert all(
            before.end_unix_ns <= step.start_unix_ns for before, step in zip(found.steps, found.steps[1:], strict=False)
        )
        load = found.engine.load()
        assert (load.images_used, load.images_encoded) == (4, 2)
        assert load.image_encode_ns == sum(step.end_unix_ns - step.start_unix_ns for step in encodes) > 0
        assert load.image_cache_bytes == 2 * IMAGE_TOKENS * 64 * 4  # tokens, hidden, float32


async def test_images_of_waiting_prompts_count_with_the_time_of_earlier_ones_until_they_are_encoded(
    folder: Path,
) -> None:
    prompt, _ = Reference(folder).generate(TEXT, [picture(1), picture(2)], 1)
    async with running(folder) as found:
        first = asyncio.create_task(found.run(prompt, [picture(3), picture(4)]))
        await asyncio.sleep(0)
        assert found.engine.load().waiting_encode_ns == 0, "no image has been encoded yet"
        await first
        load = found.engine.load()
        each_ns = load.image_encode_ns / load.images_encoded
        # Two images are new, one of them twice, and one is kept.
        runs = [found.run([5, *prompt], [picture(one), picture(2)]) for one in (1, 2, 3)]
        tasks = [asyncio.create_task(each) for each in runs]
        await asyncio.sleep(0)
        assert found.engine.load().waiting_encode_ns == pytest.approx(2 * each_ns, rel=0.01)
        await asyncio.gather(*tasks)
        assert found.engine.load().waiting_encode_ns == 0


async def test_without_room_for_embeddings_answers_stay_the_same(folder: Path) -> None:
    files = [picture(1), picture(2)]
    prompt, expected = Reference(folder).generate(TEXT, files, TOKENS)
    async with running(folder, image_cache_mb=0) as found:
        assert (await found.run(prompt, files))[0] == expected
        assert found.engine.load().image_cache_bytes == IMAGE_TOKENS * 64 * 4  # of the latest


async def test_a_damaged_image_ends_only_its_own_sequence(folder: Path) -> None:
    files = [picture(1), picture(2)]
    prompt, expected = Reference(folder).generate(TEXT, files, TOKENS)
    async with running(folder) as found:
        assert found.vision is not None
        places = spans(prompt, [image_hash(file) for file in files], found.vision)
        damaged = (PromptImage(places[0], files[0]), PromptImage(places[1], files[1][:-9]))
        (tokens, last), (beside, _) = await asyncio.gather(
            found.run(prompt, files, images=damaged), found.run(prompt, [files[0], picture(4)])
        )
        assert (tokens, last.finish) == ([], FinishReason.FAILED)
        assert "damaged" in last.detail
        assert len(beside) == TOKENS
        assert (await found.run(prompt, files))[0] == expected


async def test_images_outside_the_prompt_or_without_a_file_are_refused(folder: Path) -> None:
    async with running(folder) as found:
        for images in (
            (PromptImage(ImageSpan(30, 16, b"d"), b"x"),),
            (PromptImage(ImageSpan(4, 16, b"d"), b"x"), PromptImage(ImageSpan(10, 16, b"d"), b"x")),
            (PromptImage(ImageSpan(4, 16, b"d")),),
        ):
            with pytest.raises(InvalidRequest, match="image"):
                await found.run(range(40), [], images=images)
