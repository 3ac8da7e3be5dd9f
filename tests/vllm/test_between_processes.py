"""Tests of the engine's own half against an EngineCore that the test plays."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.contracts.errors import InvalidRequest, QueueFull, SleepFailed
from libs.engine.config import EngineConfig
from libs.engine.port import (
    Capabilities,
    DeviceMemory,
    EngineIdentity,
    EnginePhase,
    EngineRequest,
    Progress,
    SamplingParams,
)
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.engine.vllm.connectors import Connector, ConnectorSession, KvRoute
from libs.engine.vllm.engine import VllmEngine
from libs.engine.vllm.starting import StartedCore
from libs.engine.vllm.step_reports import (
    COMMAND_KEY,
    REPORT_KEY,
    Board,
    Command,
    EngineReport,
    SpanRing,
    decode_command,
    encode,
)
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import DirectFetcher, EventReader
from libs.testing.engines.real_model import write_random_llama
from libs.testing.wait import until

vllm_engine = pytest.importorskip("vllm.v1.engine")
vllm_stats = pytest.importorskip("vllm.v1.metrics.stats")

pytestmark = pytest.mark.vllm

BLOCKS = 100
CAPABILITIES = Capabilities(32, BLOCKS, 1024, 1024, 16, "vllm/test", first_token_from="decode", sleeps=True)
PROMPT = np.arange(40, dtype=np.int32)
GREEDY = SamplingParams(temperature=0.0)


class PlayedCore:
    """A CoreProcess with scripted answers that records its messages."""

    def __init__(self, folder: Path) -> None:
        self._board, self.dummies = Board(folder / "board"), SpanRing(folder / "dummies")
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.got: asyncio.Queue[Any] = asyncio.Queue()
        self.sent = 0
        self.fails = ""
        """The reason why it fails to sleep."""

    async def start(self, config: EngineConfig, identity: EngineIdentity, progress: Progress) -> StartedCore:
        handing = ConnectorSession(Connector("NixlConnector", KvRoute.REPLY, {}), "engine-1")
        return StartedCore(CAPABILITIES, "cpu", handing, self._board, self.dummies)

    async def send(self, request: Any) -> None:
        self.sent += 1
        await self.got.put(request)

    async def command(self, request: Any) -> None:
        await self.got.put(request)

    async def abort(self, request_ids: list[str]) -> None:
        await self.got.put(request_ids)

    async def receive(self) -> Any:
        return await self.answers.get()

    async def sleep(self, *, keep_weights: bool) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        await self.got.put("sleep" if keep_weights else "sleep without weights")

    async def wake(self) -> None:
        await self.got.put("wake")

    async def device_memory(self) -> DeviceMemory | None:
        return DeviceMemory(80, 77)

    async def close(self) -> None:
        self._board.close()
        self.dummies.close()


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


def prompt(key: int, phase: EnginePhase = EnginePhase.PREFILL, sampling: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest(key, f"request-{key}", phase, PROMPT, len(PROMPT), 4, sampling)


async def test_parameters_that_vllm_refuses_are_an_invalid_request_and_leave_nothing(
    engine: VllmEngine, core: PlayedCore
) -> None:
    bad = replace(GREEDY, repetition_penalty=-1.0)
    for key in range(10):  # more than the engine's bound
        with pytest.raises(InvalidRequest, match="repetition_penalty"):
            engine.submit(prompt(key, EnginePhase.BOTH, bad))
    assert engine.integrity() == EngineIntegrity(0, 0, 0) and engine.load().waiting == 0
    engine.submit(prompt(0))
    assert (await core.got.get()).prompt_token_ids == PROMPT.tolist()


async def test_an_abort_that_crosses_the_end_of_a_prompt_frees_its_blocks(engine: VllmEngine, core: PlayedCore) -> None:
    reader = EventReader(engine)
    engine.submit(prompt(7))
    name = (await core.got.get()).request_id
    engine.abort(7)
    assert await core.got.get() == [name]
    core.answers.put_nowait(outputs(prefilled(name)))
    end = (await reader.ended(7)).end
    assert end is not None and (end.finish, end.handle) == (FinishReason.ABORTED, None)
    assert await commanded(core) == Command(release=[name])
    assert engine.integrity().leased_handles == 1
    core.answers.put_nowait(outputs(released=[name]))
    await until(lambda: engine.integrity() == EngineIntegrity(0, 0, 0))
    await reader.close()


async def test_a_lease_runs_from_the_end_of_the_prompt_however_late_that_is_read(
    engine: VllmEngine, core: PlayedCore
) -> None:
    from libs.engine.vllm.wire import unpack_handover

    reader = EventReader(engine)
    engine.submit(prompt(8))
    name = (await core.got.get()).request_id
    core.answers.put_nowait(outputs(prefilled(name), now_ns=1_000))
    end = (await reader.ended(8)).end
    assert end is not None and end.handle is not None
    handover = unpack_handover(end.handle.opaque)
    assert handover is not None and handover.expires_unix_ns == 1_000 + 30_000_000_000
    await reader.close()


async def test_an_engine_sleeps_once_it_is_idle_without_held_blocks_and_accepts_nothing_meanwhile(
    engine: VllmEngine, core: PlayedCore
) -> None:
    reader = EventReader(engine)
    engine.submit(prompt(1))
    left = (await core.got.get()).request_id
    core.answers.put_nowait(outputs(prefilled(left)))
    await reader.ended(1)
    engine.submit(prompt(2, EnginePhase.BOTH))
    runs = (await core.got.get()).request_id
    sleeping = asyncio.create_task(engine.sleep())
    assert await core.got.get() == [runs]
    assert await commanded(core) == Command(release=[left])
    with pytest.raises(QueueFull):
        engine.submit(prompt(3))
    core.answers.put_nowait(outputs(aborted=[runs]))
    await reader.until(lambda: reader.log(2).end is not None)
    assert core.got.empty() and not sleeping.done(), "a block still waits for its receiver"
    core.answers.put_nowait(outputs(released=[left]))
    await sleeping
    assert await core.got.get() == "sleep"
    await reader.finished()
    assert reader.log(2).end.finish is FinishReason.ABORTED
    await engine.wake(EngineIdentity("one", 2, "127.0.0.1:1"), DirectFetcher(), lambda _stage, _fraction: None)
    assert await core.got.get() == "wake"
    assert await commanded(core) == Command(prefill_budget=512, prefill_chunk=512), "as after a start"
    engine.submit(prompt(4))
    assert (await core.got.get()).prompt_token_ids == PROMPT.tolist()
    assert await engine.device_memory() == DeviceMemory(80, 77)


async def test_an_engine_that_fails_to_sleep_gives_the_reason_and_can_be_closed(
    engine: VllmEngine, core: PlayedCore
) -> None:
    core.fails = "Failed to reset KV cache"
    with pytest.raises(SleepFailed, match="the vllm engine does not sleep: Failed to reset KV cache"):
        await engine.sleep()
    await engine.close()


def prefilled(name: str) -> Any:
    """Build EngineCore's message about a prompt whose blocks wait for a receiver."""
    length, parameters = vllm_engine.FinishReason.LENGTH, {"some": "where"}
    return vllm_engine.EngineCoreOutput(name, [3], finish_reason=length, kv_transfer_params=parameters)


async def commanded(core: PlayedCore) -> Command:
    """Return the next command to EngineCore."""
    return decode_command((await core.got.get()).sampling_params.extra_args[COMMAND_KEY])


def outputs(*reported: Any, now_ns: int = 1, **news: Any) -> Any:
    """Build a message of EngineCore's, with the report of an idle scheduler."""
    report = EngineReport(now_ns, 1, 0, 0, 0, 0, 0, BLOCKS, 0, 0, 0, **news)
    return vllm_engine.EngineCoreOutputs(
        outputs=list(reported),
        scheduler_stats=vllm_stats.SchedulerStats(kv_connector_stats={REPORT_KEY: encode(report)}),
    )
