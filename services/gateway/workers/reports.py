"""Feed workers' reports of load and speed to their outlooks. Pure."""

from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.perfmodel.priors import prior_speed
from libs.perfmodel.wire import compute_of, speed_of
from libs.policy.gateway.outlook import WorkerOutlook


def outlook_of(worker: common.Worker, tpot_ns: float = 0.0) -> WorkerOutlook:
    """The outlook of a worker that has reported neither load nor speed; `tpot_ns`: default TPOT target, 0 for none."""
    can = worker.capabilities
    compute = compute_of(can.compute) if can.HasField("compute") else None
    speed = prior_speed(worker.engine, worker.device, can.chunk_tokens, compute, max(worker.gpus, 1))
    return WorkerOutlook(worker.device, speed, can.kv_blocks, tpot_ns)


def hear(outlook: WorkerOutlook, frame: pb.WorkerFrame, worker: common.Worker, now_ns: int) -> None:
    """Update an outlook from a frame's load and speed, where it has them."""
    if frame.HasField("speed"):
        outlook.speed = speed_of(frame.speed, worker.capabilities.chunk_tokens) or outlook.speed
    if frame.HasField("load"):
        outlook.on_load_report(frame.load, frame.submits_taken, now_ns)
