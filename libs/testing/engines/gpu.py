"""A simulated GPU that engines share. Sleeping engines keep a part of its memory, as vLLM's processes do."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from libs.contracts.errors import SleepFailed, StartupError
from libs.engine.kv_port import KvFetcher
from libs.engine.local import LocalEngine
from libs.engine.port import Capabilities, DeviceMemory, EngineIdentity, EngineRequest, Progress
from libs.engine.reports import EngineEvent

GB = 1_000_000_000


@dataclass
class FakeGpu:
    """The memory of a GPU, by engine."""

    total_bytes: int = 80 * GB
    residue_bytes: int = 2 * GB
    """The memory that an engine keeps while it sleeps."""
    used: dict[int, int] = field(default_factory=dict)
    most_used_bytes: int = 0

    def holds(self, engine: object, size_bytes: int) -> None:
        """Set the memory that an engine occupies. Raise StartupError if there is not enough."""
        self.used[id(engine)] = size_bytes
        self.most_used_bytes = max(self.most_used_bytes, sum(self.used.values()))
        if sum(self.used.values()) > self.total_bytes:
            raise StartupError("out of memory")

    def memory(self) -> DeviceMemory:
        """Return the memory as a driver counts it."""
        return DeviceMemory(self.total_bytes, self.total_bytes - sum(self.used.values()))


class GpuEngine(LocalEngine):
    """A sim engine on a part of a simulated GPU. `calls` lists them in order."""

    def __init__(self, *args: Any, gpu: FakeGpu, awake_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gpu = gpu
        self._awake_bytes = awake_bytes
        self.calls: list[str] = []
        self.fails = ""
        """The operation that fails: "sleep", "wake", "weights", "step" or "memory"."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of an engine that sleeps, with its weights or without."""
        return replace(super().capabilities, sleeps=True, drops_weights=True)

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        self.calls.append("start")
        self._gpu.holds(self, self._awake_bytes)
        await super().start(identity, fetcher, progress)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self.calls.append("sleep" if keep_weights else "sleep without weights")
        if self.fails == "sleep":
            raise SleepFailed("its caches cannot be emptied")
        await super().sleep()
        self._gpu.holds(self, self._gpu.residue_bytes)

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        self.calls.append("wake")
        if self.fails == "wake":
            raise StartupError("its process has died")
        self._gpu.holds(self, self._awake_bytes)
        await super().wake(identity, fetcher, progress)

    async def events(self) -> AsyncIterator[EngineEvent]:
        if self.fails == "step":
            raise RuntimeError("its process has died")
        async for event in super().events():
            yield event

    def submit(self, request: EngineRequest) -> None:
        if self.fails == "weights":  # as an engine answers whose weights were not read again
            request = replace(request, token_ids=request.token_ids[::-1].copy())
        super().submit(request)

    async def device_memory(self) -> DeviceMemory | None:
        """Return the memory of the GPU, including that of other engines."""
        return None if self.fails == "memory" else self._gpu.memory()

    async def close(self) -> None:
        if "close" not in self.calls:
            self.calls.append("close")
        self._gpu.used.pop(id(self), None)
        await super().close()
