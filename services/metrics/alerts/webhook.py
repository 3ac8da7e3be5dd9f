"""Delivery of alerts to an Alertmanager, or any receiver with its API v2, and their wire formats.

Posts carry state, so the next one makes up for a lost one. They hold all firing alerts and those that ended since
the last accepted post, in several pieces if needed. They repeat while alerts fire, as Alertmanager requires, and
are retried after a failure.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final

import httpx
import msgspec
import structlog

from libs.contracts.pb.fulcrum.alerts.v1.alerts_pb2 import ALERT_STATE_FIRING, ALERT_STATE_RESOLVED, AlertEvent
from libs.policy.alerts.store import MS_NS, Alert, AlertStore
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from libs.runtime.web import MakeClient

FIRING_FOR_MS: Final = 240_000
"""The time after which Alertmanager takes a firing alert for over unless a post repeats it."""


class PostableAlert(msgspec.Struct, rename="camel"):
    """One entry of the body of Alertmanager's `POST /api/v2/alerts`."""

    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    ends_at: str
    generator_url: str = msgspec.field(name="generatorURL")


def postable(alerts: Iterable[Alert], now_ms: int, *, cluster: str, page_url: str) -> bytes:
    """Encode the body of a post with the present state of alerts."""
    return msgspec.json.encode([_postable(alert, now_ms, cluster, page_url) for alert in alerts])


def _postable(alert: Alert, now_ms: int, cluster: str, page_url: str) -> PostableAlert:
    ends_ms = now_ms + FIRING_FOR_MS if alert.ended_unix_ms is None else alert.ended_unix_ms
    summary = alert.ended_because or alert.called
    return PostableAlert(
        labels={"alertname": alert.name, "severity": alert.severity, "cluster": cluster, **alert.labels},
        annotations={"summary": summary, "runbook_url": alert.runbook_url},
        starts_at=_rfc3339(alert.started_unix_ms),
        ends_at=_rfc3339(ends_ms),
        generator_url=page_url,
    )


def alert_event(alert: Alert, metrics_id: str, incarnation: int) -> AlertEvent:
    return AlertEvent(
        alert_id=alert.id,
        metrics_id=metrics_id,
        incarnation=incarnation,
        sequence=alert.number,
        state=ALERT_STATE_FIRING if alert.state == "firing" else ALERT_STATE_RESOLVED,
        name=alert.name,
        severity=alert.severity,
        labels=alert.labels,
        reason=alert.ended_because or alert.called,
        started_unix_ns=alert.started_unix_ms * MS_NS,
        ended_unix_ns=(alert.ended_unix_ms or 0) * MS_NS,
        runbook_url=alert.runbook_url,
    )


def _rfc3339(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


RESEND_S: Final = 60.0
TIMEOUT_S: Final = 5.0
FIRST_RETRY_S: Final = 0.5
MAX_RETRY_S: Final = 30.0
MAX_ENDED: Final = 1_000
"""The maximum number of ended alerts that wait for a post; beyond it the oldest is dropped and counted."""
MAX_AT_ONCE: Final = 500
"""The maximum number of alerts in one post; Alertmanager takes bodies of some MB."""

log = structlog.get_logger()


class Webhook:
    """One receiver of alerts, with its own retries."""

    def __init__(
        self, url: str, book: AlertStore, clock: Clock, *, cluster: str, make_client: MakeClient = httpx.AsyncClient
    ) -> None:
        self._url = url
        self._book = book
        self._clock = clock
        self._cluster = cluster
        self._make_client = make_client
        self._ended: dict[str, Alert] = {}
        self._news = asyncio.Event()
        self.page_url = ""
        self.posts = {"ok": 0, "failed": 0}
        self.dropped_alerts = 0
        self.loud: Callable[[Iterable[Alert]], list[Alert]] = list
        """Filters out silenced alerts, which are not posted."""

    def look_again(self) -> None:
        """Post the alerts that fire at once, after the silences changed."""
        self._news.set()

    def enter(self, changed: Iterable[Alert]) -> None:
        """Record changed alerts and post them at once."""
        for alert in changed:
            self._ended.pop(alert.id, None)  # an alert that fires again is not over
            if alert.state == "resolved" and self.loud([alert]):
                self._ended[alert.id] = alert
                if len(self._ended) > MAX_ENDED:
                    del self._ended[next(iter(self._ended))]
                    self.dropped_alerts += 1
            self._news.set()

    async def run(self) -> None:
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        async with self._make_client(timeout=TIMEOUT_S, headers={"content-type": "application/json"}) as http:
            while True:
                await self._wait_for_news()
                while error := await self._post(http):
                    if not backoff.failures:
                        log.warning("a webhook does not accept alerts: retrying", error=error)
                    await asyncio.sleep(backoff.next_s())
                backoff.reset()

    async def _wait_for_news(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESEND_S):
                await self._news.wait()
        self._news.clear()

    async def _post(self, http: httpx.AsyncClient) -> str:
        """Post all alerts; return the error, empty on success or without anything to post."""
        firing = self.loud(self._book.firing())
        critical = [alert for alert in firing if alert.severity == "critical"]
        others = [alert for alert in firing if alert.severity != "critical"]
        alerts = [*critical, *self._ended.values(), *others]
        for first in range(0, len(alerts), MAX_AT_ONCE):
            if error := await self._post_some(http, alerts[first : first + MAX_AT_ONCE]):
                return error
        return ""

    async def _post_some(self, http: httpx.AsyncClient, alerts: list[Alert]) -> str:
        body = postable(alerts, self._clock.now_ns() // MS_NS, cluster=self._cluster, page_url=self.page_url)
        try:
            answer = await http.post(self._url, content=body)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self.posts["failed"] += 1
            return repr(error)
        self.posts["ok"] += 1
        for alert in alerts:
            if self._ended.get(alert.id) is alert:
                del self._ended[alert.id]
        return ""
