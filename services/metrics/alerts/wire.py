"""Wire formats of alerts: Alertmanager's API v2 and the alerts topic. Pure."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec

from libs.contracts.pb.fulcrum.alerts.v1.alerts_pb2 import ALERT_STATE_FIRING, ALERT_STATE_RESOLVED, AlertEvent
from libs.policy.alerts.store import MS_NS, Alert

FIRING_FOR_MS: Final = 240_000
"""The time after which Alertmanager takes a firing alert for over unless a post repeats it."""


class PostableAlert(msgspec.Struct, rename="camel"):
    """One entry of `POST /api/v2/alerts`."""

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
