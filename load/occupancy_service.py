"""The metrics service's own parts in a process of their own, fed with records as its bus client hands them over.

`python -m load.occupancy_service GPUS`: prints its address, serves until its stdin ends, then prints what it used as
JSON. Values come serialised, so that decoding them is part of the cost; fetching from the broker is not.
"""

import asyncio
import json
import resource
import sys
import time
from typing import Final

from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import STEPS
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.telemetry.split import prefill_share
from services.metrics.alerts.desk import AlertDesk
from services.metrics.api import make_api
from services.metrics.hub import Hub
from services.metrics.live import TICK_NS, tick_forever
from services.metrics.prometheus import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.ticks import TickWriter

MS_NS: Final = 1_000_000


async def take_forever(fleet: asyncio.StreamReader, state: MetricsState, clock: SystemClock) -> None:
    """Enter what the fleet sends."""
    while True:
        length = int.from_bytes(await fleet.readexactly(4), "little")
        value = StepBatch.FromString(await fleet.readexactly(length))
        state.take(Record(STEPS, value.worker_id, value, 0, 0), clock.now_ns())


async def main(gpus: int) -> None:
    """Serve until stdin ends."""
    settings = MetricsSettings()
    clock, hub, tasks = SystemClock(), Hub(), TaskOwner()
    state = MetricsState(prefill_share, RequestMetrics(CollectorRegistry()))
    lag_ns, live_lag_ns = settings.lag_ms * MS_NS, settings.live_lag_ms * MS_NS
    desk = AlertDesk(state, settings.alert_limits(), lag_ns=live_lag_ns)
    api = make_api(state, hub, desk.book, clock, CollectorRegistry(), lag_ns=lag_ns, live_lag_ns=live_lag_ns)
    writer = TickWriter(window_ns=TICK_NS, settled_ns=lag_ns)
    feeder = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "load.synthetic_fleet", str(gpus), stdout=asyncio.subprocess.PIPE, limit=2**20
    )
    assert feeder.stdout
    tasks.spawn("ingest", take_forever(feeder.stdout, state, clock))
    tasks.spawn("live", tick_forever(state, hub, writer, desk, clock, lag_ns=live_lag_ns))
    async with serve_http(api, bind("127.0.0.1", 0, "PORT"), tasks=tasks) as url:
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        print(json.dumps({"url": url}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        newest_ns = max((facts.covered_to_unix_ns for facts in state.fleet.listed(0)), default=0)
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
    asyncio.run(main(int(sys.argv[1])))
