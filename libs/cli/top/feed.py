"""The connection that keeps a model up to date from the metrics service: its stream, and further figures once a
second.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx

from libs.cli.find import key_headers
from libs.cli.status.answer import STATUS_PATH, parse_status
from libs.cli.top.lists import MAX_STEPS, RequestView, parse_requests, parse_steps
from libs.cli.top.model import TopModel
from libs.contracts.foreign_text import plain_values
from libs.contracts.step_row import ReportedStep
from libs.runtime.backoff import Backoff

T = TypeVar("T")

POLL_S: Final = 1.0
FIRST_RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 3.0
# A stream that is silent for this long is reopened.
STALL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class NotShown:
    """The reason why requested data are not shown now."""

    message: str


class Feed:
    """The connection of a model to the metrics service; `problem` is empty while the service answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model = TopModel()
        self.problem = "connecting"
        self._others = False
        """True if the set of workers has changed since it was drawn."""
        self.on_news: Callable[[], None] = lambda: None
        """The callback after an event, an alert, the begin or end of an outage, or a change in the set of workers."""

    async def follow(self) -> None:
        """Read the stream until cancelled, and reopen it whenever it ends."""
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        async with self._client() as http:
            while True:
                try:
                    await self._read(http, backoff)
                    self.problem = "the stream has ended"
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.problem = f"{self.url} does not answer: {error or type(error).__name__}"
                self.on_news()
                await asyncio.sleep(backoff.next_s())

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers=key_headers(self.url), timeout=STALL_S, trust_env=False)

    async def _read(self, http: httpx.AsyncClient, backoff: Backoff) -> None:
        event = ""
        async with http.stream("GET", "/v1/occupancy/stream", params={"between": "false"}) as answer:
            answer.raise_for_status()
            alerts = plain_values((await http.get("/v1/alerts", params={"limit": 0})).json())["firing"]
            self.model.firing = {alert["id"]: alert for alert in alerts}
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    event = line[7:]
                elif line.startswith("data: "):
                    self._take(event, plain_values(json.loads(line[6:])))
                    backoff.reset()

    def _take(self, event: str, message: dict[str, Any]) -> None:
        if event == "members":
            self.model.members(message)
            self._others = True  # a tick follows, with what they do
            return
        self.model.tick(message)
        happened = self._others or self.problem or message["events"] or message["alerts"]
        self._others, self.problem = False, ""
        if happened:
            self.on_news()

    async def poll(self) -> None:
        """Poll once a second until cancelled. Failed requests are repeated."""
        async with self._client() as http:
            while True:
                with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):  # the stream reports who is away
                    self.model.status = parse_status(
                        plain_values((await http.get(STATUS_PATH)).raise_for_status().json())
                    )
                    self.model.detail(plain_values((await http.get("/v1/occupancy")).json()))
                    summary = await http.get("/v1/requests/summary", params={"window": "1m"})
                    self.model.requests = summary.raise_for_status().json()["total"]
                await asyncio.sleep(POLL_S)

    async def requests_of(self, worker_id: str, limit: int) -> AsyncGenerator[list[RequestView] | NotShown, None]:
        """Yield once a second a worker's last finished requests, the newest first, or the reason why they are not
        shown.
        """
        async for shown in self._poll("/v1/requests", parse_requests, worker=worker_id, limit=str(limit)):
            yield shown

    async def steps_of(self, worker_id: str, window: str) -> AsyncGenerator[list[ReportedStep] | NotShown, None]:
        """Yield once a second the engine steps of a worker's last `window`, the newest first, or the reason why they
        are not shown.
        """
        query = {"worker": worker_id, "window": window, "limit": str(MAX_STEPS)}
        async for shown in self._poll("/v1/steps", parse_steps, **query):
            yield shown

    async def _poll(self, path: str, parse: Callable[[Any], T], **query: str) -> AsyncGenerator[T | NotShown, None]:
        async with self._client() as http:
            while True:
                try:
                    answer = await http.get(path, params=query)
                    body = plain_values(answer.json())
                    yield parse(body) if answer.is_success else NotShown(body["error"]["message"])
                except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
                    yield NotShown(f"{self.url} does not answer: {error or type(error).__name__}")
                await asyncio.sleep(POLL_S)
