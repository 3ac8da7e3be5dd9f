"""A made-up GPU that engines share, and engines on it that leave a part of it occupied while they sleep, as processes
of vLLM do."""

from dataclasses import dataclass, field, replace
from typing import Any

from libs.contracts.errors import SleepFailed, StartupError
from libs.engine.kv_port import KvFetcher
from libs.engine.local import LocalEngine
from libs.engine.port import Capabilities, DeviceMemory, EngineIdentity, Progress

GB = 1_000_000_000


@dataclass
class FakeGpu:
    """Its memory, by engine."""

    total_bytes: int = 80 * GB
    residue_bytes: int = 2 * GB
    """What an engine keeps of it while it sleeps."""
    used: dict[int, int] = field(default_factory=dict)
    most_used_bytes: int = 0

    def holds(self, engine: object, size_bytes: int) -> None:
        """The engine occupies so much from now on. Raises StartupError where that is not there."""
        self.used[id(engine)] = size_bytes
        self.most_used_bytes = max(self.most_used_bytes, sum(self.used.values()))
        if sum(self.used.values()) > self.total_bytes:
            raise StartupError("out of memory")

    def memory(self) -> DeviceMemory:
        """As its driver counts."""
        return DeviceMemory(self.total_bytes, self.total_bytes - sum(self.used.values()))


class GpuEngine(LocalEngine):
    """A sim engine on a part of a made-up GPU. `asked` is what it was asked, in order."""

    def __init__(self, *args: Any, gpu: FakeGpu, awake_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gpu = gpu
        self._awake_bytes = awake_bytes
        self.asked: list[str] = []
        self.fails = ""
        """What it cannot do any more: "sleep", "wake", say its "memory"."""

    @property
    def capabilities(self) -> Capabilities:
        """With weights or without."""
        return replace(super().capabilities, sleeps=True, drops_weights=True)

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Occupies its part of the GPU."""
        self.asked.append("start")
        self._gpu.holds(self, self._awake_bytes)
        await super().start(identity, fetcher, progress)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Leaves its residue on the GPU."""
        self.asked.append("sleep" if keep_weights else "sleep without weights")
        if self.fails == "sleep":
            raise SleepFailed("its caches cannot be emptied")
        await super().sleep()
        self._gpu.holds(self, self._gpu.residue_bytes)

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Occupies its part of the GPU again."""
        self.asked.append("wake")
        if self.fails == "wake":
            raise StartupError("its process has died")
        self._gpu.holds(self, self._awake_bytes)
        await super().wake(identity, fetcher, progress)

    async def device_memory(self) -> DeviceMemory | None:
        """Of the GPU, others on it included."""
        return None if self.fails == "memory" else self._gpu.memory()

    async def close(self) -> None:
        """Frees the GPU."""
        if "close" not in self.asked:
            self.asked.append("close")
        self._gpu.used.pop(id(self), None)
        await super().close()
