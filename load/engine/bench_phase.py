"""`python -m load.engine.bench_phase`: compare the reported occupancy with what the device did.

An engine serves a mixed load of prompts at random times, which leaves idle time, pure steps and mixed steps. Its events
become phase time as in `/v1/occupancy`, and an independent clock measures each model call. The comparison covers busy
and idle time over the whole run, and prefill and decode in seconds without mixed steps. The sum of all windows must
equal the whole run exactly. The split of mixed steps is compared with the same two parts, run separately afterwards. On
a GPU, CUDA events give the part of busy time in which the GPU computed. The result is printed as a table, then as one
JSON object in the last line. The exit code is 1 if an error other than the split's exceeds a percentage point, or if
windows do not add up.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libs.engine.config import EngineConfig
from libs.engine.local import LocalEngine
from libs.engine.port import Engine, EnginePhase, EngineRequest, SamplingParams
from libs.engine.runner import Batch, Sampled
from libs.engine.sim import SimRunner
from libs.engine.torch.runner import TorchRunner
from libs.perfmodel.learner import StepKind
from libs.policy.step_time import StepWork, split_step_ns
from libs.runtime.clock import Clock, SystemClock
from libs.telemetry.steps import PhaseTime
from libs.testing.engines.engine import EventReader, PhaseAccount
from libs.testing.engines.real_model import real_model_folder
from load.measure import bench_parser
from load.setup import start_engine

MAX_KEPT_BATCHES: Final = 64


@dataclass(frozen=True, slots=True)
class Call:
    work: StepWork
    start_ns: int
    """The start by `time.perf_counter_ns`, which is not Unix time."""
    end_ns: int
    device_ns: int | None = None
    """The duration by the GPU's own clock; None without a GPU."""

    @property
    def kind(self) -> StepKind:
        return StepKind.of(self.work)

    def within(self, low_ns: int, high_ns: int) -> int:
        """Return the nanoseconds of the call inside [low, high)."""
        return max(min(self.end_ns, high_ns) - max(self.start_ns, low_ns), 0)


class CallLog:
    """All calls, and some mixed batches whose parts are run again."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.mixed: list[Batch] = []

    def add(self, batch: Batch, start_ns: int, device_ns: int | None = None) -> None:
        """Record a call that ended just now."""
        self.calls.append(Call(batch.work, start_ns, time.perf_counter_ns(), device_ns))
        if self.calls[-1].kind is StepKind.MIXED and len(self.mixed) < MAX_KEPT_BATCHES:
            self.mixed.append(batch)


class ClockedTorch(TorchRunner):
    """The torch runner with its calls timed. On a GPU, CUDA events also time the model."""

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
    """Record CUDA events around each forward pass. Return a function that reads the ns between the latest pair."""
    import torch  # noqa: PLC0415 (on the torch thread, and only where there is a GPU)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    model.register_forward_pre_hook(lambda *_: start.record())
    model.register_forward_hook(lambda *_: end.record())
    return lambda: round(start.elapsed_time(end) * 1e6)


WINDOW_NS = 1_000_000_000
# The number of runs of each part of a mixed step. The shortest counts.
REPEATS = 3
UNIT = 1 << 20
MOST_ERROR_POINTS = 1.0
MIN_COVERAGE = 0.99


@dataclass(frozen=True, slots=True)
class Shape:
    """A load that leaves an engine idle for part of the time, and mixes prompts with decodes for another part."""

    requests_per_s: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    chunk_tokens: int


SHAPES = {
    "torch": Shape(0.5, (16, 192), (4, 24), 64),
    "sim": Shape(1.5, (100, 3000), (10, 100), 512),
}


# The load of the torch engine on a GPU. A lighter one would leave it idle nearly always, so that no error could show.
GPU_SHAPE = Shape(2.0, (256, 4096), (16, 128), 2048)
GPU_KV_MEMORY_MB = 8192


def shape_of(name: str, device: str) -> Shape:
    return GPU_SHAPE if name == "torch" and device.startswith("cuda") else SHAPES[name]


def submit(engine: Engine, key: int, prompt: NDArray[np.int32], output_tokens: int) -> int:
    """Submit a greedy request for this number of tokens under a key, and return the key."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.submit(EngineRequest(key, f"r{key}", EnginePhase.BOTH, prompt, len(prompt), output_tokens, sampling))
    return key


