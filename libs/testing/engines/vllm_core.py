"""EngineCore processes for tests: ones that tests share, since they take long to start, and what engines in pairs need.

Each test finds a shared process as if it were new.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil

from libs.contracts.errors import KvLost
from libs.engine.config import EngineConfig
from libs.engine.kv_port import KvChunk, KvHandle
from libs.engine.port import DeviceMemory, EngineIdentity, Progress
from libs.engine.vllm.core import VllmCore
from libs.engine.vllm.starting import StartedCore
from libs.engine.vllm.step_reports import Command, EngineReport
from libs.policy.step_time import StepTimeModel

ALL_TOKENS = 1 << 30
DRAIN_S = 60.0
FREE = StepTimeModel(0, 0, 0, 0, 0, 0, 1)
"""Step times of zero, which break no target."""


class NoFetcher:
    """A fetcher that nothing calls, since vLLM's engines move blocks themselves."""

    async def fetch(self, handle: KvHandle, kv_layout: str, from_block: int) -> AsyncIterator[KvChunk]:
        raise KvLost("nothing is fetched here")
        yield KvChunk(0, 0)  # type: ignore[unreachable]  # it makes this an iterator


def processes_of(core: VllmCore) -> list[psutil.Process]:
    """Return EngineCore's process and those that compute for it."""
    cores = [psutil.Process(pid) for pid in core.pids]
    return [*cores, *(child for each in cores for child in each.children(recursive=True))]


class SharedCore:
    """A CoreProcess that stays running, empty, after `close`.

    It reports that it sleeps. On a CPU vLLM then does everything but free memory: it ends requests, empties caches, and
    reads weights again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core = VllmCore()
        self._ready: StartedCore | None = None
        self._names: list[str] = []
        self._last: EngineReport | None = None
        self._asleep = False

    async def start(self, config: EngineConfig, identity: EngineIdentity, progress: Progress) -> StartedCore:
        """Start the process the first time; later, adopt what a running engine can change of `config`."""
        if self._ready is None:
            here = replace(identity, address="127.0.0.1:1")
            self._ready = await self._core.start(self._config, here, progress)
        chunk_tokens = config.prefill_chunk_tokens
        await self._command(Command(prefill_budget=ALL_TOKENS, prefill_chunk=chunk_tokens, step_time=FREE))
        capabilities = replace(self._ready.capabilities, sleeps=True, drops_weights=True)
        return replace(self._ready, capabilities=capabilities)

    @property
    def sent(self) -> int:
        """The number of sequences sent so far."""
        return self._core.sent

    async def send(self, request: Any) -> None:
        self._names.append(request.request_id)
        await self._core.send(request)

    async def command(self, request: Any) -> None:
        await self._core.command(request)

    async def abort(self, request_ids: list[str]) -> None:
        await self._core.abort(request_ids)

    async def receive(self) -> Any:
        """Receive from the process, and record its state."""
        from libs.engine.vllm.wire import report_of  # noqa: PLC0415 - it imports vLLM

        outputs = await self._core.receive()
        self._last = report_of(outputs) or self._last
        return outputs

    async def sleep(self, *, keep_weights: bool) -> None:
        await self._core.sleep(keep_weights=keep_weights)
        self._asleep = True

    async def wake(self) -> None:
        await self._core.wake()
        self._asleep = False

    async def device_memory(self) -> DeviceMemory | None:
        return await self._core.device_memory()

    async def close(self) -> None:
        """End all sequences."""
        if self._asleep:
            await self.wake()
        names, self._names = self._names, []
        await self._core.abort(names)
        await self._command(Command(release=names))
        async with asyncio.timeout(DRAIN_S):
            while self._busy():
                await self.receive()

    async def end(self) -> None:
        await self._core.close()

    async def _command(self, command: Command) -> None:
        from libs.engine.vllm.wire import command_request  # noqa: PLC0415

        await self._core.command(command_request(command, "test"))

    def _busy(self) -> bool:
        last = self._last
        if last is None or self._ready is None:
            return bool(self._core.sent)
        held = last.free_blocks < self._ready.capabilities.kv_blocks
        return last.taken < self.sent or bool(last.running or last.waiting or last.awaiting_kv) or held
