"""`python -m load.metrics.bench_cluster_phase`: is the occupancy that metrics reports of a whole cluster true?

Engines of several sizes, some for prompts and some for tokens, each with an independent clock around its model calls.
Their telemetry goes the way of every worker's into the windows that `/v1/occupancy` answers from; the truth is the sum
of the calls inside a window, weighed by GPUs. stdout: a table, then one JSON object as the last line; exits 1 where a
share of the cluster's GPU time is more than a percentage point off.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from libs.engine.config import EngineConfig
from libs.engine.local import LocalEngine
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.perfmodel.learner import StepKind
from libs.runtime.clock import SystemClock
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import History
from libs.telemetry.members import Members
from libs.telemetry.windows.rollups import RollUps
from libs.telemetry.worker.split import prefill_shares
from libs.testing.engines.engine import DirectFetcher, EventReader
from libs.testing.engines.phase_account import PhaseAccount
from load.engine.clocked import Call, CallLog, ClockedSim
from services.metrics.accounting.answer import GpuTime
from services.metrics.accounting.occupancy import cluster_occupancy

WINDOW_NS: Final = 1_000_000_000
LAG_S: Final = 1.0
"""Until telemetry of the last window is in."""
PROMPT_TOKENS: Final = (200, 2000)
BURST: Final = 8
"""Sequences that a decode engine is given at a time; their short prompts are one step, so that none is mixed."""
OUTPUT_TOKENS: Final = 40
PAUSE_S: Final = 0.3
AIM_POINTS: Final = 1.0
"""Of error, at most ..."""
AIMED_AT: Final = ("prefill_error_points", "decode_error_points", "idle_error_points", "window_error_points_mean")
"""... in these."""


@dataclass(frozen=True, slots=True)
class Member:
    """An engine of the cluster."""

    name: str
    gpus: int
    prompts: bool
    """It computes prompts; else tokens."""


CLUSTER: Final = (
    Member("prefill-0", 1, True),
    Member("prefill-1", 4, True),
    Member("decode-0", 1, False),
    Member("decode-1", 2, False),
    Member("decode-2", 8, False),
)


async def load(engine: LocalEngine, reader: EventReader, member: Member, seed: int) -> None:
    """Work with pauses, until cancelled."""
    random, key = np.random.default_rng(seed), 0
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    while True:
        for _ in range(1 if member.prompts else BURST):
            key += 1
            tokens = int(random.integers(*PROMPT_TOKENS)) if member.prompts else BURST
            prompt = random.integers(100, 200, tokens, dtype=np.int32)
            output = 1 if member.prompts else OUTPUT_TOKENS
            engine.submit(
                EngineRequest(key, f"{member.name}-{key}", EnginePhase.BOTH, prompt, tokens, output, sampling)
            )
        await reader.until(lambda: engine.load().running + engine.load().waiting == 0)
        await asyncio.sleep(random.exponential(PAUSE_S))


async def run(member: Member, fleet: FleetTelemetry, log: CallLog, seed: int, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    config = EngineConfig(None, "sim", prefill_chunk_tokens=512)
    engine = LocalEngine(ClockedSim(config, log), config, SystemClock())
    await engine.start(EngineIdentity(member.name, 1, ""), DirectFetcher(), lambda _stage, _share: None)
    account = PhaseAccount(engine, SystemClock(), worker_id=member.name, gpus=member.gpus, fleet=fleet)
    reader = EventReader(engine, account.on_event)
    tasks = [asyncio.ensure_future(work) for work in (account.run(), load(engine, reader, member, seed), stop.wait())]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # what ended before `stop` raises here
    finally:
        for task in tasks:
            task.cancel()
        await reader.close()
        await engine.close()


def true_ns(calls: dict[Member, list[Call]], low_ns: int, high_ns: int) -> dict[StepKind, int]:
    """GPU-nanoseconds of calls inside [low, high) by `time.perf_counter_ns`, by kind."""
    spent = dict.fromkeys(StepKind, 0)
    for member, log in calls.items():
        for call in log:
            spent[call.kind] += member.gpus * call.within(low_ns, high_ns)
    return spent


def windows_of(fleet: FleetTelemetry, unix_ns: int, windows: int) -> Callable[[int, int], GpuTime]:
    """What the service answers of [low, low + length), from windows that it has written as it always does."""
    rollups, members, end_ns = RollUps(), Members(), unix_ns + windows * WINDOW_NS
    written = History(fleet, rollups, members)
    written.resume(unix_ns)
    while (written.written_to_ns or 0) < end_ns:
        written.advance(end_ns)
    return lambda low, length: cluster_occupancy(fleet, rollups, members, unix_ns + low + length, length).gpu_ns


def errors(
    fleet: FleetTelemetry, calls: dict[Member, list[Call]], unix_ns: int, clock_ns: int, windows: int
) -> dict[str, Any]:
    """Reported less true share of GPU time, in percentage points, window by window and over all; `unix_ns` starts a
    window."""
    gpus = sum(member.gpus for member in calls)
    reported_in = windows_of(fleet, unix_ns, windows)

    def off(first: int, count: int) -> tuple[float, float, float]:
        low, length = first * WINDOW_NS, count * WINDOW_NS
        reported = reported_in(low, length)
        true = true_ns(calls, clock_ns + low, clock_ns + low + length)
        prefill = reported.prefill - true[StepKind.PREFILL]
        decode = reported.decode - true[StepKind.DECODE]
        idle = reported.idle - (gpus * length - sum(true.values()))
        return (100 * prefill / (gpus * length), 100 * decode / (gpus * length), 100 * idle / (gpus * length))

    each = [max(map(abs, off(number, 1))) for number in range(windows)]
    true, reported = true_ns(calls, clock_ns, clock_ns + windows * WINDOW_NS), off(0, windows)
    whole = reported_in(0, windows * WINDOW_NS)
    return {
        "engines": len(calls),
        "gpus": gpus,
        "seconds": windows * WINDOW_NS / 1e9,
        "steps": sum(map(len, calls.values())),
        "mixed_steps": sum(call.kind is StepKind.MIXED for log in calls.values() for call in log),
        "coverage": round(whole.covered / (gpus * windows * WINDOW_NS), 5),
        "ratio_reported": round(whole.prefill / max(whole.decode, 1), 5),
        "ratio_true": round(true[StepKind.PREFILL] / true[StepKind.DECODE], 5),
        "prefill_error_points": round(reported[0], 4),
        "decode_error_points": round(reported[1], 4),
        "idle_error_points": round(reported[2], 4),
        "window_error_points_mean": round(statistics.mean(each), 4),
        "window_error_points_max": round(max(each), 4),
    }


async def main(seconds: float) -> None:
    """Run the cluster, then compare."""
    fleet, stop, logs = FleetTelemetry(prefill_shares), asyncio.Event(), {member: CallLog() for member in CLUSTER}
    running = asyncio.gather(*(run(member, fleet, log, seed, stop) for seed, (member, log) in enumerate(logs.items())))
    await asyncio.sleep(LAG_S)
    unix_ns, clock_ns = time.time_ns(), time.perf_counter_ns()
    to_window_ns = -unix_ns % WINDOW_NS
    unix_ns, clock_ns = unix_ns + to_window_ns, clock_ns + to_window_ns
    await asyncio.sleep(to_window_ns / 1e9 + seconds + LAG_S)
    stop.set()
    await running
    found = errors(fleet, {member: log.calls for member, log in logs.items()}, unix_ns, clock_ns, int(seconds))
    for name, value in found.items():
        print(f"{name:<26}{value!s:>12}")
    print(json.dumps(found))
    if missed := [f"{key} is {found[key]}, the aim {AIM_POINTS:g}" for key in AIMED_AT if abs(found[key]) > AIM_POINTS]:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load that is compared")
    asyncio.run(main(parser.parse_args().seconds))
