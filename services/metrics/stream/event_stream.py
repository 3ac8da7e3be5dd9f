import asyncio
from collections.abc import AsyncIterator
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from libs.runtime.tasks import until_first
from services.metrics.stream.hub import Hub

WRITE_STALL_S: Final = 30.0
"""The time for which a reader may leave its socket unread before the stream ends. A browser reconnects by itself."""


class EventStream(Response):
    """A hub's messages as server-sent events, until the client leaves or the hub closes."""

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, caller: str = "", *, between: bool = True) -> None:
        """Create an answer; `caller` and `between` are those of `Hub.reader`."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._hub = hub
        self._caller = caller
        self._between = between

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, holding a place at the hub meanwhile."""
        with self._hub.reader(self._caller, between=self._between) as messages:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_first(gone=_gone(receive), writing=_write(messages, send))
        await send({"type": "http.response.body", "body": b""})


async def _write(messages: AsyncIterator[bytes], send: Send) -> None:
    async for message in messages:
        try:
            async with asyncio.timeout(WRITE_STALL_S):
                await send({"type": "http.response.body", "body": message, "more_body": True})
        except TimeoutError:
            return


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
