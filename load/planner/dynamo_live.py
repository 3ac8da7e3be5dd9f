"""Dynamo's load policy on a live suite. It decides from our workers' telemetry, by restarts or by role moves.

A worker that the policy restarts is on standby for the time in which a replica starts, and then has its other role. Its
work moves with its KV or ends in place, whereas Dynamo's own restart aborts it. The suite therefore does better with
this policy than Dynamo would. Without a start time, the worker changes its role as ours do, which separates the policy
from its mechanism. Prompts that wait in our gateways count as queued at prefill workers, in equal parts.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httpx

from libs.bus.kafka import KafkaBus
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import StepRow, step_rows
from libs.contracts.topics import STEPS
from libs.lab.rivals.dynamo import START_S, DynamoMover
from libs.lab.rivals.port import Move, RecentRequests, RivalSetting, SeenCluster, SeenWorker
from libs.policy.roles import Role
from libs.policy.step_time import StepWork
from libs.testing.suites.suite import RunningSuite

ROLES: Final = {"prefill": Role.PREFILL, "decode": Role.MIXED, "mixed": Role.MIXED, "standby": Role.STANDBY}
ACTOR: Final = "dynamo-load"
# The upper bound of a worker's newest steps that are kept between two decisions.
MAX_STEPS: Final = 256


@dataclass(slots=True)
class WorkerTelemetry:
    """The telemetry of one worker since the last decision."""

    batch: StepBatch
    steps: list[tuple[StepWork, int]] = field(default_factory=list)

    def take(self, batch: StepBatch) -> None:
        self.batch = batch
        self.steps = [*self.steps, *(_timed(each) for each in step_rows(batch.steps))][-MAX_STEPS:]


class DynamoLive:
    """Dynamo's policy on a suite. It decides every `DynamoMover.every_ns` and changes roles, until cancelled."""

    def __init__(self, suite: RunningSuite, cluster: RivalSetting, start_s: float = START_S) -> None:
        """Create the rival. A moved worker serves again after `start_s`; 0 models a move without a restart."""
        self._suite = suite
        self._cluster = cluster
        self._start_s = start_s
        self._mover = DynamoMover(cluster, "load", "kalman")
        self._received: dict[str, WorkerTelemetry] = {}
        self._starting: set[str] = set()
        self.moves: list[tuple[int, str, str]] = []
        """(Unix ns, worker, new role) of each move."""

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self._suite.ready['token']}"}
        url = self._suite.ready["planner"]
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, timeout=10) as http,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._listen(), name="steps")
            while True:
                await asyncio.sleep(self._mover.every_ns / 1e9)
                listed = (await http.get("/v1/workers")).json()
                models = (await http.get("/v1/planner")).json()["models"]
                waiting_ms = sum(model["now"]["waiting_ms"] for model in models if model["now"])
                names = sorted(each["id"] for each in listed)
                for move in self._decide(names, {each["id"]: each for each in listed}, waiting_ms):
                    tasks.create_task(self._move(http, names[move.index], move), name=f"move {move.index}")

    def _decide(self, names: Sequence[str], listed: Mapping[str, Any], waiting_ms: float) -> Sequence[Move]:
        """Return the policy's moves. `waiting_ms` is the time that one worker would take for all waiting prompts."""
        chunk, prefill = self._cluster.speed.chunk_tokens, sum(each["role"] == "prefill" for each in listed.values())
        tokens = round(waiting_ms * 1e6 * chunk / self._cluster.speed.prompt_ns(chunk, chunk**2) / max(prefill, 1))
        workers = [self._seen(index, name, listed[name], tokens) for index, name in enumerate(names)]
        for received in self._received.values():
            received.steps = []
        if any(worker is None for worker in workers):
            return ()  # a worker has sent nothing yet
        seen = SeenCluster(
            time.time_ns(), [each for each in workers if each is not None], RecentRequests(), self._cluster.slo
        )
        return self._mover.moves(seen)

    def _seen(self, index: int, name: str, listed: Mapping[str, Any], waiting_tokens: int) -> SeenWorker | None:
        received = self._received.get(name)
        if received is None:
            return None
        load, role = received.batch.load, ROLES[listed["role"]]
        decodes = load.running if role is Role.MIXED else 0
        return SeenWorker(
            index=index,
            role=role,
            budget_tokens=listed["budget_tokens"],
            ready=name not in self._starting and role is not Role.STANDBY,
            speed=self._cluster.speed,
            max_sequences=self._cluster.max_sequences,
            kv_blocks=received.batch.kv_blocks,
            block_tokens=max(received.batch.block_size_tokens, 1),
            prompts=load.waiting,
            prompt_tokens=waiting_tokens if role is Role.PREFILL else 0,
            decodes=decodes,
            queued_decodes=load.awaiting_kv,
            kv_tokens=(received.batch.kv_blocks - load.free_kv_blocks) * received.batch.block_size_tokens,
            free_blocks=load.free_kv_blocks,
            steps=received.steps,
        )

    async def _move(self, http: httpx.AsyncClient, name: str, move: Move) -> None:
        role = "prefill" if move.role is Role.PREFILL else "decode"
        self._starting.add(name)
        self.moves.append((time.time_ns(), name, role))
        try:
            for wanted in ("standby", role) if self._start_s else (role,):
                body = {"role": wanted, "actor": ACTOR, "reason": "rebalance", "force": True}
                (await http.put(f"/v1/workers/{name}/role", json=body)).raise_for_status()
                if wanted == "standby":
                    await asyncio.sleep(self._start_s)
        finally:
            self._starting.discard(name)

    async def _listen(self) -> None:
        bus = KafkaBus(self._suite.ready["kafka"], self._suite.ready["cluster"], "dynamo-live")
        try:
            async with aclosing(cast(Any, bus.subscribe([STEPS]))) as records:
                async for record in records:
                    batch = cast(StepBatch, record.value)
                    self._received.setdefault(batch.worker_id, WorkerTelemetry(batch)).take(batch)
        finally:
            await bus.close()


def _timed(row: StepRow) -> tuple[StepWork, int]:
    work = StepWork(
        row.prefill_tokens,
        row.prefill_sequences,
        row.prefill_context_tokens,
        row.decode_sequences,
        row.decode_kv_tokens,
        row.prefill_squared_tokens,
    )
    return work, row.end_unix_ns - row.start_unix_ns
