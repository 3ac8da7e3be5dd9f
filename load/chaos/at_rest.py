"""What gateways and workers may not have at rest."""

from collections.abc import Iterator
from typing import Any

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.worker.run import RunningWorker
from load.chaos.cluster import Cluster, Process
from load.chaos.loop import Node
from services.gateway.run import RunningGateway


def unsettled(cluster: Cluster) -> Iterator[str]:
    """What is not zero, though nothing is asked any more."""
    gateways, workers = cluster.gateways(), cluster.workers()
    for each in gateways:
        assert each.gateway is not None
        yield from _gateway_left(each, each.gateway)
    for each in workers:
        assert each.worker is not None
        yield from _worker_left(each.node, each.worker, len(gateways))
    yield from _credits_left(gateways, workers)


def _credits_left(gateways: list[Process], workers: list[Process]) -> Iterator[str]:
    """What workers have granted is what gateways hold."""
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
