"""The faults of a run.

They are drawn from a seed before the run, so that the run cannot change them, and then injected.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Literal

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.policy.roles import Role
from load.chaos.cluster import Cluster
from load.chaos.invariants import METRICS, PLANNER
from load.chaos.loop import Node
from load.chaos.net import CUT
from load.chaos.rpc import Call

Kind = Literal[
    "kill worker", "kill worker for good", "stop worker", "freeze worker", "cut worker", "slow worker", "set role",
    "rival roles", "kill gateway", "freeze gateway", "cut gateway", "damage KV", "cut KV", "lose Redis", "Redis away",
    "registry late", "broker away", "kill planner", "kill metrics", "stop planner", "stop metrics", "freeze planner",
    "freeze metrics", "freeze Redis", "freeze broker",
]  # fmt: skip
WEIGHTS: dict[Kind, int] = {
    "kill worker": 10, "kill worker for good": 4, "stop worker": 5, "freeze worker": 10, "cut worker": 8,
    "slow worker": 8, "set role": 14, "rival roles": 6, "kill gateway": 2, "freeze gateway": 2, "cut gateway": 3,
    "damage KV": 6, "cut KV": 8, "lose Redis": 3, "Redis away": 3, "registry late": 3, "broker away": 4,
}  # fmt: skip
CONTROL_WEIGHTS: dict[Kind, int] = {
    "kill planner": 3, "kill metrics": 3, "stop planner": 1, "stop metrics": 1, "freeze planner": 3,
    "freeze metrics": 3, "freeze Redis": 2, "freeze broker": 3,
}  # fmt: skip
"""The faults of planner and metrics, and of the stores that they use, by weight."""
ROLES = ("prefill", "decode", "mixed", "standby")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `pick` in [0, 1) chooses among the targets that exist when it is injected."""

    at_s: float
    kind: Kind
    pick: float
    lasts_s: float
    role: str
    rival: str
    """The role that another caller requests at the same moment."""


def draw_schedule(of: Mapping[Kind, int], random: Random, *, duration_s: float, every_s: float) -> list[Fault]:
    """Draw faults of these kinds by weight, at random times with one each `every_s` on average."""
    kinds, weights = list(of), list(of.values())
    faults: list[Fault] = []
    at_s = random.expovariate(1 / every_s)
    while at_s < duration_s:
        faults.append(
            Fault(
                at_s=at_s,
                kind=random.choices(kinds, weights)[0],
                pick=random.random(),
                lasts_s=min(random.expovariate(1 / 1.0), 6.0),
                role=random.choices(ROLES, (4, 4, 3, 1))[0],
                rival=random.choice(ROLES),
            )
        )
        at_s += random.expovariate(1 / every_s)
    return faults


