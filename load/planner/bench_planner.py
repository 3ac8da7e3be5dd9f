"""`make bench-planner`: measure CPU time a second, and the time of a decision, for a planner with many workers.

The planner's state receives serialised messages like those of a metrics service and two gateways: loads ten times a
second, queues five times. Demand changes from decodes to prompts and back every five seconds, so that there are
decisions to make. They are carried out at once. The figures include parsing, state updates, decisions and serialising,
but not the broker's client.
"""

import json
import random
import time
from typing import Any, Final

import numpy as np

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    ROLE_PREFILL,
    WORKER_STATE_READY,
    Assignment,
    Capabilities,
    RoleChange,
    Worker,
)
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_AUTO
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    FleetLoads,
    GatewayQueues,
    LoadWindow,
    ModelQueue,
    WorkerStepTime,
)
from libs.contracts.roles import role_from_name
from libs.perfmodel.learner import FittedModel, KindFit
from libs.perfmodel.profiles import PROFILES
from libs.perfmodel.wire import step_time_message
from libs.runtime.service import collect_seldom
from libs.telemetry.fleet_loads import COLUMNS, STEP_TIMES, WINDOW_NS
from load.measure import bench_parser, percentiles
from services.planner.state import Identity, PlannerState

START_NS: Final = 1_700_000_000_000_000_000
TURN_S: Final = 5
PERIOD_NS: Final = 200_000_000
MODELS: Final = 3
CHUNK_TOKENS: Final = 2_048
SEQUENCES: Final = 64
KV_BLOCKS: Final = 20_000
PROFILE: Final = PROFILES["llama-8b-h100"].step_time
KEPT: Final = 1_000


