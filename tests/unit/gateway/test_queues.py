"""Tests of waiting requests at gateways and workers: reported by gateways, summed by phase, otherwise unknown."""

from types import SimpleNamespace

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue
from libs.contracts.protocol import FRESH_NS
from libs.policy.gateway.queues import Queue, first_token_waits, model_queues
from libs.policy.gateway.view import WorkerView
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.gateways import (
    GONE_NS,
    MAX_GATEWAYS,
    MAX_MODELS,
    OLD_NS,
    SILENT_NS,
    AwaitedTokens,
    GatewayReports,
    ModelBacklog,
)
from libs.testing.wait import ManualClock
from libs.testing.workers.hosts import RecordingBus
from libs.testing.workers.telemetry import MS, at, step_batch
from services.gateway.refusals import RefusalCounts
from services.gateway.request.recorder import QueueReporter
from services.metrics.accounting.queues import phase_queues


def queues_message(gateway_id="a", now_ms=0, incarnation=1, last=False, **queue):
    queues = [ModelQueue(model="m", **queue)] if queue else []
    message = {"incarnation": incarnation, "told_unix_ns": at(now_ms), "queues": queues, "last": last}
    return GatewayQueues(gateway_id=gateway_id, **message)


def test_queues_are_summed_until_a_gateway_leaves_or_falls_silent_while_others_report():
    gateways = GatewayReports()
    gateways.take(queues_message("a", prefill_requests=3, prefill_tokens=300), at(0))
    gateways.take(queues_message("b", prefill_requests=1, prefill_tokens=50, decode_requests=7), at(0))
    assert gateways.waiting(at(0)) == {"m": ModelBacklog(4, 350, 7, 0, 350)}
    gateways.take(queues_message("b", SILENT_NS // MS, decode_requests=5), at(0) + SILENT_NS)
    assert gateways.waiting(at(0) + SILENT_NS) == {"m": ModelBacklog(0, 0, 5)}
    gateways.take(queues_message("a", 2_100, prefill_requests=2, prefill_tokens=20), at(2_100))
    gateways.take(queues_message("b", 2_100, last=True), at(2_100))
    assert gateways.waiting(at(2_100)) == {"m": ModelBacklog(2, 20, hopeful_tokens=20)}


def test_queues_are_unknown_while_no_gateway_reports_and_later_empty():
    gateways = GatewayReports()
    assert gateways.waiting(at(0)) == {}
    gateways.take(queues_message(decode_requests=5), at(0))
    assert gateways.waiting(at(0) + SILENT_NS + 1) is None
    assert gateways.waiting(at(0) + GONE_NS + 1) == {}


def test_old_and_overtaken_reports_change_nothing():
    gateways = GatewayReports()
    gateways.take(queues_message(decode_requests=5), at(0) + OLD_NS + 1)
    assert gateways.waiting(at(0) + OLD_NS + 1) == {}
    for incarnation, now_ms, count in ((2, 0, 1), (2, 200, 2), (2, 100, 9), (1, 300, 9)):
        gateways.take(queues_message(now_ms=now_ms, incarnation=incarnation, decode_requests=count), at(300))
    assert gateways.waiting(at(300)) == {"m": ModelBacklog(decode_requests=2)}


def test_gateways_and_models_are_bounded():
    gateways = GatewayReports()
    for number in range(MAX_GATEWAYS + 5):
        gateways.take(queues_message(f"g{number}", decode_requests=1), at(number))
    assert gateways.waiting(at(300))["m"].decode_requests == MAX_GATEWAYS
    many = GatewayQueues(gateway_id="many", told_unix_ns=at(300))
    many.queues.extend(ModelQueue(model=str(number), decode_requests=1) for number in range(MAX_MODELS + 5))
    gateways.take(many, at(300))
    assert len(gateways.waiting(at(300))) == MAX_MODELS + 1


def worker(worker_id, role, **load):
    return step_batch(0, (0, 100), worker=worker_id, role=role, load=Load(**load))


def test_a_phases_queue_sums_waiting_requests_at_its_workers_and_at_gateways():
    fleet, gateways = FleetTelemetry(prefill_shares), GatewayReports()
    for batch in (
        worker("p", "prefill", waiting=3, waiting_prefill_tokens=900),
        worker("d", "decode", waiting=2, running=8),
    ):
        fleet.add(batch, at(100))
    gateways.take(
        GatewayQueues(
            gateway_id="g",
            told_unix_ns=at(100),
            queues=[ModelQueue(model="sim", prefill_requests=40, prefill_tokens=8000)],
        ),
        at(100),
    )
    found = {each.phase: each for each in phase_queues(fleet.directory.loads(at(100)), fleet.clocks, gateways, at(100))}
    assert [(found[phase].requests, found[phase].prompt_tokens) for phase in ("prefill", "decode")] == [
        (43, 8900),
        (2, 0),
    ]
    assert (found["prefill"].gateway_requests, found["prefill"].gateway_prompt_tokens) == (40, 8000)
    later = at(100) + FRESH_NS
    gateways.take(queues_message("g", later // MS - at(0) // MS), later)
    assert {each.requests for each in phase_queues(fleet.directory.loads(later), fleet.clocks, gateways, later)} == {
        None
    }


def view(prefill=0, decode=0, *, role="prefill"):
    takes = {"takes_prefill": role == "prefill", "takes_decode": role != "prefill", "takes_both": role == "mixed"}
    return WorkerView("w", "m", "k", prefill_credits=prefill, decode_credits=decode, load=0, **takes)


@pytest.mark.parametrize(
    ("workers", "phase"),
    [
        ([view(0), view(decode=3, role="decode")], "prefill"),
        ([view(2), view(decode=0, role="decode")], "decode"),
        ([view(0), view(decode=0, role="decode")], "prefill"),
        ([view(decode=0, role="mixed")], "decode"),
        ([], "prefill"),
    ],
    ids=["prefill is full", "decode is full", "both are", "mixed only", "no worker"],
)
def test_a_choice_counts_in_the_phase_that_has_no_room(workers, phase):
    waiting = [
        SimpleNamespace(model="m", decodes_next=False, pooled=False, tokens=100, images=()),
        SimpleNamespace(model="m", decodes_next=True, pooled=False, tokens=70, images=()),
    ]
    (queue,) = model_queues(waiting, workers)
    fits = {"prefill": (1, 100, 1, 0), "decode": (0, 0, 2, 100)}[phase]
    reported = queue.prefill_requests, queue.prefill_tokens, queue.decode_requests, queue.decode_prompt_tokens
    assert reported == fits


def awaiting(age_ms, *, model="m", batch=False, output=(), due_ms=0):
    arrival_ns = at(100_000 - age_ms)
    due_ns = arrival_ns + due_ms * MS if due_ms else 0
    known = {"arrival_unix_ns": arrival_ns, "ttft_deadline_unix_ns": due_ns}
    return SimpleNamespace(model=model, batch=batch, output=output, **known)


def test_the_wait_for_a_first_token_is_reported_and_grows_until_the_next_report():
    live = [
        awaiting(40_000, due_ms=5_000), awaiting(60_000, due_ms=90_000), awaiting(10), awaiting(700), awaiting(900),
        awaiting(9_000, batch=True), awaiting(9_000, output=[1]), awaiting(50, model="n"),
    ]  # fmt: skip
    bus, gateways = RecordingBus(), GatewayReports()
    queues = [Queue("m", prefill_requests=1), Queue("n"), Queue("o")]
    dispatcher = SimpleNamespace(live=8, queues=lambda: queues, awaited=lambda: first_token_waits(live, at(100_000)))
    QueueReporter(bus, dispatcher, RefusalCounts(), "gw", ManualClock(at(100_000))).report(queues)
    gateways.take(bus.published[0], at(100_000))
    found = gateways.awaited(at(100_000))
    assert found["m"] == AwaitedTokens(((10 * MS, 1), (800 * MS, 2), (50_000 * MS, 2)), overdue=1)
    assert (found["m"].requests, found["n"].requests, "o" in found) == (5, 1, False)
    assert gateways.awaited(at(101_000))["n"].ages == ((1_050 * MS, 1),)
    assert gateways.awaited(at(100_000) + SILENT_NS + 1) == {}


def test_a_gateway_reports_until_it_has_left():
    bus, waiting = RecordingBus(), [Queue("m", prefill_requests=1)]
    dispatcher = SimpleNamespace(live=1, queues=lambda: waiting, awaited=dict)
    reporter = QueueReporter(bus, dispatcher, RefusalCounts(), "gw", ManualClock(at(0)))
    reporter.report(waiting)
    reporter.leave()
    reporter.report(waiting)
    assert [(message.gateway_id, len(message.queues), message.last) for message in bus.published] == [
        ("gw", 1, False),
        ("gw", 0, True),
    ]
