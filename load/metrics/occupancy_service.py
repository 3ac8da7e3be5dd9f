"""The metrics service's own parts in a separate process that gets the records which the bus client would deliver.

`python -m load.metrics.occupancy_service GPUS` prints its address, serves until its stdin ends, then prints its usage
as JSON. Values arrive serialised, so that the cost includes decoding but no access to a broker. With `--instances N
--number I --sockets FOLDER` it is one of several instances that share the fleet and exchange windows by sockets.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent, SharedWindows, StepBatch
from libs.contracts.step_row import StepRow, step_columns
from libs.contracts.topics import STEPS, WINDOWS, Topic
from libs.keys.gate import ChangeGuard
from libs.policy.reading import Shares
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind, serve_http
from libs.runtime.service import collect_seldom
from libs.runtime.tasks import TaskOwner
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import MAX_FLEET_STEPS
from libs.telemetry.rollups import StoredWindow, Written
from libs.telemetry.steps import PhaseTime
from libs.telemetry.timeline import MAX_STEPS
from libs.telemetry.workers import Member
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingBus
from load.metrics.synthetic_fleet import synthetic_fleet
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.alerts.run import open_alerts
from services.metrics.http.routes import make_api
from services.metrics.requests import MAX_REQUESTS, RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.sharing import Sharing
from services.metrics.state import MetricsState
from services.metrics.stream import TICK_NS, Hub, TickWriter, tick_forever

STEP_NS: Final = 16_000_000
MS_NS: Final = 1_000_000
# The role's number in roll-ups.
DECODE: Final = 2


def fill(state: MetricsState, worker_ids: Sequence[str], now_ns: int) -> None:
    """Fill a state to all of its bounds up to `now_ns`, as after two days with a fleet.

    It then has windows of all tiers, steps with their work, and requests.
    """
    _fill_windows(state, worker_ids, now_ns)
    steps = min(MAX_STEPS, MAX_FLEET_STEPS // len(worker_ids))
    for worker_id in worker_ids:
        busy = _busy(worker_id, steps, now_ns - MS_NS)
        state.fleet.add(busy, now_ns)
        # A worker's state includes its newest batch. No real batch is as large as the one that filled it.
        newest = StepBatch(worker_id=worker_id, sequence=2, node=busy.node, gpus=busy.gpus, engine=busy.engine)
        newest.covered_from_unix_ns, newest.covered_to_unix_ns = busy.covered_to_unix_ns, now_ns
        state.fleet.add(newest, now_ns)
    for number in range(MAX_REQUESTS):
        arrival_ns = now_ns - (MAX_REQUESTS - number) * MS_NS - 400 * MS_NS
        event = RequestEvent(
            request_id=f"chatcmpl-{number:032x}", prefill_worker=worker_ids[0], decode_worker=worker_ids[-1],
            model="model-0", arrival_unix_ns=arrival_ns, ttft_ns=100 * MS_NS, decode_ns=300 * MS_NS, outcome=OUTCOME_OK,
            prompt_tokens=512, output_tokens=64,
        )  # fmt: skip
        state.requests.add(event, now_ns)


def _fill_windows(state: MetricsState, worker_ids: Sequence[str], now_ns: int) -> None:
    finest, *coarse = state.rollups.tiers
    newest_ns = now_ns - now_ns % finest.window_ns
    written = [Written(each, PhaseTime(finest.window_ns, 0, finest.window_ns // 2, 0), DECODE) for each in worker_ids]
    for back in range(finest.windows, 0, -1):
        state.rollups.write(newest_ns - back * finest.window_ns, written)
    state.members.enter(Member(each, "node", "model-0", 1) for each in worker_ids)
    for tier in coarse:
        times = np.tile(np.array([tier.window_ns, 0, tier.window_ns // 2, 0], np.int64), (len(worker_ids), 1))
        roles = np.full(len(worker_ids), DECODE, np.uint8)
        start_ns = now_ns - now_ns % tier.window_ns
        for back in range(tier.windows - 1, -1, -1):
            state.rollups.restore(
                StoredWindow(tier.window_ns, start_ns - back * tier.window_ns, worker_ids, times, roles)
            )


def _busy(worker_id: str, steps: int, now_ns: int) -> StepBatch:
    """Return a worker's batch with its model's shape, from an incarnation before the live one."""
    began_ns = now_ns - steps * STEP_NS
    starts_ns = range(began_ns, now_ns, STEP_NS)
    return StepBatch(
        worker_id=worker_id, sequence=1, node="node", gpus=1, engine="sim",
        covered_from_unix_ns=began_ns, covered_to_unix_ns=now_ns,
        compute=Compute(layer_parameters=10**9, parameter_bytes=2, peak_flops_per_s=1e15, peak_bytes_per_s=1e12),
        steps=step_columns(
            StepRow(start_ns, start_ns + STEP_NS, decode_sequences=16, decode_kv_tokens=16_000)
            for start_ns in starts_ns
        ),
    )  # fmt: skip


LENGTH_BYTES: Final = 4
PIECE_BYTES: Final = 2**15
PEERS_S: Final = 10.0


class Intake:
    """The reader of serialised messages, each of which follows its length."""

    def __init__(self, state: MetricsState, clock: SystemClock) -> None:
        self._state = state
        self._clock = clock

    async def take_forever(self, source: asyncio.StreamReader, topic: Topic) -> None:
        """Process messages until cancelled or the source ends.

        All messages that have arrived are taken at once, as by a consumer.
        """
        rest = b""
        while piece := await source.read(PIECE_BYTES):
            rest, at = rest + piece, 0
            while at + LENGTH_BYTES <= len(rest):
                end = at + LENGTH_BYTES + int.from_bytes(rest[at : at + LENGTH_BYTES], "little")
                if end > len(rest):
                    break
                value = topic.value.FromString(rest[at + LENGTH_BYTES : end])
                self._state.take(Record(topic, "", value, 0, 0), self._clock.now_ns())
                at = end
            rest = rest[at:]
            await asyncio.sleep(0)  # a stream with more data would starve the other tasks


class Peers:
    """The connections to the other instances. It reads from each of them and writes to all."""

    def __init__(self, folder: Path, number: int, instances: int) -> None:
        self._path = folder / str(number)
        self._others = [folder / str(other) for other in range(instances) if other != number]
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    def send(self, message: SharedWindows) -> None:
        value = message.SerializeToString()
        for writer in [each for each in self._writers if not each.is_closing()]:
            writer.write(len(value).to_bytes(LENGTH_BYTES, "little") + value)

    async def connect(self, intake: Intake, tasks: TaskOwner) -> None:
        """Wait until both directions to every other instance are connected."""
        self._server = await asyncio.start_unix_server(lambda _, writer: self._writers.append(writer), self._path)
        for other in self._others:
            await until(other.exists, timeout_s=PEERS_S)
            reader, _ = await asyncio.open_unix_connection(other, limit=2**24)
            tasks.spawn("peer", intake.take_forever(reader, WINDOWS))
        await until(lambda: len(self._writers) == len(self._others), timeout_s=PEERS_S)


async def main(options: argparse.Namespace) -> None:
    settings = MetricsSettings()
    clock, hub, tasks = SystemClock(), Hub(), TaskOwner()
    sharing, peers = None, None
    if options.instances > 1:
        peers = Peers(options.sockets, options.number, options.instances)
        sharing = Sharing(Shares(f"metrics-{options.number}"), peers.send, began_ns=clock.now_ns())
    state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()), sharing)
    lag_ns, live_lag_ns = settings.lag_ms * MS_NS, settings.live_lag_ms * MS_NS
    desk = AlertEvaluator(state, settings.alert_limits(), lag_ns=live_lag_ns)
    alerts = open_alerts(
        settings,
        RecordingBus(),
        desk,
        clock,
        began_ns=clock.now_ns(),
        make_client=None,
        guard=ChangeGuard(None, clock, token=""),
    )
    api = make_api(
        state, hub, desk.book, clock, CollectorRegistry(), lag_ns=lag_ns, live_lag_ns=live_lag_ns, more=[alerts.router]
    )
    writer, intake = TickWriter(window_ns=TICK_NS, settled_ns=lag_ns), Intake(state, clock)
    if options.full:
        fill(state, [worker.id for worker in synthetic_fleet(options.gpus)], clock.now_ns())
    if peers is not None:
        await peers.connect(intake, tasks)
    feeder = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "load.metrics.synthetic_fleet",
        *map(str, (options.gpus, options.number, options.instances)),
        stdout=asyncio.subprocess.PIPE, limit=2**20,
    )  # fmt: skip
    assert feeder.stdout
    tasks.spawn("ingest", intake.take_forever(feeder.stdout, STEPS))
    tasks.spawn("live", tick_forever(state, hub, writer, desk, clock, lag_ns=live_lag_ns))
    async with serve_http(api, bind("127.0.0.1", 0, "PORT"), tasks=tasks) as url:
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        print(json.dumps({"url": url}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        own = (facts for facts in state.fleet.directory.known() if state.fleet.directory.is_own(facts.worker_id))
        newest_ns = max((facts.covered_to_unix_ns for facts in own), default=0)
        behind_ns = max(clock.now_ns() - newest_ns, 0)
        hub.close()
    await tasks.close()
    feeder.kill()
    await feeder.wait()
    if tasks.error is not None:
        raise tasks.error
    used = {
        "cpu_share": cpu_s / wall_s,
        "late_ms": behind_ns / 1e6,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "skipped_ticks": hub.skipped_ticks,
        "unrevised_windows": state.history.unrevised_windows,
    }
    print(json.dumps(used), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("gpus", type=int)
    parser.add_argument("--full", action="store_true", help="begin with everything kept that is ever kept")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--number", type=int, default=0, help="of this instance")
    parser.add_argument("--sockets", type=Path, help="a folder that all instances share")
    options = parser.parse_args()
    collect_seldom()  # as services do
    uvloop.run(main(options))
