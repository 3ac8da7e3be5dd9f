"""Tests of silences and acknowledgements: their scope, duration and survival of a restart."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from libs.contracts.errors import Conflict, InvalidRequest, SilenceNotFound
from libs.keys.gate import ChangeGuard
from libs.policy.alerts.rules import Name
from libs.policy.alerts.store import (
    LEAST_NS,
    MAX_SILENCES,
    MOST_NS,
    Alert,
    AlertStore,
    Silence,
    SilenceRegistry,
    Transition,
    ended,
    fault_of,
)
from libs.runtime.web import make_web_app
from libs.telemetry.columns import prefill_shares
from libs.testing.memory.broker import MemoryBroker
from libs.testing.memory.bus import MemoryBus
from libs.testing.wait import ManualClock, until
from libs.testing.workers.hosts import RecordingBus
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.alerts.run import AlertCollector
from services.metrics.alerts.silences import AlertRoutes, Silencer, silence_message, silence_of
from services.metrics.alerts.webhook import Webhook
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState

NOW_NS = 1_795_000_000 * 10**9
HOUR_NS = 3_600 * 10**9
STUCK = Transition(Name.WORKER_STUCK, (("model", "m"), ("worker", "gpu-3")), "critical", "no step", NOW_NS, None)
BUSY = Transition(Name.IMBALANCE, (("model", "m"), ("phase", "prefill")), "warning", "busy", NOW_NS, None)


def silence(**more: Any) -> Silence:
    made = {"id": "1", "made_ns": NOW_NS, "until_ns": NOW_NS + HOUR_NS, "changed_ns": NOW_NS, "actor": "me"}
    return Silence(**{**made, "reason": "", "name": Name.WORKER_STUCK, **more})


def firing(book: AlertStore, *transitions: Transition) -> list[Alert]:
    return book.enter(transitions or (STUCK, BUSY))


def test_a_silence_matches_a_name_labels_or_both() -> None:
    stuck, busy = firing(AlertStore())
    of = silence()
    assert of.matches(stuck) and not of.matches(busy)
    by_label = silence(name="", labels=(("model", "m"),))
    assert by_label.matches(stuck) and by_label.matches(busy)
    both = silence(labels=(("worker", "gpu-4"),))
    assert not both.matches(stuck)


def test_a_silence_ends_at_its_time_and_a_cancelled_one_at_once() -> None:
    book, (stuck, _) = SilenceRegistry(), firing(AlertStore())
    of = silence()
    assert book.take(of, NOW_NS)
    assert book.silenced(stuck, of.until_ns - 1) == of
    assert book.silenced(stuck, of.until_ns) is None
    assert book.take(ended(of, NOW_NS + 5), NOW_NS + 5)
    assert book.loud([stuck], NOW_NS + 6) == [stuck]


def test_a_late_message_does_not_restore_an_ended_silence() -> None:
    book, of = SilenceRegistry(), silence()
    book.take(of, NOW_NS)
    book.take(ended(of, NOW_NS), NOW_NS)
    assert not book.take(of, NOW_NS)
    assert book.holding(NOW_NS) == []


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"until_ns": NOW_NS + LEAST_NS - 1}, "60 s to 7 days"),
        ({"until_ns": NOW_NS + MOST_NS + 1}, "60 s to 7 days"),
        ({"name": "FulcrumNothing"}, "FulcrumWorkerStuck"),
        ({"name": ""}, "every alert"),
        ({"reason": "x" * 201}, "200 characters"),
        ({"id": ""}, "64 are allowed"),
        ({"labels": tuple((str(number), "x") for number in range(9))}, "8 are allowed"),
    ],
)
def test_an_invalid_silence_is_refused_with_a_message(wrong: dict[str, Any], word: str) -> None:
    assert word in fault_of(silence(**wrong))
    assert not SilenceRegistry().take(silence(**wrong), NOW_NS)


def test_the_number_of_silences_is_bounded_and_ended_ones_make_room() -> None:
    book = SilenceRegistry()
    for number in range(MAX_SILENCES):
        assert book.take(silence(id=str(number)), NOW_NS)
    assert not book.has_room(NOW_NS)
    assert not book.take(silence(id="more"), NOW_NS)
    later_ns = NOW_NS + 2 * HOUR_NS
    assert book.take(silence(id="more", until_ns=later_ns + HOUR_NS), later_ns)


def test_a_silence_from_a_clock_far_ahead_is_ignored() -> None:
    far_ns = NOW_NS + 365 * 24 * HOUR_NS
    ahead = silence(made_ns=far_ns, until_ns=far_ns + HOUR_NS, changed_ns=far_ns)
    assert not fault_of(ahead)
    assert not SilenceRegistry().take(ahead, NOW_NS)


def test_a_silence_round_trips_through_its_message() -> None:
    for each in (silence(labels=(("a", "1"), ("b", "2")), reason="why"), silence(name="", alert_id="x", ended=True)):
        assert silence_of(silence_message(each)) == each


async def test_an_acknowledgement_ends_with_its_alert() -> None:
    alerts, clock = AlertStore(), ManualClock(NOW_NS)
    silencer = Silencer(alerts, RecordingBus(), clock)
    stuck, _ = firing(alerts)
    made = silencer.acknowledge(stuck.id, actor="me", reason="I look")
    assert silencer.loud([stuck]) == [stuck]  # it is shown as looked after, and not silent
    silencer.enter(alerts.enter([replace(BUSY, ended_ns=NOW_NS + 1)]))
    assert silencer.holding() == [made]
    silencer.enter(alerts.enter([replace(STUCK, ended_ns=NOW_NS + 1)]))
    assert silencer.holding() == []
    with pytest.raises(InvalidRequest, match="GET /v1/alerts"):
        silencer.acknowledge(stuck.id, actor="me", reason="")


async def test_the_last_person_to_acknowledge_an_alert_counts() -> None:
    alerts = AlertStore()
    silencer = Silencer(alerts, RecordingBus(), ManualClock(NOW_NS))
    stuck, _ = firing(alerts)
    for actor in ("ann", "bob"):
        silencer.acknowledge(stuck.id, actor=actor, reason="")
    assert [each.actor for each in silencer.holding()] == ["bob"]


async def test_too_many_silences_are_refused_and_an_unknown_one_cannot_be_ended() -> None:
    silencer = Silencer(AlertStore(), RecordingBus(), ManualClock(NOW_NS))
    for _ in range(MAX_SILENCES):
        silencer.silence(Name.WORKER_STUCK, {}, 60.0, actor="me", reason="")
    with pytest.raises(Conflict, match="end one first"):
        silencer.silence(Name.WORKER_STUCK, {}, 60.0, actor="me", reason="")
    with pytest.raises(SilenceNotFound):
        silencer.end("none")


async def test_silences_survive_a_restart_and_reach_other_metrics_services() -> None:
    broker, clock = MemoryBroker(), ManualClock(NOW_NS)
    buses = [MemoryBus(broker, "c", clock=clock) for _ in range(2)]
    here, other = (Silencer(AlertStore(), bus, clock) for bus in buses)
    following = asyncio.ensure_future(other.follow())
    try:
        for bus in buses:
            await bus.start()
        kept = here.silence(Name.WORKER_STUCK, {"worker": "gpu-3"}, 3600.0, actor="me", reason="replaced")
        gone = here.silence(Name.IMBALANCE, {}, 3600.0, actor="me", reason="")
        clock.advance_ms(1)
        here.end(gone.id)
        await until(lambda: other.holding() == [kept])
        again = Silencer(AlertStore(), buses[1], clock)
        reading = asyncio.ensure_future(again.follow())
        await until(lambda: again.holding() == [kept])
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        for bus in buses:
            await bus.close()


class Served:
    """Routes over a book with two alerts that fire."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW_NS)
        state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
        self.desk = AlertEvaluator(state, MetricsSettings().alert_limits(), lag_ns=0)
        self.stuck, self.busy = firing(self.desk.book)
        self.silencer = Silencer(self.desk.book, RecordingBus(), self.clock)
        metrics = CollectorRegistry()
        self.collector = AlertCollector(self.desk, [], self.silencer)
        app = make_web_app("test", "", not_ready=lambda: None, metrics=metrics)
        app.include_router(
            AlertRoutes(self.desk.book, self.silencer, ChangeGuard(None, self.clock, token="secret")).router()
        )
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://m")

    async def ask(self, method: str, path: str, token: str = "secret", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await self.http.request(method, path, json=body or None, headers=headers)

    def counted(self) -> dict[str, float]:
        found = {each.name: each for each in self.collector.collect()}
        firing = sum(sample.value for sample in found["fulcrum_alerts_firing"].samples)
        return {"firing": firing, "silenced": found["fulcrum_alerts_silenced"].samples[0].value}


async def test_alerts_are_silenced_over_rest_only_with_the_token_and_no_longer_counted() -> None:
    served = Served()
    wanted: dict[str, Any] = {
        "alert_name": "FulcrumWorkerStuck",
        "labels": {"worker": "gpu-3"},
        "for_s": 3600,
        "reason": "replaced",
    }
    for token in ("", "wrong"):
        assert (await served.ask("POST", "/v1/alerts/silences", token, **wanted)).status_code == 401
    assert served.counted() == {"firing": 2, "silenced": 0}
    made = (await served.ask("POST", "/v1/alerts/silences", **wanted)).json()
    assert made["alerts"] == [served.stuck.id]
    found = (await served.ask("GET", "/v1/alerts", "")).json()
    assert len(found["firing"]) == 2 and found["silences"] == [made]
    assert served.counted() == {"firing": 1, "silenced": 1}
    assert (await served.ask("DELETE", f"/v1/alerts/silences/{made['id']}", "")).status_code == 401
    assert (await served.ask("DELETE", f"/v1/alerts/silences/{made['id']}")).status_code == 200
    assert (await served.ask("DELETE", f"/v1/alerts/silences/{made['id']}")).status_code == 404
    assert served.counted() == {"firing": 2, "silenced": 0}


async def test_a_firing_alert_is_acknowledged_over_rest() -> None:
    served = Served()
    made = (await served.ask("POST", "/v1/alerts/acks", alert_id=served.stuck.id, actor="ann")).json()
    assert (made["alert_id"], made["actor"], made["alerts"]) == (served.stuck.id, "token (ann)", [served.stuck.id])
    assert (await served.ask("POST", "/v1/alerts/acks", alert_id="none")).status_code == 400


async def test_a_silenced_alert_is_not_posted_until_its_silence_ends() -> None:
    alerts, clock, posts = AlertStore(), ManualClock(NOW_NS), []

    def receive(request: httpx.Request) -> httpx.Response:
        posts.append(request.content.decode())
        return httpx.Response(200)

    def client(**_: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(receive))

    silencer = Silencer(alerts, RecordingBus(), clock)
    webhook = Webhook("http://hook/", alerts, clock, cluster="c", make_client=client)
    webhook.loud = silencer.loud
    silencer.changed.append(webhook.look_again)
    made = silencer.silence(Name.WORKER_STUCK, {}, 3600.0, actor="me", reason="")
    webhook.enter(firing(alerts))
    running = asyncio.ensure_future(webhook.run())
    try:
        await until(lambda: len(posts) == 1)
        assert "FulcrumImbalance" in posts[0] and "FulcrumWorkerStuck" not in posts[0]
        clock.advance_ms(1)
        silencer.end(made.id)
        await until(lambda: len(posts) == 2)
        assert "FulcrumWorkerStuck" in posts[1]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
