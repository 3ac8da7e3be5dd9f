"""Who changed a worker over gRPC, as the audit trail has it."""

from collections.abc import Callable
from typing import Final

from libs.bus.port import Bus
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.topics import AUDIT
from libs.runtime.clock import Clock

MAX_DETAIL: Final = 500
MAX_ACTOR: Final = 80
SERVICE: Final = "worker"

Record = Callable[[str, str, str, int], None]
"""From actor, action, detail and the status, as HTTP has it, of whatever changes the worker."""


def audit_changes(bus: Bus, clock: Clock, worker_id: str) -> Record:
    """Records on the audit topic. Only who has the suite's token gets so far; the actor is whom it names."""
    number = 0

    def record(actor: str, action: str, detail: str, status: int) -> None:
        nonlocal number
        number += 1
        now_ns = clock.now_ns()
        bus.publish(
            AUDIT,
            AuditEvent(
                event_id=f"{SERVICE}-{worker_id}-{now_ns}-{number}",
                at_unix_ns=now_ns,
                service=SERVICE,
                actor=actor[:MAX_ACTOR] or "token",
                action=f"{action} {worker_id}",
                detail=detail[:MAX_DETAIL],
                status=status,
            ),
        )

    return record
