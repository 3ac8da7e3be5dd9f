"""One seed: a cluster, its clients and its faults, from the first request until everything is at rest again."""

import asyncio
import gc
import io
import os
import random as global_random
from collections import Counter
from collections.abc import Callable, MutableMapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any
from unittest.mock import patch

import structlog

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.policy.roles import Role
from load.chaos.clients import Ask, Outcome, check, draw, send
from load.chaos.cluster import Cluster
from load.chaos.loop import Node, SimLoop, current_node
from load.chaos.net import CUT, Log, Net
from load.chaos.rpc import Call
from load.chaos.schedule import Fault, draw_schedule
from load.chaos.stores import Store

START_S = 3.0
ANSWER_S = 150.0
"""Virtual seconds after which a request counts as hanging."""
REST_S = 60.0
"""How long the cluster may take to come to rest once all clients are answered: streams back up, leases over."""
FIRST_ROLES = {"w0": "prefill", "w1": "prefill", "w2": "decode", "w3": "decode", "w4": "mixed"}
GATEWAYS = ("g0", "g1")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    requests: int = 300
    per_s: float = 40.0
    fault_every_s: float = 0.25


@dataclass
class Result:
    """What came of a seed."""

    seed: int
    digest: int = 0
    events: int = 0
    virtual_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    reroutes: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """That were answered, one way or another."""
        return sum(self.outcomes.values())


def run_seed(seed: int, plan: Plan, tell: Callable[[str], None] | None = None) -> Result:
    """Run it; the same seed, plan and code give the same result, digest included."""
    loop = SimLoop(Random(f"{seed} turns"))
    result = Result(seed)
    global_random.seed(seed)
    _log_to(tell, loop)
    gc.disable()  # finalizers would run at moments of their own
    try:
        with patch.object(os, "getpid", lambda: 1), redirect_stdout(io.StringIO()):
            world = _World(loop, seed, plan, result, tell)
            loop.set_exception_handler(world.unhandled)
            try:
                loop.run_until_complete(world.run())
            except Exception as error:  # a run that cannot go on is a finding, not a crash of the tool
                result.wrong.append(f"the run ended with {error!r}")
            world.close()
    finally:
        loop.close()
        gc.enable()
        gc.collect()
        structlog.reset_defaults()
    return result


