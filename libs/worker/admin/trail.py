"""The audit trail of changes made to a worker over gRPC."""

from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from libs.bus.port import Bus
from libs.contracts.foreign_text import masked
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.topics import AUDIT
from libs.keys.table import SUITE_TOKEN, actor_of
from libs.runtime.clock import Clock
from libs.runtime.net.rpc import peer_of

MAX_DETAIL: Final = 500
MAX_ACTOR: Final = 100
SERVICE: Final = "worker"
# Role in the certificate of a service that checks API keys and may name another actor.
SPEAKS_FOR_OTHERS: Final = "planner"

Record = Callable[[str, str, str, int], None]
"""Records a change from actor, action, detail and HTTP status."""


def actor_from(context: "grpc.aio.ServicerContext[Any, Any]", told: str) -> str:
    """Return the actor of an admin call that showed the suite's token and names `told`.

    If certificates name roles, only a planner may name another actor: an operator's command acts as the token.
    Without such roles, holders of the token cannot be told apart, and each is believed.
    """
    told = masked(told)[:MAX_ACTOR]
    peer = peer_of(context)
    if told and (peer is None or peer.role == SPEAKS_FOR_OTHERS):
        return told
    own = f"{SUITE_TOKEN.name} ("
    return actor_of(SUITE_TOKEN, told.removeprefix(own).removesuffix(")") if told.startswith(own) else told)


def audit_changes(bus: Bus, clock: Clock, worker_id: str) -> Record:
    """Return a recorder that publishes to the audit topic. Callers without the suite's token never reach it."""
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
                actor=actor,
                action=f"{action} {worker_id}",
                detail=masked(detail)[:MAX_DETAIL],
                status=status,
            ),
        )

    return record