@asynccontextmanager
async def accounted(engine: Engine, clock: Clock) -> AsyncIterator[tuple[PhaseAccount, EventReader]]:
    """Start an engine and account for its phases while the context is open. Close the engine at the end."""
    await start_engine(engine)
    account = PhaseAccount(engine, clock)
    reader = EventReader(engine, account.on_event)
    cutting = asyncio.ensure_future(account.run())
    try:
        yield account, reader
    finally:
        cutting.cancel()
        await reader.close()
        await engine.close()


async def serve(engine: Engine, reader: EventReader, shape: Shape, seconds: float) -> None:
    """Submit requests at random times for `seconds`, then abort those that have not ended."""
    random, key, end_s = np.random.default_rng(2), 0, time.monotonic() + seconds
    while (pause_s := random.exponential(1 / shape.requests_per_s)) < end_s - time.monotonic():
        await asyncio.sleep(pause_s)
        key += 1
        prompt = random.integers(100, 200, int(random.integers(*shape.prompt_tokens)), dtype=np.int32)
        submit(engine, key, prompt, int(random.integers(*shape.output_tokens)))
    await asyncio.sleep(max(end_s - time.monotonic(), 0))
    for open_key in range(1, key + 1):
        engine.abort(open_key)
    await reader.until(lambda: engine.load().running == 0)


def window_errors(account: PhaseAccount, calls: Sequence[Call], unix_ns: int, clock_ns: int, count: int) -> list[float]:
    """Return the greater error of the prefill and decode shares, for each window without mixed calls."""
    errors = []
    for number in range(count):
        low = number * WINDOW_NS
        inside = [call for call in calls if call.within(clock_ns + low, clock_ns + low + WINDOW_NS)]
        if not inside or any(call.kind is StepKind.MIXED for call in inside):
            continue
        reported = account.phases(unix_ns + low, unix_ns + low + WINDOW_NS)
        true = dict.fromkeys(StepKind, 0)
        for call in inside:
            true[call.kind] += call.within(clock_ns + low, clock_ns + low + WINDOW_NS)
        off = max(abs(reported.prefill_ns - true[StepKind.PREFILL]), abs(reported.decode_ns - true[StepKind.DECODE]))
        errors.append(off / WINDOW_NS)
    return errors


def adds_exactly(account: PhaseAccount, unix_ns: int, length_ns: int) -> bool:
    """Return whether no phase is negative, and the windows' phases sum exactly to those of the whole run."""
    end_ns = unix_ns + length_ns
    windows = [account.phases(low, min(low + WINDOW_NS, end_ns)) for low in range(unix_ns, end_ns, WINDOW_NS)]
    whole = replace(account.phases(unix_ns, end_ns), provisional=False)
    least = min(ns for each in windows for ns in (each.prefill_ns, each.decode_ns, each.kv_wait_ns, each.idle_ns))
    return least >= 0 and replace(sum(windows, PhaseTime()), provisional=False) == whole