class Fleet:
    """Workers that carry out every order, and report it."""

    def __init__(self, workers: int, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        chance = random.Random(seed)
        self.workers = [_worker(number, chance) for number in range(workers)]
        self._ids = [each.id for each in self.workers]
        self._turn = 0

    def loads(self, now_ns: int, *, prompts_press: bool) -> bytes:
        """Return a serialised message with the loads of all workers."""
        count = len(self.workers)
        prefill = np.array([each.assignment.role == ROLE_PREFILL for each in self.workers])
        noise = self._chance.uniform(0.8, 1.2, count)
        message = FleetLoads(metrics_id="metrics", incarnation=1, told_unix_ns=now_ns, worker_ids=self._ids)
        busy = np.where(prefill, 0.95 if prompts_press else 0.25, 0.1) * noise
        columns = {
            "incarnations": np.ones(count),
            "covered_to_unix_ns": np.full(count, now_ns),
            "epochs": np.array([each.assignment.epoch for each in self.workers]),
            "roles": np.array([each.assignment.role for each in self.workers]),
            "budget_tokens": np.array([each.assignment.budget_tokens for each in self.workers]),
            "running": np.where(prefill, 2, (12 if prompts_press else 55) * noise),
            "waiting": np.where(prefill, 3, 0),
            "waiting_prefill_tokens": np.where(prefill, (9_000 if prompts_press else 500) * noise, 0),
            "free_kv_blocks": np.where(prefill, KV_BLOCKS, KV_BLOCKS * (0.8 if prompts_press else 0.3)),
        }
        for name in COLUMNS:
            setattr(message, name, np.asarray(columns.get(name, np.zeros(count))).astype("<u8").tobytes())
        times = np.minimum(busy, 1.0) * WINDOW_NS
        start_ns = now_ns // WINDOW_NS * WINDOW_NS - WINDOW_NS
        message.windows.append(
            LoadWindow(
                start_unix_ns=start_ns,
                covered_ns=np.full(count, WINDOW_NS).astype("<u8").tobytes(),
                prefill_ns=times.astype("<u8").tobytes(),
                decode_ns=np.zeros(count).astype("<u8").tobytes(),
            )
        )
        for _ in range(min(count, STEP_TIMES)):
            fitted = FittedModel(PROFILE.scaled(1 + self._turn % 97 / 1e4), *(KindFit(500 + self._turn),) * 3)
            message.step_times.append(WorkerStepTime(worker=self._turn % count, step_time=step_time_message(fitted)))
            self._turn += 1
        return message.SerializeToString()

    def queues(self, now_ns: int, *, prompts_press: bool) -> bytes:
        """Return a serialised message with the queue of one gateway."""
        tokens = 40 * len(self.workers) if prompts_press else 0
        queues = [
            ModelQueue(model=f"model-{number}", prefill_requests=tokens // 500, prefill_tokens=tokens)
            for number in range(MODELS)
        ]
        reported = GatewayQueues(
            gateway_id="gateway", incarnation=1, told_unix_ns=now_ns, queues=queues if tokens else []
        )
        return reported.SerializeToString()


def _worker(number: int, chance: random.Random) -> Worker:
    role, budget_tokens = role_from_name("prefill" if chance.random() < 0.4 else "decode")
    return Worker(
        id=f"worker-{number:04}", incarnation=1, node=f"node-{number // 8:03}", gpus=1, state=WORKER_STATE_READY,
        assignment=Assignment(model=f"model-{number % MODELS}", role=role, budget_tokens=budget_tokens, epoch=1),
        capabilities=Capabilities(
            block_size_tokens=16, kv_blocks=KV_BLOCKS, max_sequences=SEQUENCES, chunk_tokens=CHUNK_TOKENS
        ),
    )  # fmt: skip


def run(workers: int, seconds: int, seed: int = 1) -> dict[str, Any]:
    """Return the CPU time of each part, and the times of decisions."""
    fleet, state = (
        Fleet(workers, seed),
        PlannerState(
            Identity("planner", START_NS, MODE_AUTO), lag_ns=400_000_000, window_ns=2_000_000_000, kept_decisions=KEPT
        ),
    )
    state.lead = state.lead.OURS
    registered = [Worker.FromString(each.SerializeToString()) for each in fleet.workers]
    state.take_workers(registered, START_NS)
    spent = {"loads": 0, "queues": 0, "registry": 0, "decide": 0}
    ticks_ns: list[int] = []
    moves = decisions = 0
    for tenth in range(1, seconds * 10 + 1):
        now_ns = START_NS + tenth * WINDOW_NS
        press = tenth // (10 * TURN_S) % 2 == 1
        reported, queued = fleet.loads(now_ns, prompts_press=press), fleet.queues(now_ns, prompts_press=press)
        began = time.thread_time_ns()
        state.take_loads(FleetLoads.FromString(reported), now_ns)
        spent["loads"] += time.thread_time_ns() - began
        if tenth % 2:
            continue
        began = time.thread_time_ns()
        state.take_queues(GatewayQueues.FromString(queued), now_ns)
        queues_ns = time.thread_time_ns()
        spent["queues"] += queues_ns - began
        decided = state.decide(now_ns)
        for decision in decided.decisions:
            decision.SerializeToString()
        ticks_ns.append(time.thread_time_ns() - queues_ns)
        spent["decide"] += ticks_ns[-1]
        decisions += len(decided.decisions)
        moves += len(decided.orders)
        by_id = {each.id: each for each in fleet.workers}
        for order in decided.orders:
            worker = by_id[order.worker.id]
            worker.assignment.CopyFrom(order.wanted)
            worker.role_change.CopyFrom(RoleChange(actor="planner", unix_ns=now_ns))
            state.done(order, order.wanted, now_ns)
        if decided.orders or tenth % 10 == 0:
            listed = [Worker.FromString(each.SerializeToString()) for each in fleet.workers]
            began = time.thread_time_ns()
            state.take_workers(listed, now_ns)
            spent["registry"] += time.thread_time_ns() - began
    ticks_ms = [each / 1e6 for each in ticks_ns]
    return {
        "workers": workers,
        "seconds": seconds,
        "cpu_share": sum(spent.values()) / (seconds * 1e9),
        "cpu_by_part": {name: each / (seconds * 1e9) for name, each in spent.items()},
        "tick_ms": {**(percentiles(ticks_ms) or {}), "most": max(ticks_ms)},
        "decisions": decisions,
        "changes": moves,
    }


def main() -> None:
    options = bench_parser(__doc__, workers=[100, 1000], seconds=(60, "of the planner's time")).parse_args()
    found = []
    print(f"{'workers':>8} {'CPU':>7} {'tick p50':>9} {'p99':>7} {'most':>7}  ms   by part")
    for workers in options.workers:
        run(workers, 3)  # warms up
        collect_seldom()  # as services do
        row = run(workers, options.seconds)
        found.append(row)
        tick, parts = row["tick_ms"], ", ".join(f"{name} {each:.1%}" for name, each in row["cpu_by_part"].items())
        print(
            f"{workers:>8} {row['cpu_share']:>7.1%} {tick['p50']:>9.2f} {tick['p99']:>7.2f} {tick['most']:>7.2f}"
            f"       {parts}"
        )
    print(json.dumps({"sizes": found}))


if __name__ == "__main__":
    main()
