"""Tests of the audit trail: every service records who changed what, and nothing of prompts."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from libs.contracts.errors import QueueFull
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.topics import AUDIT
from libs.keys import audit as audit_keys
from libs.keys import book as book_module
from libs.keys.audit import MAX_DETAIL_BYTES, AuditMiddleware, changes, deletes
from libs.keys.book import KeyChange, KeySet, draw_key
from libs.keys.gate import KeyGate
from libs.keys.table import KeyTable
from libs.testing.batch.work import running
from libs.testing.memory.broker import MemoryBroker
from libs.testing.memory.bus import MemoryBus
from libs.testing.wait import ManualClock, until
from libs.testing.workers.hosts import RecordingBus
from services.metrics.http import audit as audit_module
from services.metrics.http.audit import AuditFilter, AuditLog, RecentEvents


class World:
    """An app behind both doors."""

    def __init__(self, *, keys: bool = True, audited: Any = changes, with_body: bool = True) -> None:
        self.clock, self.recorded = ManualClock(), list[AuditEvent]()
        self.metrics = CollectorRegistry()
        self.table, book = KeyTable(open_without_keys=True, token="suite"), KeySet()
        self.secret, self.key = draw_key("a", now_s=0, role="operator")
        self.user, self.bearer = "", f"Bearer {self.secret}".encode()
        if keys:
            book = book.with_key(self.key, 0)
            self.user, user = draw_key("b", now_s=0)
            book = book.with_key(user, 0)
        self.table.replace(book, 0)
        gate = KeyGate(self.answer, self.table, self.clock, need=lambda *_: "operator")
        door = AuditMiddleware(
            gate, self.table, self.clock, service="planner", audited=audited, publish=self.recorded.append,
            with_body=with_body, metrics=self.metrics,
        )  # fmt: skip
        self.door = door
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://127.0.0.1")

    async def answer(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Read all of the body first, as routes do."""
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def take(self, status: int) -> None:
        """A request of the operator was answered so."""
        scope = {"method": "DELETE", "path": "/v1/files/none", "headers": [(b"authorization", self.bearer)]}
        self.door._take(scope, b"", status)

    async def put(self, key: str, body: bytes = b'{"mode": "off"}') -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return (await self.http.put("/v1/mode", content=body, headers=headers)).status_code


async def test_a_change_is_recorded_with_its_key_and_a_read_is_not() -> None:
    world = World()
    assert await world.put(world.secret) == 200
    await world.http.get("/v1/mode", headers={"authorization": f"Bearer {world.secret}"})
    (event,) = world.recorded
    assert (event.actor, event.tenant, event.action) == (world.key.id, "a", "PUT /v1/mode")
    assert (event.detail, event.status, event.service) == ('{"mode": "off"}', 200, "planner")
    assert world.secret not in str(event)


async def test_an_attempt_without_the_role_is_recorded_and_one_without_a_key_is_not() -> None:
    world = World()
    assert await world.put(world.user) == 403
    assert await world.put("sk-fulcrum-wrong") == 401
    assert [(each.tenant, each.status) for each in world.recorded] == [("b", 403)]


async def test_refused_requests_are_counted_and_summarised_instead_of_recorded_one_by_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(audit_keys, "REFUSED_EVERY_S", 0.0)
    world = World()
    for _ in range(50):
        world.take(403)
    assert [each.repeats for each in world.recorded] == [0]
    await until(lambda: len(world.recorded) == 2)
    assert [(each.status, each.repeats) for each in world.recorded] == [(403, 0), (403, 49)]
    assert len({each.event_id for each in world.recorded}) == 2
    assert world.metrics.get_sample_value("fulcrum_audit_refused_total", {"status": "403"}) == 50
    world.take(403)
    assert len(world.recorded) == 3


async def test_concurrent_summaries_of_refusals_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(audit_keys, "MAX_REFUSED", 2)
    world = World()
    for status in (400, 403, 404, 409):
        world.take(status)
    assert [each.status for each in world.recorded] == [400, 403]
    assert world.metrics.get_sample_value("fulcrum_audit_refused_total", {"status": "409"}) == 1


