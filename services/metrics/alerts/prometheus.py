from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.policy.alerts.rules import ON_TELEMETRY, Name, Severity
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.alerts.silencer import Silencer
from services.metrics.alerts.webhook import Webhook


class AlertCollector(Collector):
    """Alerts and their delivery as Prometheus metrics, read at each scrape."""

    def __init__(self, desk: AlertEvaluator, webhooks: Sequence[Webhook], silencer: Silencer) -> None:
        self._desk = desk
        self._webhooks = webhooks
        self._silencer = silencer

    def collect(self) -> Iterator[Metric]:
        # Every alert has a sample, so that 0 is shown.
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
            names.ALERTS_HELD_BACK, "1 while it neither fires nor ends, its telemetry being old.", labels=("alert",)
        )
        for name in ON_TELEMETRY:
            held_back.add_metric((name,), name in self._desk.book.held_back)
        yield held_back
        yield CounterMetricFamily(names.ALERT_CHANGES_TOTAL, "Alerts that fired or ended.", self._desk.book.count)
        yield CounterMetricFamily(
            names.ALERT_UNFOLLOWED_TOTAL, "Signs of subjects for which there was no room.", self._desk.unfollowed_signs
        )
        posts = CounterMetricFamily(names.ALERT_POSTS_TOTAL, "Posts to webhooks.", labels=("result",))
        for result in ("ok", "failed"):
            posts.add_metric((result,), sum(webhook.posts[result] for webhook in self._webhooks))
        yield posts
        yield CounterMetricFamily(
            names.ALERT_POSTS_DROPPED_TOTAL,
            "Ended alerts that were never posted to a webhook, because too many waited.",
            sum(webhook.dropped_alerts for webhook in self._webhooks),
        )
