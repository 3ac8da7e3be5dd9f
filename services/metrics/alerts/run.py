"""Assembly of alerts: topic, webhooks, silences, routes and metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastapi import APIRouter

from libs.bus.port import Bus
from libs.contracts.topics import ALERTS
from libs.keys.change_guard import ChangeGuard
from libs.policy.alerts.store import Alert
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from services.metrics.alerts.api import AlertRoutes
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.alerts.prometheus import AlertCollector
from services.metrics.alerts.silencer import Silencer
from services.metrics.alerts.webhook import Webhook
from services.metrics.alerts.wire import alert_event
from services.metrics.outgoing import MakeClient
from services.metrics.settings import MetricsSettings


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