async def test_a_key_in_a_path_or_a_body_is_masked_before_it_is_recorded() -> None:
    world = World()
    headers = {"authorization": f"Bearer {world.secret}"}
    await world.http.delete(f"/v1/files/{world.secret}", headers=headers)
    await world.http.put("/v1/mode", content=json.dumps({"reason": f"key {world.secret}"}), headers=headers)
    deleted, put = world.recorded
    assert deleted.action == "DELETE /v1/files/sk-fulcrum-***"
    assert put.detail == '{"reason": "key sk-fulcrum-***"}'


async def test_without_keys_the_suites_token_is_named_and_all_other_callers_are_anonymous() -> None:
    world = World(keys=False)
    await world.put("suite")
    await world.put("")
    assert [each.actor for each in world.recorded] == ["token", "anybody"]


async def test_a_record_is_bounded_and_numbers_differ_within_one_instant() -> None:
    world = World()
    for _ in range(2):
        await world.put(world.secret, b"\xff" * 100_000)
    assert all(len(each.detail) == MAX_DETAIL_BYTES for each in world.recorded)
    assert len({each.event_id for each in world.recorded}) == 2


async def test_a_gateway_records_deletions_and_never_the_content_of_requests() -> None:
    world = World(audited=deletes, with_body=False)
    headers = {"authorization": f"Bearer {world.secret}"}
    await world.http.post("/v1/completions", content=b"a prompt", headers=headers)
    await world.http.request("DELETE", "/v1/files/file-1", content=b"a prompt", headers=headers)
    await world.http.post("/v1/batches/batch-1/cancel", headers=headers)
    assert [each.action for each in world.recorded] == ["DELETE /v1/files/file-1", "POST /v1/batches/batch-1/cancel"]
    assert not any(each.detail for each in world.recorded)


def change(number: int) -> KeyChange:
    return KeyChange(number, "root", "create", f"key_{number}", "a")


def test_the_key_store_remembers_its_last_changes() -> None:
    book = KeySet()
    for number in range(book_module.MAX_CHANGES + 5):
        book = book.noted(change(number))
    assert [each.at_unix_ns for each in book.changes] == list(range(5, book_module.MAX_CHANGES + 5))


async def test_changes_of_keys_reach_the_topic_once_and_the_trail_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(audit_module, "LOOK_S", 0.001)
    bus, table = RecordingBus(), KeyTable(open_without_keys=True)
    trail = AuditLog(bus, ManualClock(), table)
    async with running(trail.bring_keys()):
        for number in (1, 2):
            table.replace(KeySet().noted(change(1)).noted(change(number)), 0)
            await until(lambda number=number: len(bus.published) >= number)
    assert [each.action for each in bus.published] == ["create key_1", "create key_2"]  # type: ignore[attr-defined]
    assert [each.actor for each in trail.newest(9, AuditFilter(tenant="a")).events] == ["root", "root"]
    assert trail.newest(9, AuditFilter(actor="somebody")).events == []


def test_the_topic_has_a_retention_time() -> None:
    assert AUDIT.retention_ms == 90 * 24 * 3_600_000


def event(number: int, **fields: Any) -> AuditEvent:
    made = {"service": "gateway", "actor": "key_u", "tenant": "users", "role": "user", "status": 200} | fields
    return AuditEvent(event_id=f"e-{number}", at_unix_ns=number * 1_000_000, **made)


REVOKED = AuditEvent(
    event_id="keys-1", at_unix_ns=1, service="keys", actor="ada", tenant="root", action="revoke key_1", role="admin"
)


def log_of(*events: AuditEvent) -> AuditLog:
    log = AuditLog(RecordingBus(), ManualClock(), None)  # type: ignore[arg-type]
    for each in events:
        log.take(each)
    return log


async def test_routine_orders_of_a_planner_evict_no_record_of_people() -> None:
    count = audit_module.MAX_CHANGES["planner"] + 10
    by_hand = event(1, service="worker", actor="token (ada)", tenant="", role="", action="SetRole gpu-1")
    made = [event(2 + number, service="worker", actor="planner", tenant="", role="") for number in range(count)]
    shown = log_of(REVOKED, by_hand, *made).newest(100_000).events
    assert len(shown) == audit_module.MAX_CHANGES["planner"] + 2
    assert [each.actor for each in shown[-2:]] == ["token (ada)", "ada"]