class _World:
    def __init__(
        self, loop: SimLoop, seed: int, plan: Plan, result: Result, tell: Callable[[str], None] | None
    ) -> None:
        self.loop, self.plan, self.result = loop, plan, result
        self.log = Log(loop, tell)
        self.net = Net(loop, Random(f"{seed} network"), self.log)
        self.store = Store(loop, Random(f"{seed} stores"))
        self.cluster = Cluster(loop, self.net, self.store, result.wrong)
        self.client = Node("client")
        self.asks = Random(f"{seed} requests")
        self.schedule = draw_schedule(
            Random(f"{seed} faults"), duration_s=plan.requests / plan.per_s, every_s=plan.fault_every_s
        )
        self.names = count(len(FIRST_ROLES))
        self.spoil_left = 0
        self.kv_cut_left = 0
        self.net.spoil = self._spoil
        self.outcomes: list[Outcome] = []
        loop.add(self.client)

    async def run(self) -> None:
        """From start to rest."""
        for name in GATEWAYS:
            self.cluster.start_gateway(name)
        for name, role in FIRST_ROLES.items():
            self.cluster.start_worker(name, role)
        await asyncio.sleep(START_S)
        faults = self.loop.create_task(self._faults())
        requests = [self.loop.spawn(self.client, self._request(number)) for number in range(self.plan.requests)]
        _, hanging = await asyncio.wait(requests, timeout=ANSWER_S)
        for task in hanging:
            self.result.wrong.append("a request hangs")
            task.cancel()
        await faults
        for task in requests:
            if task not in hanging and (error := task.exception()) is not None:
                self.result.wrong.append(f"a client failed: {error!r}")
        await self._rest()
        self._check_events()
        await self._leave()
        result = self.result
        result.wrong += self.net.faults
        result.digest, result.events, result.virtual_s = self.log.digest, self.log.events, self.loop.time()

    def unhandled(self, _loop: Any, context: dict[str, Any]) -> None:
        """An exception that nobody took."""
        self.result.wrong.append(f"unhandled: {context['message']} {context.get('exception')!r}")

    def close(self) -> None:
        """End what dead processes and a broken run left, without a word."""
        wrong = list(self.result.wrong)
        self.cluster.bury(self.client)
        self.result.wrong = wrong

    # ------------------------------------------------------------ clients

    async def _request(self, number: int) -> None:
        ask = draw(number, self.asks)
        await asyncio.sleep(number / self.plan.per_s)
        outcome = await self._ask(ask)
        self.outcomes.append(outcome)
        self.result.outcomes[outcome.kind] += 1
        said = f"request {number} at {outcome.gateway}: {outcome.kind} {len(outcome.body)}"
        self.log.add(said, loud=outcome.kind not in ("ok", "left"))
        for fault in check(outcome):
            self.log.add(f"WRONG: request {number}: {fault}", loud=True)
            self.result.wrong.append(f"request {number} ({ask}): {fault}")

    async def _ask(self, ask: Ask) -> Outcome:
        """At one gateway, or at another one when that is down, as a load balancer would."""
        while True:
            for name in sorted(GATEWAYS, key=lambda name: name != GATEWAYS[ask.number % len(GATEWAYS)]):
                process = self.cluster.processes.get(name)
                if process is not None and process.up and not process.node.frozen:
                    outcome = await send(self.net, self.client, name, ask)
                    if outcome is not None:
                        return outcome
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------ faults

    async def _faults(self) -> None:
        for fault in self.schedule:
            await asyncio.sleep(max(START_S + fault.at_s - self.loop.time(), 0))
            target = self._target(fault)
            if target is not None:
                self.log.add(f"FAULT {fault.kind} {target} {fault.role} {fault.lasts_s:.3f} s", loud=True)
                self.result.faults[fault.kind] += 1
                self._do(fault, target)

    def _target(self, fault: Fault) -> str | None:
        """A process that is up, by the fault's own draw; empty for faults that have none."""
        if "worker" not in fault.kind and "gateway" not in fault.kind and "role" not in fault.kind:
            return ""
        found = self.cluster.gateways() if "gateway" in fault.kind else self.cluster.workers()
        found = [each for each in found if not each.node.frozen]
        if fault.kind == "kill gateway" and len(found) < 2:
            return None
        return found[int(fault.pick * len(found))].node.name if found else None

    def _do(self, fault: Fault, name: str) -> None:
        cluster, later = self.cluster, self.loop.after
        match fault.kind:
            case "kill worker" | "kill worker for good":
                cluster.kill(name)
                fresh = name if fault.kind == "kill worker" else f"w{next(self.names)}"
                later(fault.lasts_s, cluster.start_worker, fresh, fault.role if fault.pick < 0.3 else self._needed())
            case "stop worker":
                cluster.stop(name)
                later(5 + fault.lasts_s, self._start_again, name)
            case "freeze worker" | "freeze gateway":
                cluster.freeze(name)
                later(fault.lasts_s, cluster.thaw, name)
            case "cut worker" | "cut gateway":
                self.net.cut(cluster.processes[name].node, CUT)
            case "slow worker":
                self.net.slow_s[name] = fault.pick * 0.2
                later(fault.lasts_s, self.net.slow_s.pop, name, None)
            case "set role":
                self.loop.spawn(self.client, cluster.set_role(self.client, name, fault.role))
            case "rival roles":
                self.loop.spawn(self.client, cluster.set_role(self.client, name, fault.role, fault.rival))
            case "kill gateway":
                cluster.kill(name)
                later(fault.lasts_s, cluster.start_gateway, name)
            case "damage KV":
                self.spoil_left += 1
            case "cut KV":
                self.kv_cut_left += 1
            case _:
                self._do_to_stores(fault)

    def _do_to_stores(self, fault: Fault) -> None:
        store, later = self.store, self.loop.after
        match fault.kind:
            case "broker away":
                store.broker.away = True
                later(fault.lasts_s, store.broker.back)
            case "lose Redis":
                store.lose()
            case "Redis away":
                store.away = True
                later(fault.lasts_s, setattr, store, "away", False)
            case "registry late":
                store.late_s = fault.lasts_s
                later(5.0, setattr, store, "late_s", 0.0)

    def _needed(self) -> str:
        """The role that fewest workers have."""
        roles = [each.worker.host.assignment.current.role for each in self.cluster.workers() if each.worker]
        return "prefill" if roles.count(Role.PREFILL) <= roles.count(Role.MIXED) else "decode"

    def _start_again(self, name: str) -> None:
        if name not in self.cluster.processes:
            self.cluster.start_worker(name, self._needed())

    def _spoil(self, call: Call, data: bytes) -> bytes:
        """Change what a frame says of a KV chunk, or cut the stream in the middle of its pulls."""
        if not call.method.endswith("/Pull"):
            return data
        frame = pb.KvFrame.FromString(data)
        if not frame.chunks:
            return data
        if self.spoil_left:
            self.spoil_left -= 1
            frame.chunks[0].data_bytes ^= 1
            return frame.SerializeToString()
        if self.kv_cut_left:
            self.kv_cut_left -= 1
            self.loop.after(0, call.broken, CUT)
        return data

    # ------------------------------------------------------------ rest

    async def _rest(self) -> None:
        """Heal everything, give each phase a worker, and wait until all counters are what they are at rest."""
        self.store.away, self.store.late_s = False, 0.0
        self.store.broker.back()
        self.net.slow_s.clear()
        for name in list(self.cluster.processes):
            self.cluster.thaw(name)
        deadline_s = self.loop.time() + REST_S
        while (left := list(self.cluster.unsettled())) and self.loop.time() < deadline_s:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.25)
        self.result.wrong += [f"at rest: {text}" for text in left]

    def _check_events(self) -> None:
        """One event for each choice of each answered request, whatever way it ended."""
        events: dict[str, list[RequestEvent]] = {}
        broker = self.store.broker
        lost = {value.request_id for value in broker.lost if isinstance(value, RequestEvent)}
        for value in broker.kept:
            if isinstance(value, RequestEvent):
                self.result.reroutes += value.reroutes
                events.setdefault(value.request_id, []).append(value)
        for outcome in self.outcomes:
            if outcome.kind != "ok":
                continue
            ask = outcome.ask
            for index in range(ask.n):
                request_id = f"request-{ask.number}" + (f"-{index}" if ask.n > 1 else "")
                found = events.get(request_id, [])
                if not found and request_id in lost:  # with a gateway that was killed before the broker was back
                    continue
                if [event.outcome for event in found] != [OUTCOME_OK]:
                    self.result.wrong.append(f"{request_id}: events {[event.outcome for event in found]}")
                elif found[0].output_tokens != ask.expected_tokens(index):
                    self.result.wrong.append(f"{request_id}: its event tells {found[0].output_tokens} tokens")

    async def _leave(self) -> None:
        """Stop everything as SIGTERM would; nothing may be left."""
        for name in list(self.cluster.processes):
            self.cluster.stop(name)
        mains = [process.main for process in self.cluster.processes.values() if process.main is not None]
        if mains:
            _, left = await asyncio.wait(mains, timeout=60)
            self.result.wrong += [f"{task} does not stop" for task in left]
        if self.net.calls:
            self.result.wrong.append(
                f"{len(self.net.calls)} calls are left open: {[str(c) for c in self.net.calls][:5]}"
            )


def _log_to(tell: Callable[[str], None] | None, loop: SimLoop) -> None:
    """The services' own log, to whoever follows the run."""

    def write(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        if tell is not None:
            words = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
            tell(f"{loop.time():.6f}   {current_node()}: {event['event']} {words}")
        raise structlog.DropEvent

    structlog.configure(processors=[write], cache_logger_on_first_use=False)
