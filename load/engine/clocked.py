"""An independent clock around the model call, whatever the engine reports."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from libs.engine.config import EngineConfig
from libs.engine.runner import Batch, Sampled
from libs.engine.sim import SimRunner
from libs.engine.torch.runner import TorchRunner
from libs.perfmodel.learner import StepKind
from libs.policy.step_time import StepWork

MAX_KEPT_BATCHES: Final = 64


@dataclass(frozen=True, slots=True)
class Call:
    work: StepWork
    start_ns: int
    """Start by `time.perf_counter_ns`, not in Unix time."""
    end_ns: int
    device_ns: int | None = None
    """Duration by the GPU's own clock; None without a GPU."""

    @property
    def kind(self) -> StepKind:
        return StepKind.of(self.work)

    def within(self, low_ns: int, high_ns: int) -> int:
        """Return the nanoseconds of the call inside [low, high)."""
        return max(min(self.end_ns, high_ns) - max(self.start_ns, low_ns), 0)


class CallLog:
    """All calls, and some mixed batches to run again in parts."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.mixed: list[Batch] = []

    def add(self, batch: Batch, start_ns: int, device_ns: int | None = None) -> None:
        """Record a call that has just ended."""
        self.calls.append(Call(batch.work, start_ns, time.perf_counter_ns(), device_ns))
        if self.calls[-1].kind is StepKind.MIXED and len(self.mixed) < MAX_KEPT_BATCHES:
            self.mixed.append(batch)


class ClockedTorch(TorchRunner):
    """The torch runner with its calls timed; on a GPU by CUDA events around the model too."""

    def __init__(self, config: EngineConfig, log: CallLog) -> None:
        super().__init__(config)
        self._log = log
        self._device_ns: Callable[[], int] | None = None

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        if self.device.startswith("cuda") and self._device_ns is None:
            self._device_ns = await self._on_thread(_event_clock, self._ready.model)
        start_ns = time.perf_counter_ns()
        sampled = await super().run(batch)
        self._log.add(batch, start_ns, self._device_ns() if self._device_ns else None)
        return sampled


class ClockedSim(SimRunner):
    """The sim runner with its calls timed."""

    def __init__(self, config: EngineConfig, log: CallLog) -> None:
        super().__init__(config)
        self._log = log

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        start_ns = time.perf_counter_ns()
        sampled = await super().run(batch)
        self._log.add(batch, start_ns)
        return sampled


def parts_of(batch: Batch) -> tuple[Batch, Batch]:
    """Split a mixed batch into its prompt chunks and its decodes."""
    return (
        Batch(tuple(chunk for chunk in batch.chunks if not chunk.decodes)),
        Batch(tuple(chunk for chunk in batch.chunks if chunk.decodes)),
    )


def _event_clock(model: Any) -> Callable[[], int]:
    """Record CUDA events around each forward pass; return a function that reads the latest pair's distance in ns."""
    import torch  # noqa: PLC0415 (on the torch thread, and only where there is a GPU)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    model.register_forward_pre_hook(lambda *_: start.record())
    model.register_forward_hook(lambda *_: end.record())
    return lambda: round(start.elapsed_time(end) * 1e6)
