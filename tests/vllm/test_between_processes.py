"""The engine's own half, opposite an EngineCore that the test plays: what crosses on the way, what is refused."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.contracts.errors import InvalidRequest
from libs.engine.config import EngineConfig
from libs.engine.port import (
    Capabilities,
    EngineIdentity,
    EngineIntegrity,
    EngineRequest,
    Phase,
    Progress,
    SamplingParams,
)
from libs.engine.vllm.board import Board
from libs.engine.vllm.connectors import Connector, Handing, Way
from libs.engine.vllm.engine import VllmEngine
from libs.engine.vllm.ready import Ready
from libs.runtime.clock import SystemClock
from libs.testing.engine import DirectFetcher
from libs.testing.random_model import write_random_llama

pytestmark = pytest.mark.vllm

BLOCKS = 100
CAPABILITIES = Capabilities(32, BLOCKS, 1024, 1024, 16, "vllm/test", first_token_from="decode")
PROMPT = np.arange(40, dtype=np.int32)
GREEDY = SamplingParams(temperature=0.0)


class PlayedCore:
    """A CoreProcess that answers what a test puts into it, and keeps what it was sent."""

    def __init__(self, folder: Path) -> None:
        self._board = Board(folder / "board")
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.got: asyncio.Queue[Any] = asyncio.Queue()
        self.sent = 0

    async def start(self, config: EngineConfig, identity: EngineIdentity, progress: Progress) -> Ready:
        handing = Handing(Connector("NixlConnector", Way.REPLY, {}), "engine-1")
        return Ready(CAPABILITIES, "cpu", handing, self._board)

    async def send(self, request: Any) -> None:
        self.sent += 1
        await self.got.put(request)

    async def command(self, request: Any) -> None:
        await self.got.put(request)

    async def abort(self, request_ids: list[str]) -> None:
        await self.got.put(request_ids)

    async def receive(self) -> Any:
        return await self.answers.get()

    async def close(self) -> None:
        self._board.close()


@pytest.fixture
def core(tmp_path: Path) -> PlayedCore:
    return PlayedCore(tmp_path)


@pytest.fixture
async def engine(core: PlayedCore, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    model = write_random_llama(tmp_path / "llama", eos_token_id=257)
    engine = VllmEngine(
        EngineConfig(model, "m", block_size_tokens=32, max_sequences=2, max_waiting=2), SystemClock(), core
    )
    await engine.start(EngineIdentity("one", 1, "127.0.0.1:1"), DirectFetcher(), lambda _stage, _fraction: None)
    yield engine
    await engine.close()


def prompt(key: int, phase: Phase = Phase.PREFILL, sampling: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest(key, f"request-{key}", phase, PROMPT, len(PROMPT), 4, sampling)


async def test_parameters_that_vllm_refuses_are_an_invalid_request_and_leave_nothing(
    engine: VllmEngine, core: PlayedCore
) -> None:
    bad = replace(GREEDY, repetition_penalty=-1.0)
    for key in range(10):  # more than the engine's bound
        with pytest.raises(InvalidRequest, match="repetition_penalty"):
            engine.submit(prompt(key, Phase.BOTH, bad))
    assert engine.integrity() == EngineIntegrity(0, 0, 0) and engine.load().waiting == 0
    engine.submit(prompt(0))
    assert (await core.got.get()).prompt_token_ids == PROMPT.tolist()
