"""Counts of the requests that this gateway refuses, by HTTP status and error code."""

from collections import Counter
from collections.abc import Awaitable
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.contracts.errors import AnswerFailed, FulcrumError, SequenceFailed
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RefusedRequests

MAX_REASONS: Final = 32
"""The maximum number of reasons counted separately. The gateway itself defines the error codes, so there are few."""
OTHER: Final = (0, "other")
"""The reason under which refusals beyond MAX_REASONS are counted."""
FAILURES: Final = frozenset({FulcrumError.code, AnswerFailed.code, SequenceFailed.code})
"""The error codes of requests that failed after they were admitted, which are not refusals."""
MAX_BODY_BYTES: Final = 16_384
"""The size up to which an error body is parsed for its code. A larger body is counted as "unknown"."""


class RefusalCounts:
    """The number of requests since the gateway started, and the number of refused ones by reason."""

    def __init__(self) -> None:
        self.posts = 0
        """The POST requests that have arrived. Other requests, such as polls and probes, request no computation."""
        self._refused: Counter[tuple[int, str]] = Counter()

    def refuse(self, status: int, code: str) -> None:
        """Count an error response as a refusal. Ignore failures of admitted requests."""
        if code in FAILURES or status < 400:
            return
        reason = status, code
        if reason not in self._refused and len(self._refused) >= MAX_REASONS:
            reason = OTHER
        self._refused[reason] += 1

    def turned_away(self, error: FulcrumError) -> None:
        """Count a request that was refused before its headers were read."""
        self.posts += 1
        self.refuse(error.http_status, error.code)

    @property
    def refused(self) -> int:
        return self._refused.total()

    def rows(self) -> list[RefusedRequests]:
        return [RefusedRequests(status=status, code=code, count=n) for (status, code), n in self._refused.items()]


class RefusalMiddleware:
    """The outermost middleware. It counts every POST request and every error response to one."""

    def __init__(self, app: ASGIApp, counts: RefusalCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._counts.posts += 1
        status = 0

        def watched(message: Message) -> Awaitable[None]:
            # A plain function instead of a coroutine, because a stream sends a message for each token.
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400:
                self._counts.refuse(status, error_code(message.get("body", b"")))
                status = 0
            return send(message)

        await self._app(scope, receive, watched)


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_decoder: Final = msgspec.json.Decoder(_ErrorBody)


def error_code(body: bytes) -> str:
    """Return the error code in a response body, or "unknown" if there is none."""
    if len(body) <= MAX_BODY_BYTES:
        try:
            return _decoder.decode(body).error.code or "unknown"
        except msgspec.DecodeError:
            pass
    return "unknown"
