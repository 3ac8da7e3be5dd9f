"""The invariants of a run: gateways and workers at rest, planner and metrics after any fault of their stores."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_ROLE_MOVED, Decision
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.topics import DECISIONS
from libs.stores.registry import read_worker
from libs.worker.run import RunningWorker
from load.chaos.cluster import CLUSTER, Cluster, Process, Stores
from load.chaos.loop import Node
from services.gateway.run import RunningGateway
from services.metrics.accounting.answer import ClusterOccupancy, GpuTime
from services.metrics.accounting.occupancy import cluster_occupancy
from services.metrics.run import RunningMetrics


def unsettled(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each counter that is not zero although nothing runs."""
    gateways, workers = cluster.gateways(), cluster.workers()
    for each in gateways:
        assert each.gateway is not None
        yield from _gateway_left(each, each.gateway)
    for each in workers:
        assert each.worker is not None
        yield from _worker_left(each.node, each.worker, len(gateways))
    yield from _credits_left(gateways, workers)


def _credits_left(gateways: list[Process], workers: list[Process]) -> Iterator[str]:
    """Yield a line for each worker whose granted credits differ from those that gateways hold."""
    links: dict[str, list[Any]] = {}
    for each in gateways:
        assert each.gateway is not None
        for link in each.gateway.fleet.links:
            if link.connected:
                links.setdefault(link.id, []).append(link)
    for each in workers:
        assert each.worker is not None
        granted, held = each.worker.host.gateways.credits, links.get(each.node.name, [])
        for kind in ("prefill", "decode"):
            pool, free = getattr(granted, kind), sum(getattr(link, kind).free for link in held)
            if pool.in_use or pool.granted != free or free != max(pool.slots, 0):
                slots = f"of {pool.slots} {kind} slots {pool.in_use} are in use, {pool.granted} granted"
                yield f"{each.node}: {slots}, and gateways hold {free}"


def _gateway_left(process: Process, gateway: RunningGateway) -> Iterator[str]:
    links = list(gateway.fleet.links)
    dispatcher = gateway.dispatcher
    legs, reserved = sum(len(link.running) for link in links), sum(link.decode.reserved for link in links)
    if dispatcher.live or dispatcher.waiting or legs or reserved:
        yield f"{process.node}: live {dispatcher.live}, waiting {dispatcher.waiting}, legs {legs}, reserved {reserved}"
    if len(process.tasks) != process.spare_tasks + len(links):
        yield f"{process.node}: {len(process.tasks)} tasks for {len(links)} links"


def _worker_left(node: Node, worker: RunningWorker, gateways: int) -> Iterator[str]:
    integrity = worker.host.integrity()
    wanted = pb.Integrity(attached_gateways=gateways)
    if integrity != wanted:
        yield f"{node}: {str(integrity).strip()!r}"
    if worker.host.engine.integrity().pool_faults:
        yield f"{node}: the block pool's books are wrong"


PLANNER, METRICS = "planner", "metrics"
# The longest gap between two published decisions of a running planner. It repeats an unchanged plan once a second.
DECIDED_S: Final = 1.5
# The age of the checked window. By then its telemetry has arrived and been written.
WRITTEN_S: Final = 1.2
WINDOW_S: Final = 1.0
# The time without faults before the final checks.
QUIET_S: Final = WRITTEN_S + WINDOW_S + 0.3