class FaultInjector:
    """An injector of a fault schedule into a cluster. `done` counts faults by kind."""

    def __init__(self, cluster: Cluster, client: Node, first_name: int) -> None:
        """Create the injector, which sets roles from the node `client`.

        New workers are numbered from `first_name` on.
        """
        self.done = Counter[str]()
        self._cluster, self._client = cluster, client
        self._loop, self._net, self._stores, self._log = cluster.loop, cluster.net, cluster.stores, cluster.net.log
        self._names = count(first_name)
        self._spoil_left = 0
        self._kv_cut_left = 0
        self._net.spoil = self._spoil

    async def run(self, schedule: Sequence[Fault]) -> None:
        """Inject each fault at its time, counted from now."""
        began_s = self._loop.time()
        for fault in schedule:
            await asyncio.sleep(max(began_s + fault.at_s - self._loop.time(), 0))
            target = self._target(fault)
            if target is not None:
                self._log.add(f"FAULT {fault.kind} {target} {fault.role} {fault.lasts_s:.3f} s", loud=True)
                self.done[fault.kind] += 1
                self._do(fault, target)

    def _target(self, fault: Fault) -> str | None:
        """Return a process that is up, chosen by the fault's `pick`.

        Return an empty name for a fault without a target, and None if no process is up.
        """
        service = fault.kind.partition(" ")[2]
        if service in (PLANNER, METRICS):
            process = self._cluster.processes.get(service)
            return service if process is not None and process.up and not process.node.frozen else None
        if "worker" not in fault.kind and "gateway" not in fault.kind and "role" not in fault.kind:
            return ""
        found = self._cluster.gateways() if "gateway" in fault.kind else self._cluster.workers()
        found = [each for each in found if not each.node.frozen]
        if fault.kind == "kill gateway" and len(found) < 2:
            return None
        return found[int(fault.pick * len(found))].node.name if found else None

    def _do(self, fault: Fault, name: str) -> None:
        cluster, later = self._cluster, self._loop.after
        match fault.kind:
            case "kill worker" | "kill worker for good":
                cluster.kill(name)
                fresh = name if fault.kind == "kill worker" else f"w{next(self._names)}"
                later(fault.lasts_s, cluster.start_worker, fresh, fault.role if fault.pick < 0.3 else self._needed())
            case "stop worker":
                cluster.stop(name)
                later(5 + fault.lasts_s, self._start_again, name)
            case "freeze worker" | "freeze gateway" | "freeze planner" | "freeze metrics":
                cluster.freeze(name)
                later(fault.lasts_s, cluster.thaw, name)
            case "cut worker" | "cut gateway":
                self._net.cut(cluster.processes[name].node, CUT)
            case "slow worker":
                self._net.slow_s[name] = fault.pick * 0.2
                later(fault.lasts_s, self._net.slow_s.pop, name, None)
            case "set role":
                self._loop.spawn(self._client, cluster.set_role(self._client, name, fault.role))
            case "rival roles":
                self._loop.spawn(self._client, cluster.set_role(self._client, name, fault.role, fault.rival))
            case "kill gateway":
                cluster.kill(name)
                later(fault.lasts_s, cluster.start_gateway, name)
            case "kill planner" | "kill metrics":
                cluster.kill(name)
                later(fault.lasts_s, self._start_service, name)
            case "stop planner" | "stop metrics":
                cluster.stop(name)
                later(5 + fault.lasts_s, self._start_service, name)
            case _:
                self._do_to_data(fault)

    def _do_to_data(self, fault: Fault) -> None:
        stores, later = self._stores, self._loop.after
        match fault.kind:
            case "damage KV":
                self._spoil_left += 1
            case "cut KV":
                self._kv_cut_left += 1
            case "broker away":
                stores.broker.cut_off()
                later(fault.lasts_s, stores.broker.start)
            case "freeze broker":
                stores.broker.freeze()
                later(fault.lasts_s, stores.broker.thaw)
            case "lose Redis":
                stores.redis.kill()
                stores.redis.start()
            case "Redis away":
                stores.redis.cut_off()
                later(fault.lasts_s, stores.redis.start)
            case "freeze Redis":
                stores.redis.freeze()
                later(fault.lasts_s, stores.redis.thaw)
            case "registry late":
                stores.late_s = fault.lasts_s
                later(5.0, setattr, stores, "late_s", 0.0)

    def _start_service(self, name: str) -> None:
        if name not in self._cluster.processes:
            (self._cluster.start_planner if name == PLANNER else self._cluster.start_metrics)(name)

    def _needed(self) -> str:
        """Return the role that the fewest workers have."""
        roles = [each.worker.host.assignment.current.role for each in self._cluster.workers() if each.worker]
        return "prefill" if roles.count(Role.PREFILL) <= roles.count(Role.MIXED) else "decode"

    def _start_again(self, name: str) -> None:
        if name not in self._cluster.processes:
            self._cluster.start_worker(name, self._needed())

    def _spoil(self, call: Call, data: bytes) -> bytes:
        """Flip a bit in a frame's KV chunk, or cut the stream in the middle of its pulls."""
        if not call.method.endswith("/Pull"):
            return data
        frame = pb.KvFrame.FromString(data)
        if not frame.chunks:
            return data
        if self._spoil_left:
            self._spoil_left -= 1
            frame.chunks[0].data_bytes ^= 1
            return frame.SerializeToString()
        if self._kv_cut_left:
            self._kv_cut_left -= 1
            self._loop.after(0, call.broken, CUT)
        return data