@pytest.mark.parametrize("status", [200, 404])
async def test_requests_of_users_evict_no_record_of_operators_nor_of_a_quieter_tenant(status: int) -> None:
    """Before, 10,600 DELETEs of a missing file hid every record of the administrators."""
    quiet = event(2, tenant="quiet")
    log = log_of(REVOKED, quiet, *(event(3 + number, status=status) for number in range(10_600)))
    assert [each.actor for each in log.newest(30, AuditFilter(tenant="root")).events] == ["ada"]
    assert [each.tenant for each in log.newest(30, AuditFilter(tenant="quiet")).events] == ["quiet"]
    noisy = log.newest(100_000, AuditFilter(tenant="users", refused=status == 404))
    assert 0 < len(noisy.events) < 10_600 and noisy.older
    assert noisy.complete_since_unix_ms == noisy.events[-1].unix_ms


def test_refused_attempts_are_separate_from_changes() -> None:
    log = log_of(REVOKED, event(2, status=403, action="PUT /v1/mode"), event(3, status=503))
    assert [each.status for each in log.newest(9).events] == [503, 0]
    assert [each.action for each in log.newest(9, AuditFilter(refused=True)).events] == ["PUT /v1/mode"]


def test_a_note_says_that_older_records_are_not_shown() -> None:
    log = log_of(*(event(number) for number in range(1, 6)))
    assert (log.newest(5).older, log.newest(5).complete_since_unix_ms) == (False, 0)
    assert (log.newest(3).older, log.newest(3).complete_since_unix_ms) == (True, 3)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=60), st.integers(1, 8))
def test_a_full_share_evicts_records_of_the_busiest_tenant_and_counts_them(
    made: list[tuple[str, int]], most: int
) -> None:
    kept, taken = RecentEvents(most), list[AuditEvent]()
    for number, (tenant, _) in enumerate(made):
        taken.append(event(number + 1, tenant=tenant))
        kept.take(taken[-1])
        kept.take(taken[-1])
    found = kept.found(AuditFilter())
    assert len(found) == min(len(made), most)
    for tenant in "abc":
        own = [each for each in taken if each.tenant == tenant]
        left = sorted(each.at_unix_ns for each in found if each.tenant == tenant)
        assert left == [each.at_unix_ns for each in own][len(own) - len(left) :], "the newest stay"
        assert kept.given_up_ns(tenant) == max((e.at_unix_ns for e in own if e.at_unix_ns not in left), default=0)
        assert len(left) >= min(len(own), most // 3)


async def test_the_topic_is_read_back_page_by_page_and_no_further_than_requested(monkeypatch: Any) -> None:
    monkeypatch.setattr(audit_module, "READ_RECORDS", 7)
    clock = ManualClock()
    async with opened_bus(clock) as bus:
        log = AuditLog(bus, clock, None)
        for number in range(1, 41):
            bus.publish(AUDIT, event(number, tenant="root" if number % 4 == 0 else "users"))
        async with bus.back_reader() as reader:
            while (await reader.held(AUDIT, 0)).end < 40:
                await asyncio.sleep(0)
        wanted, found, before = AuditFilter(tenant="root"), list[int](), None
        while True:
            page = await log.read_back(3, wanted, 10, before)
            found += [each.unix_ms for each in page.events]
            assert page.older == (page.next is not None)
            if page.next is None:
                break
            before = page.next
        assert found == [40, 36, 32, 28, 24, 20, 16, 12]
        assert page.complete_since_unix_ms == 10
        monkeypatch.setattr(audit_module, "MAX_READ_RECORDS", 14)
        page = await log.read_back(100, wanted, 0, None)
        assert ([each.unix_ms for each in page.events], page.older) == ([40, 36, 32, 28], True)
        monkeypatch.setattr(audit_module, "MAX_READERS", 0)
        with pytest.raises(QueueFull):
            await log.read_back(3, wanted, 10, None)


@asynccontextmanager
async def opened_bus(clock: ManualClock) -> AsyncIterator[MemoryBus]:
    bus = MemoryBus(MemoryBroker(), "test", clock=clock)
    await bus.start()
    yield bus
    await bus.close()