def faults(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each figure that breaks a promise of the engine."""
    found = [
        f"{name} is {figures[name]}, more than {MOST_ERROR_POINTS:g}"
        for name in ("busy_error_points", "pure_error_points_mean")
        if (figures[name] or 0.0) > MOST_ERROR_POINTS
    ]
    if not figures["adds_exactly"]:
        found.append("the windows' phases do not add to those of the whole run")
    if figures["coverage"] < MIN_COVERAGE:
        found.append(f"coverage is {figures['coverage']}, less than {MIN_COVERAGE:g}")
    return found


def gpu_figures(calls: Sequence[Call], reported_busy_ns: int, length_ns: int) -> dict[str, float | None]:
    """Return the GPU's own busy time, and the error of the reported one against it; null without a GPU.

    The reported time is that of whole steps, which includes the CPU's work around the model.
    """
    on_gpu = [call.device_ns for call in calls if call.device_ns is not None]
    if not on_gpu:
        return {"gpu_busy_by_cuda_events": None, "gpu_busy_error_points": None}
    return {
        "gpu_busy_by_cuda_events": round(sum(on_gpu) / length_ns, 5),
        "gpu_busy_error_points": round(100 * abs(reported_busy_ns - sum(on_gpu)) / length_ns, 3),
    }


async def split_errors(runner: ClockedTorch | ClockedSim, log: CallLog, account: PhaseAccount) -> list[float]:
    """Return the reported minus the true prefill share of each mixed step of the run."""
    errors = []
    for batch in list(log.mixed):
        alone = []
        for part in parts_of(batch):
            times = []
            for _ in range(REPEATS):
                await runner.run(part)
                times.append(log.calls[-1].end_ns - log.calls[-1].start_ns)
            alone.append(min(times))
        reported = split_step_ns(account.model, batch.work, UNIT)[0] / UNIT
        errors.append(reported - alone[0] / sum(alone))
    return errors


async def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    clock, log, shape = SystemClock(), CallLog(), shape_of(name, options.device)
    torch = name == "torch"
    config = EngineConfig(
        real_model_folder() if torch else None, name, device=options.device, prefill_chunk_tokens=shape.chunk_tokens
    )
    if options.device.startswith("cuda"):
        config = replace(config, kv_memory_mb=GPU_KV_MEMORY_MB)
    runner = ClockedTorch(config, log) if torch else ClockedSim(config, log)
    engine = LocalEngine(runner, config, clock)
    async with accounted(engine, clock) as (account, reader):
        device, unix_ns, clock_ns = engine.device, clock.now_ns(), time.perf_counter_ns()
        await serve(engine, reader, shape, options.seconds)
        length_ns = time.perf_counter_ns() - clock_ns
        await asyncio.sleep(0)
        account.cut()
        calls = list(log.calls)
        reported = account.phases(unix_ns, unix_ns + length_ns)
        adds = adds_exactly(account, unix_ns, length_ns)
        windows = window_errors(account, calls, unix_ns, clock_ns, length_ns // WINDOW_NS)
        splits = await split_errors(runner, log, account)
    busy = sum(call.end_ns - call.start_ns for call in calls) / length_ns
    mixed = sum(call.end_ns - call.start_ns for call in calls if call.kind is StepKind.MIXED) / length_ns
    return {
        "device": device,
        "seconds": round(length_ns / 1e9, 1),
        "steps": len(calls),
        "coverage": round(reported.covered_ns / length_ns, 4),
        "busy_reported": round((reported.prefill_ns + reported.decode_ns) / length_ns, 5),
        "busy_true": round(busy, 5),
        "mixed_true": round(mixed, 5),
        "busy_error_points": round(100 * abs((reported.prefill_ns + reported.decode_ns) / length_ns - busy), 3),
        "adds_exactly": adds,
        "pure_windows": len(windows),
        "pure_error_points_mean": round(100 * statistics.mean(windows), 3) if windows else None,
        "pure_error_points_max": round(100 * max(windows), 3) if windows else None,
        "split_steps": len(splits),
        "split_error_points_mean": round(100 * statistics.mean(map(abs, splits)), 2) if splits else None,
        "split_error_points_bias": round(100 * statistics.mean(splits), 2) if splits else None,
        **gpu_figures(calls, reported.prefill_ns + reported.decode_ns, length_ns),
    }


async def main(options: argparse.Namespace) -> None:
    found = {name: await measure(name, options) for name in options.engines}
    for key in next(iter(found.values())):
        print(f"{key:<26}" + "".join(f"{figures[key]!s:>22}" for figures in found.values()))
    print(json.dumps(found))
    if broken := [f"{name}: {fault}" for name, figures in found.items() for fault in faults(figures)]:
        sys.exit("\n".join(broken))


def parser() -> argparse.ArgumentParser:
    made = bench_parser(__doc__, seconds=(60.0, "of load on each engine"), device=("auto", "of the torch engine"))
    made.add_argument("--engines", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    return made


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))
