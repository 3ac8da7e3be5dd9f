"""Assembly of alerts: topic, webhooks, silences, routes and metrics."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from fastapi import APIRouter
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.bus.port import Bus
from libs.contracts import metric_names as names
from libs.contracts.topics import ALERTS
from libs.keys.gate import ChangeGuard
from libs.policy.alerts.rules import ON_TELEMETRY, Name, Severity
from libs.policy.alerts.store import Alert
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.web import MakeClient
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.alerts.silences import AlertRoutes, Silencer
from services.metrics.alerts.webhook import Webhook, alert_event
from services.metrics.settings import MetricsSettings


class AlertCollector(Collector):
    """Alerts and their delivery as Prometheus metrics, read at each scrape."""

    def __init__(self, desk: AlertEvaluator, webhooks: Sequence[Webhook], silencer: Silencer) -> None:
        self._desk = desk
        self._webhooks = webhooks
        self._silencer = silencer

    def collect(self) -> Iterator[Metric]:
        # Every alert gets a sample, so that quiet ones show 0.
        alerts = self._desk.book.firing()
        loud = self._silencer.loud(alerts)
        firing = Counter((alert.name, alert.severity) for alert in loud)
        gauge = GaugeMetricFamily(
            names.ALERTS_FIRING, "Alerts that fire and are not silenced.", labels=("alert", "severity")
        )
        for name in Name:
            for severity in get_args(Severity):
                gauge.add_metric((name, severity), firing[name, severity])
        yield gauge
        yield GaugeMetricFamily(names.ALERTS_SILENCED, "Alerts that fire and are silenced.", len(alerts) - len(loud))
        held_back = GaugeMetricFamily(
            names.ALERTS_HELD_BACK, "1 while the alert is frozen because its telemetry is old.", labels=("alert",)
        )
        for name in ON_TELEMETRY:
            held_back.add_metric((name,), name in self._desk.book.held_back)
        yield held_back
        yield CounterMetricFamily(names.ALERT_CHANGES_TOTAL, "Alerts that fired or ended.", self._desk.book.count)
        yield CounterMetricFamily(
            names.ALERT_UNFOLLOWED_TOTAL,
            "Signs whose subjects were dropped for lack of room.",
            self._desk.unfollowed_signs,
        )
        posts = CounterMetricFamily(names.ALERT_POSTS_TOTAL, "Posts to webhooks by outcome.", labels=("result",))
        for result in ("ok", "failed"):
            posts.add_metric((result,), sum(webhook.posts[result] for webhook in self._webhooks))
        yield posts
        yield CounterMetricFamily(
            names.ALERT_POSTS_DROPPED_TOTAL,
            "Ended alerts that were never posted to a webhook, because too many waited.",
            sum(webhook.dropped_alerts for webhook in self._webhooks),
        )


@dataclass(frozen=True, slots=True)
class Alerting:
    """The parts of alerting that the service runs and serves."""

    desk: AlertEvaluator
    silencer: Silencer
    webhooks: list[Webhook]
    collector: AlertCollector
    router: APIRouter

    def start(self, page_url: str, tasks: TaskOwner) -> None:
        """Start the webhooks once the page, whose address alerts carry, is served."""
        self.desk.book.runbook_url = f"{page_url}/runbook"
        for webhook in self.webhooks:
            webhook.page_url = page_url
            tasks.spawn("webhook", webhook.run())


def open_alerts(
    settings: MetricsSettings,
    bus: Bus,
    desk: AlertEvaluator,
    clock: Clock,
    *,
    began_ns: int,
    make_client: MakeClient | None,
    guard: ChangeGuard,
) -> Alerting:
    """Assemble alerting and register the observers of `desk`.

    Webhooks post with `make_client`; None means no webhooks. `guard` admits callers who silence alerts.
    """
    webhooks = list(_webhooks(settings, desk, clock, make_client))
    silencer = Silencer(desk.book, bus, clock)
    for webhook in webhooks:
        webhook.loud = silencer.loud
        silencer.changed.append(webhook.look_again)
    desk.observers += [
        _publisher(bus, settings.id, began_ns),
        *(webhook.enter for webhook in webhooks),
        silencer.enter,
    ]
    collector = AlertCollector(desk, webhooks, silencer)
    router = AlertRoutes(desk.book, silencer, guard).router()
    return Alerting(desk, silencer, webhooks, collector, router)


def _webhooks(
    settings: MetricsSettings, desk: AlertEvaluator, clock: Clock, make_client: MakeClient | None
) -> Iterator[Webhook]:
    if make_client is None:
        return
    for url in settings.webhooks():
        yield Webhook(url, desk.book, clock, cluster=settings.cluster, make_client=make_client)


def _publisher(bus: Bus, metrics_id: str, incarnation: int) -> Callable[[list[Alert]], None]:
    def publish(changed: list[Alert]) -> None:
        for alert in changed:
            bus.publish(ALERTS, alert_event(alert, metrics_id, incarnation))

    return publish
