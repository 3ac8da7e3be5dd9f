"""Who changed what over REST: recorded at the door, so that no route can forget it. ASGI."""

from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.keys.gate import caller_of
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock

MAX_DETAIL_BYTES: Final = 500
MAX_PATH_CHARS: Final = 300
ANYBODY: Final = "anybody"
_READS: Final = ("GET", "HEAD", "OPTIONS")

Audited = Callable[[str, str], bool]
"""From method and path to whether a request changes something."""


def changes(method: str, path: str) -> bool:
    """At planner and metrics service whatever is no look; a login's body is a key."""
    return method not in _READS and path not in ("/login", "/logout")


def deletes(method: str, path: str) -> bool:
    """At a gateway, where all else are requests of tenants."""
    return method == "DELETE" or path.endswith("/cancel")


class AuditDoor:
    """Before a service's gate. What is refused for want of a key is not recorded: strangers could fill the topic."""

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
    ) -> None:
        """with_body: the beginning of what was sent is recorded too; nowhere that prompts are sent to."""
        self._app = app
        self._table = table
        self._clock = clock
        self._service = service
        self._audited = audited
        self._publish = publish
        self._with_body = with_body
        self._number = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and record it once its status is known."""
        if scope["type"] != "http" or not self._audited(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        body = bytearray()

        async def receive_and_keep() -> Message:
            message = await receive()
            body.extend(message.get("body", b"")[: MAX_DETAIL_BYTES - len(body)])
            return message

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != 401:
                self._record(scope, bytes(body) if self._with_body else b"", message["status"])
            await send(message)

        await self._app(scope, receive_and_keep, send_and_record)

    def _record(self, scope: Scope, body: bytes, status: int) -> None:
        caller, now_ns = caller_of(scope), self._clock.now_ns()
        if not caller.name:  # refused for its role, or everybody is let in
            caller = self._table.identify(dict(scope["headers"]).get(b"authorization"))
        self._number += 1
        self._publish(
            AuditEvent(
                event_id=f"{self._service}-{now_ns}-{self._number}",
                at_unix_ns=now_ns,
                service=self._service,
                actor=caller.name or ANYBODY,
                tenant=caller.tenant,
                action=f"{scope['method']} {scope['path'][:MAX_PATH_CHARS]}",
                detail=body.decode("utf-8", "replace"),
                status=status,
            )
        )