def unreported(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each fact that planner and metrics still lack, some time after all faults have ended."""
    now_ns = cluster.clock.now_ns()
    registered = {(each.id, each.incarnation) for each in _registered(cluster.stores)}
    serving = {each.node.name for each in cluster.workers()}
    if {name for name, _ in registered} != serving:
        yield f"registered are {sorted(name for name, _ in registered)}, and {sorted(serving)} serve"
    for each in cluster.processes.values():
        if each.planner is not None:
            listed = {(worker.id, worker.incarnation) for worker in each.planner.state.workers}
            if listed != registered:
                yield f"{each.node} knows of {sorted(listed)}, registered are {sorted(registered)}"
            if why := each.planner.state.not_live(now_ns):
                yield f"{each.node} is not live: {why}"
        if each.metrics is not None and (why := each.metrics.state.not_live(now_ns)):
            yield f"{each.node} is not live: {why}"
    for name in (PLANNER, METRICS):
        if name not in cluster.processes or not cluster.processes[name].up:
            yield f"{name} does not serve"


def _registered(stores: Stores) -> Iterator[Worker]:
    for worker_id, value in stores.redis.workers(CLUSTER).items():
        yield read_worker(worker_id.encode(), value)


# ------------------------------------------------------------ the planner


def missed_decisions(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each planner that did not decide steadily, or whose decisions did not all reach the broker."""
    published = {
        (each.incarnation, each.sequence) for each in cluster.stores.records(DECISIONS) if isinstance(each, Decision)
    }
    for process in (*cluster.past, *cluster.processes.values()):
        if process.planner is None:
            continue
        decisions = process.decided
        numbers = [each.sequence for each in decisions]
        if numbers != list(range(1, len(numbers) + 1)):
            yield f"{process.node} numbers its decisions {numbers}"
        yield from _silences(cluster, process, decisions)
        if not process.node.dead:  # a killed planner may have lost its last decisions
            unsent = {Decision.FromString(each.value).sequence for each in process.bus.unsent()}
            missing = [
                each.sequence
                for each in decisions
                if (each.incarnation, each.sequence) not in published and each.sequence not in unsent
            ]
            if missing:
                yield f"{process.node}: the broker has nothing of decisions {missing}"


def _silences(cluster: Cluster, process: Process, decisions: list[Decision]) -> Iterator[str]:
    if process.served_s is None:
        return
    now_s = cluster.loop.time()
    decided_s = [cluster.clock.to_s(each.decided_unix_ns) for each in decisions if each.action != ACTION_ROLE_MOVED]
    ended_s = now_s if process.ended_s is None else process.ended_s
    for before_s, after_s in pairwise((process.served_s, *decided_s, ended_s)):
        still_s = sum(
            max(min(until_s, after_s) - max(since_s, before_s), 0.0) for since_s, until_s in process.stood_still(now_s)
        )
        if after_s - before_s - still_s > DECIDED_S:
            yield f"{process.node} decided nothing from {before_s:.3f} to {after_s:.3f} s"


# ------------------------------------------------------------ metrics


def wrong_sums(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each figure of the last window that does not add up."""
    for process in cluster.processes.values():
        if process.up and process.metrics is not None:
            for wrong in _wrong_sums(_occupancy(cluster, process.metrics, ago_s=0.0)):
                yield f"{process.node} at {cluster.loop.time():.3f} s: {wrong}"


def _wrong_sums(shown: ClusterOccupancy) -> Iterator[str]:
    for whole in (shown, *shown.workers, *shown.pools, *shown.models, *shown.nodes):
        time = whole.gpu_ns
        if time.prefill + time.decode + time.kv_wait + time.idle != time.covered or min(_parts(time)) < 0:
            yield f"parts do not make up what is covered: {time}"
    for parts in (shown.workers, shown.pools, shown.models, shown.nodes):
        if (
            _parts(shown.gpu_ns) != tuple(map(sum, zip(*(_parts(each.gpu_ns) for each in parts), strict=True)))
            and parts
        ):
            yield f"{[each.gpu_ns for each in parts]} do not make up {shown.gpu_ns}"


def _parts(time: GpuTime) -> tuple[int, ...]:
    return time.covered, time.prefill, time.decode, time.kv_wait, time.idle


def missed_time(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each worker whose time in a window without faults is missing from metrics."""
    since_s = cluster.loop.time() - QUIET_S
    served = [each.node.name for each in cluster.workers() if each.served_s is not None and each.served_s <= since_s]
    for process in cluster.processes.values():
        if process.metrics is None:
            continue
        shown = _occupancy(cluster, process.metrics, ago_s=WRITTEN_S)
        shown_by_id = {each.id: each for each in shown.workers}
        for name in served:
            coverage = shown_by_id[name].coverage if name in shown_by_id else None
            if coverage != 1.0:
                yield f"{process.node} heard of {coverage} of the last quiet second of {name}"


def _occupancy(cluster: Cluster, metrics: RunningMetrics, *, ago_s: float) -> ClusterOccupancy:
    state, end_ns = metrics.state, cluster.clock.now_ns() - int(ago_s * 1e9)
    return cluster_occupancy(state.fleet, state.rollups, state.members, end_ns, int(WINDOW_S * 1e9))
