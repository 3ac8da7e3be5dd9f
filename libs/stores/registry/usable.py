"""Whether what stands in the registry is a worker that others can connect to and plan with. Pure."""

import math
import re
from collections.abc import Iterator
from typing import Final

from google.protobuf.message import DecodeError

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute, FirstToken, Role, Worker, WorkerState
from libs.policy.roles import MAX_BUDGET_TOKENS

MAX_WORKER_BYTES: Final = 65_536
"""Of one worker, serialized: a hundred times what one needs."""
MAX_GPUS: Final = 65_536
"""Of one worker; also its nodes. A worker weighs by them in every figure of the cluster."""
MAX_COUNTS: Final = {
    "block_size_tokens": 2**16,
    "kv_blocks": 2**31,
    "kv_block_bytes": 2**40,
    "max_context_tokens": 2**31,
    "max_sequences": 2**24,
    "chunk_tokens": 2**24,
}
"""Of capabilities: what no engine reaches."""
MAX_SHAPE: Final = 2**53
"""Of each figure of a model's shape."""
PEAKS_PER_S: Final = (1e6, 1e21)
"""FLOPs or bytes of a device a second: a slow microcontroller to a thousand racks."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What settings allow as the name of a process."""
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
_SHAPE: Final = (
    "layer_parameters", "head_parameters", "parameter_bytes", "attention_width", "kv_token_bytes",
    "kv_window_token_bytes", "kv_window_tokens", "kv_state_bytes",
)  # fmt: skip


class Unusable(Exception):
    """The reason why a value is no worker."""


def read_worker(member: bytes, value: bytes) -> Worker:
    """The worker that stands under an id; raises Unusable."""
    if len(value) > MAX_WORKER_BYTES:
        raise Unusable(f"{len(value)} bytes; {MAX_WORKER_BYTES} are allowed")
    try:
        worker = Worker.FromString(value)
    except DecodeError:
        raise Unusable("its bytes are no worker") from None
    if worker.id.encode() != member:
        raise Unusable(f"the worker calls itself {worker.id!r}")
    for fault in faults(worker):
        raise Unusable(fault)
    return worker


def faults(worker: Worker) -> Iterator[str]:
    """What is wrong with it, each as a few words; nothing where it can be used."""
    if not _ID.fullmatch(worker.id):
        yield f"id {worker.id[:80]!r} is no name of a process"
    address = _ADDRESS.fullmatch(worker.address)
    if not address or not 1 <= int(address[1]) <= 65_535:
        yield f"address {worker.address[:80]!r} is no host:port"
    if max(worker.gpus, worker.nodes) > MAX_GPUS:
        yield f"{worker.gpus} GPUs on {worker.nodes} nodes"
    if not 0 <= worker.gpu_share <= 1 or len(worker.gpu_uuids) > MAX_GPUS:
        yield f"a share {worker.gpu_share} of {len(worker.gpu_uuids)} GPUs"
    assignment, can = worker.assignment, worker.capabilities
    for name, number, known in (
        ("role", assignment.role, Role.values()),
        ("state", worker.state, WorkerState.values()),
        ("first token", can.first_token, FirstToken.values()),
    ):
        if number not in known:
            yield f"{name} {number} is unknown here"
    if assignment.budget_tokens > MAX_BUDGET_TOKENS:
        yield f"a budget of {assignment.budget_tokens} tokens"
    for name, most in MAX_COUNTS.items():
        if getattr(can, name) > most:
            yield f"{name} {getattr(can, name)}"
    if can.HasField("compute"):
        yield from _compute_faults(can.compute)


def _compute_faults(compute: Compute) -> Iterator[str]:
    for name in _SHAPE:
        if getattr(compute, name) > MAX_SHAPE:
            yield f"{name} {getattr(compute, name)}"
    least, most = PEAKS_PER_S
    for name in ("peak_flops_per_s", "peak_bytes_per_s"):
        peak = getattr(compute, name)
        if peak and not (math.isfinite(peak) and least <= peak <= most):
            yield f"{name} {peak:g}"
