"""Tests of the delivery of alerts over the wire and by webhook."""

import asyncio
import json
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from libs.contracts.pb.fulcrum.alerts.v1.alerts_pb2 import ALERT_STATE_FIRING, ALERT_STATE_RESOLVED
from libs.policy.alerts.rules import Name
from libs.policy.alerts.store import AlertStore, Transition
from libs.runtime.http import bind, serve_http
from libs.runtime.tasks import TaskOwner
from libs.testing.wait import ManualClock, until
from services.metrics.alerts import webhook as webhook_module
from services.metrics.alerts.webhook import Webhook, alert_event, postable

FIRED = Transition(Name.IMBALANCE, (("model", "m"), ("phase", "prefill")), "warning", "busy", 10**18, None)
ENDED = replace(FIRED, reason="calm", ended_ns=10**18 + 5 * 10**9)


def test_an_alert_is_sent_with_its_state_labels_and_runbook():
    book = AlertStore()
    (fired,) = book.enter([FIRED])
    (ended,) = book.enter([ENDED])
    assert fired.id == ended.id == 'FulcrumImbalance{model="m",phase="prefill"}'
    assert (book.firing(), book.newest(5)) == ([], [ended, fired])
    events = [alert_event(alert, "metrics-a", 7) for alert in (fired, ended)]
    assert [event.state for event in events] == [ALERT_STATE_FIRING, ALERT_STATE_RESOLVED]
    assert [(event.reason, event.ended_unix_ns) for event in events] == [("busy", 0), ("calm", ENDED.ended_ns)]
    posted = json.loads(postable([fired, ended], 10**12, cluster="blue", page_url="http://page"))
    assert posted[0]["labels"] == {
        "alertname": "FulcrumImbalance", "severity": "warning", "cluster": "blue", "model": "m", "phase": "prefill",
    }  # fmt: skip
    assert posted[1] | {"annotations": None} == posted[0] | {"annotations": None, "endsAt": "2001-09-09T01:46:45.000Z"}
    assert posted[0]["endsAt"] == "2001-09-09T01:50:40.000Z"
    assert posted[1]["annotations"] == {"summary": "calm", "runbook_url": "/runbook/FulcrumImbalance"}


class Receiver:
    """A webhook that accepts posts after a given number of refusals."""

    def __init__(self, refuses=0):
        self.posts = []
        self.refuses = refuses

    async def post(self, request):
        if self.refuses:
            self.refuses -= 1
            return Response(status_code=503)
        self.posts.append(await request.json())
        return Response()

    def app(self):
        return Starlette(routes=[Route("/api/v2/alerts", self.post, methods=["POST"])])


@pytest.mark.system
async def test_a_webhook_receives_start_and_end_even_if_it_refuses_at_first(monkeypatch):
    monkeypatch.setattr(webhook_module, "FIRST_RETRY_S", 0.01)
    receiver, book, tasks = Receiver(refuses=2), AlertStore(), TaskOwner()
    try:
        async with serve_http(receiver.app(), bind("127.0.0.1", 0, "PORT"), tasks=tasks) as url:
            webhook = Webhook(f"{url}/api/v2/alerts", book, ManualClock(10**18), cluster="blue")
            tasks.spawn("webhook", webhook.run())
            webhook.enter(book.enter([FIRED]))
            await until(lambda: webhook.posts["ok"])
            assert [alert["annotations"]["summary"] for alert in receiver.posts[0]] == ["busy"]
            assert webhook.posts == {"failed": 2, "ok": 1}
            webhook.enter(book.enter([ENDED]))
            await until(lambda: len(receiver.posts) > 1)
            assert [alert["annotations"]["summary"] for alert in receiver.posts[1]] == ["calm"]
    finally:
        await tasks.close()
    assert tasks.error is None


@pytest.mark.system
async def test_a_webhook_is_reminded_of_firing_alerts_and_not_of_ended_ones(monkeypatch):
    monkeypatch.setattr(webhook_module, "RESEND_S", 0.05)
    receiver, book, tasks = Receiver(), AlertStore(), TaskOwner()
    other = replace(FIRED, labels=(("model", "n"),))
    try:
        async with serve_http(receiver.app(), bind("127.0.0.1", 0, "PORT"), tasks=tasks) as url:
            webhook = Webhook(f"{url}/api/v2/alerts", book, ManualClock(10**18), cluster="blue")
            webhook.enter(book.enter([FIRED, other, ENDED]))
            tasks.spawn("webhook", webhook.run())
            await until(lambda: len(receiver.posts) > 2)
        assert [len(post) for post in receiver.posts[:3]] == [2, 1, 1]
    finally:
        await tasks.close()


@pytest.mark.system
async def test_a_webhook_receives_all_firing_alerts_in_batches_with_critical_ones_first(monkeypatch):
    monkeypatch.setattr(webhook_module, "FIRST_RETRY_S", 0.01)
    receiver, book, tasks = Receiver(refuses=1), AlertStore(), TaskOwner()
    many = [
        replace(FIRED, labels=(("model", str(number)),), severity="critical" if number == 1199 else "warning")
        for number in range(1200)
    ]
    try:
        async with serve_http(receiver.app(), bind("127.0.0.1", 0, "PORT"), tasks=tasks) as url:
            webhook = Webhook(f"{url}/api/v2/alerts", book, ManualClock(10**18), cluster="blue")
            webhook.enter(book.enter(many))
            tasks.spawn("webhook", webhook.run())
            await until(lambda: len(receiver.posts) == 3)
    finally:
        await tasks.close()
    assert [len(post) for post in receiver.posts] == [500, 500, 200]
    assert receiver.posts[0][0]["labels"]["model"] == "1199"
    assert {alert["labels"]["model"] for post in receiver.posts for alert in post} == set(map(str, range(1200)))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api/v2/alerts", "http://alertmanager:9o93/api/v2/alerts"])
async def test_an_unreachable_webhook_blocks_nothing_and_ends_with_its_task(url):
    book, tasks = AlertStore(), TaskOwner()
    webhook = Webhook(url, book, ManualClock(10**18), cluster="blue")
    tasks.spawn("webhook", webhook.run())
    webhook.enter(book.enter([FIRED]))
    await until(lambda: webhook.posts["failed"])
    assert tasks.error is None
    async with asyncio.timeout(2):
        await tasks.close()
    assert tasks.error is None


def test_undelivered_ended_alerts_are_bounded_and_counted(monkeypatch):
    monkeypatch.setattr(webhook_module, "MAX_ENDED", 3)
    book = AlertStore()
    webhook = Webhook("http://127.0.0.1:9", book, ManualClock(10**18), cluster="blue")
    for number in range(5):
        labels = (("model", str(number)),)
        webhook.enter(book.enter([replace(FIRED, labels=labels), replace(ENDED, labels=labels)]))
    assert webhook.dropped_alerts == 2
