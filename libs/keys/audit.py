"""ASGI middleware that records changes made over HTTP, with their actors.

It runs before all routes, so that no change is missed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.contracts import metric_names as names
from libs.contracts.foreign_text import masked
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.keys.gate import caller_of
from libs.keys.table import Caller, KeyTable, actor_of
from libs.runtime.clock import Clock

MAX_DETAIL_BYTES: Final = 500
MAX_PATH_CHARS: Final = 300
REFUSED_EVERY_S: Final = 60.0
"""The interval between summaries. The first refusal of an actor with a status is recorded, later ones are summed up."""
MAX_REFUSED: Final = 1_000
"""The maximum number of actors and statuses that are summed up at once. Beyond it, only the metric counts refusals."""
_READS: Final = ("GET", "HEAD", "OPTIONS")
# The value in the scope is a list, because middleware before a route may copy the scope but not the list.
_ACTOR: Final = "fulcrum.actor"

Audited = Callable[[str, str], bool]
"""A function from a request's method and path to whether the request is recorded."""


def changes(method: str, path: str) -> bool:
    """Return whether a request to the planner or metrics service is a write.

    Logins and logouts are excluded, because the body of a login is a key.
    """
    return method not in _READS and path not in ("/login", "/logout")


def deletes(method: str, path: str) -> bool:
    """Return whether a request to a gateway deletes or cancels something.

    All other requests are tenants' ordinary use.
    """
    return method == "DELETE" or path.endswith("/cancel")


def changed_nothing(status: int) -> bool:
    """Return whether the status is that of a refusal (4xx).

    A request that failed with 5xx may have changed something.
    """
    return 400 <= status < 500


def named_actor(scope: Scope, caller: Caller, said: str) -> str:
    """Return the actor of an admin request, and make the middleware record the same actor."""
    found = actor_of(caller, said)
    scope.get(_ACTOR, []).append(found)
    return found


@dataclass(slots=True)
class _RefusalSummary:
    event: AuditEvent
    more: int = 0


class AuditMiddleware:
    """The middleware in front of a service's `KeyGate`.

    Requests refused for lack of a key are not recorded, because strangers could fill the topic. Other refusals are
    summed up, so that they cannot push out the records of changes.
    """

    def __init__(
        self,
        app: ASGIApp,
        table: KeyTable,
        clock: Clock,
        *,
        service: str,
        audited: Audited,
        publish: Callable[[AuditEvent], None],
        with_body: bool = True,
        metrics: CollectorRegistry | None = None,
    ) -> None:
        """Record the requests that `audited` selects.

        `with_body` also records the first bytes of the body. It must be False where bodies contain prompts.
        """
        self._app = app
        self._table = table
        self._clock = clock
        self._service = service
        self._audited = audited
        self._publish = publish
        self._with_body = with_body
        self._number = 0
        self._refused: dict[tuple[str, str, int], _RefusalSummary] = {}
        self._refused_total = Counter(
            names.AUDIT_REFUSED_TOTAL,
            "Requests that would change something, and were refused.",
            ("status",),
            registry=metrics,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and record it once its status is known."""
        if scope["type"] != "http" or not self._audited(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        body = bytearray()
        scope[_ACTOR] = []

        async def receive_and_keep() -> Message:
            message = await receive()
            body.extend(message.get("body", b"")[: MAX_DETAIL_BYTES - len(body)])
            return message

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._take(scope, bytes(body) if self._with_body else b"", message["status"])
            await send(message)

        await self._app(scope, receive_and_keep, send_and_record)

    def _take(self, scope: Scope, body: bytes, status: int) -> None:
        if changed_nothing(status):
            self._refused_total.labels(status).inc()
        if status == 401:
            return
        event = self._event(scope, body, status)
        if not changed_nothing(status):
            self._publish(event)
            return
        alike = (event.actor, event.tenant, status)
        if (known := self._refused.get(alike)) is not None:
            known.more += 1
        elif len(self._refused) < MAX_REFUSED:
            summary = AuditEvent()
            summary.CopyFrom(event)
            self._refused[alike] = _RefusalSummary(summary)
            self._publish(event)
            asyncio.get_running_loop().call_later(REFUSED_EVERY_S, self._sum_up, alike)

    def _sum_up(self, alike: tuple[str, str, int]) -> None:
        """Record the number of refusals since the first one that were equal to it."""
        found = self._refused.pop(alike)
        if found.more:
            found.event.repeats, found.event.at_unix_ns = found.more, self._clock.now_ns()
            found.event.event_id = self._id(found.event.at_unix_ns)
            self._publish(found.event)

    def _event(self, scope: Scope, body: bytes, status: int) -> AuditEvent:
        caller, now_ns = caller_of(scope), self._clock.now_ns()
        if not caller.name:  # refused because of its role, or everybody is admitted
            caller = self._table.identify(dict(scope["headers"]).get(b"authorization"))
        return AuditEvent(
            event_id=self._id(now_ns),
            at_unix_ns=now_ns,
            service=self._service,
            actor=named[-1] if (named := scope.get(_ACTOR)) else actor_of(caller),
            tenant=caller.tenant,
            action=masked(f"{scope['method']} {scope['path']}")[:MAX_PATH_CHARS],
            detail=masked(body.decode("utf-8", "replace")),
            status=status,
            role=caller.role if caller.name else "",
        )

    def _id(self, now_ns: int) -> str:
        self._number += 1
        return f"{self._service}-{now_ns}-{self._number}"
