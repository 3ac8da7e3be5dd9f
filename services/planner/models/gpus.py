"""Which GPU a worker of a pool shares with others, and how many GPUs that makes. Pure."""

from collections.abc import Sequence

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker


def gpu_of(worker: Worker) -> str:
    """The GPU that it shares with others that name the same; empty where it has its own."""
    return f"{worker.node}/{','.join(worker.gpu_uuids)}" if 0 < worker.gpu_share < 1 and worker.gpu_uuids else ""


def devices(workers: Sequence[Worker]) -> int:
    """GPUs under these workers: one that several share counts once."""
    names = [gpu_of(worker) for worker in workers]
    return len(set(names) - {""}) + names.count("")
