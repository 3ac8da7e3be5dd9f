"""Validation of registry entries, which must be workers that others can connect to and plan with. Pure."""

import math
import re
from collections.abc import Iterator
from typing import Final

from google.protobuf.message import DecodeError

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import FirstToken, Role, Worker, WorkerState
from libs.contracts.ranges import fault_of

# The largest serialized worker, a hundred times the size of a typical one.
MAX_WORKER_BYTES: Final = 65_536
PEAKS_PER_S: Final = (1e6, 1e21)
"""The plausible range of a device's FLOPs or bytes a second, from a slow microcontroller to a thousand racks."""

# The same characters that settings allow in the name of a process.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


class Unusable(Exception):
    """The reason why a value is not a usable worker."""


def read_worker(member: bytes, value: bytes) -> Worker:
    """Parse the worker stored under an id. Raises Unusable."""
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
    """Yield each fault of a worker in a few words; yield nothing for a usable one."""
    if not _ID.fullmatch(worker.id):
        yield f"id {worker.id[:80]!r} is no name of a process"
    address = _ADDRESS.fullmatch(worker.address)
    if not address or not 1 <= int(address[1]) <= 65_535:
        yield f"address {worker.address[:80]!r} is no host:port"
    if out_of_range := fault_of(worker, worker.ByteSize()):
        yield f"{out_of_range} is out of its range"
    assignment, can = worker.assignment, worker.capabilities
    for name, number, known in (
        ("role", assignment.role, Role.values()),
        ("state", worker.state, WorkerState.values()),
        ("first token", can.first_token, FirstToken.values()),
    ):
        if number not in known:
            yield f"{name} {number} is unknown here"
    least, most = PEAKS_PER_S
    for name in ("peak_flops_per_s", "peak_bytes_per_s"):
        peak = getattr(can.compute, name)
        if peak and not (math.isfinite(peak) and least <= peak <= most):
            yield f"{name} {peak:g}"
