"""The audit trail: who changed what is recorded at each service's door, and nothing of what prompts say."""

from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.topics import AUDIT
from libs.keys import book as book_module
from libs.keys.audit import MAX_DETAIL_BYTES, AuditDoor, changes, deletes
from libs.keys.book import KeyBook, KeyChange, draw_key
from libs.keys.gate import KeyGate
from libs.keys.table import KeyTable
from libs.testing.batch.lanes import running
from libs.testing.wait import ManualClock, until
from libs.testing.workers.hosts import RecordingBus
from services.metrics import audit as audit_module
from services.metrics.audit import AuditLog


class World:
    """An app behind both doors."""

    def __init__(self, *, keys: bool = True, audited: Any = changes, with_body: bool = True) -> None:
        self.clock, self.recorded = ManualClock(), list[AuditEvent]()
        self.table, book = KeyTable(open_without_keys=True, token="suite"), KeyBook()
        self.secret, self.key = draw_key("a", now_s=0, role="operator")
        self.user, _ = "", None
        if keys:
            book = book.with_key(self.key, 0)
            self.user, user = draw_key("b", now_s=0)
            book = book.with_key(user, 0)
        self.table.replace(book, 0)
        gate = KeyGate(self.answer, self.table, self.clock, need=lambda *_: "operator")
        door = AuditDoor(
            gate, self.table, self.clock, service="planner", audited=audited, publish=self.recorded.append,
            with_body=with_body,
        )  # fmt: skip
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://127.0.0.1")

    async def answer(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Reads all of the body first, as routes do."""
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def put(self, key: str, body: bytes = b'{"mode": "off"}') -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return (await self.http.put("/v1/mode", content=body, headers=headers)).status_code


async def test_a_change_is_recorded_with_the_key_behind_it_and_a_look_is_not() -> None:
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


async def test_where_there_are_no_keys_the_suites_token_is_named_and_everybody_else_is_anybody() -> None:
    world = World(keys=False)
    await world.put("suite")
    await world.put("")
    assert [each.actor for each in world.recorded] == ["token", "anybody"]


async def test_a_record_is_bounded_and_numbers_differ_within_a_moment() -> None:
    world = World()
    for _ in range(2):
        await world.put(world.secret, b"\xff" * 100_000)
    assert all(len(each.detail) == MAX_DETAIL_BYTES for each in world.recorded)
    assert len({each.event_id for each in world.recorded}) == 2


async def test_a_gateway_records_deletions_and_never_what_was_sent() -> None:
    world = World(audited=deletes, with_body=False)
    headers = {"authorization": f"Bearer {world.secret}"}
    await world.http.post("/v1/completions", content=b"a prompt", headers=headers)
    await world.http.request("DELETE", "/v1/files/file-1", content=b"a prompt", headers=headers)
    await world.http.post("/v1/batches/batch-1/cancel", headers=headers)
    assert [each.action for each in world.recorded] == ["DELETE /v1/files/file-1", "POST /v1/batches/batch-1/cancel"]
    assert not any(each.detail for each in world.recorded)


def change(number: int) -> KeyChange:
    return KeyChange(number, "root", "create", f"key_{number}", "a")


def test_the_book_keeps_its_last_changes() -> None:
    book = KeyBook()
    for number in range(book_module.MAX_CHANGES + 5):
        book = book.noted(change(number))
    assert [each.at_unix_ns for each in book.changes] == list(range(5, book_module.MAX_CHANGES + 5))


async def test_changes_of_keys_reach_the_topic_once_and_the_trail_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(audit_module, "LOOK_S", 0.001)
    bus, table = RecordingBus(), KeyTable(open_without_keys=True)
    trail = AuditLog(bus, ManualClock(), table)
    async with running(trail.bring_keys()):
        for number in (1, 2):
            table.replace(KeyBook().noted(change(1)).noted(change(number)), 0)
            await until(lambda number=number: len(bus.published) >= number)
    assert [each.action for each in bus.published] == ["create key_1", "create key_2"]  # type: ignore[attr-defined]
    assert [each.actor for each in trail.newest(9, tenant="a")] == ["root", "root"]
    assert trail.newest(9, actor="somebody") == []
    monkeypatch.setattr(audit_module, "MAX_EVENTS", 2)
    trail.take(AuditEvent(event_id="new", at_unix_ns=9))
    assert [each.id for each in trail.newest(9)] == ["new", "keys-2-key_2"]


def test_the_topic_ends_by_itself() -> None:
    assert AUDIT.retention_ms == 90 * 24 * 3_600_000


async def test_what_a_planner_does_at_workers_all_day_pushes_out_nothing_that_people_did() -> None:
    log = AuditLog(RecordingBus(), ManualClock(), None)
    log.take(AuditEvent(event_id="keys-1", at_unix_ns=1, service="keys", actor="ada", action="revoke key_1"))
    for number in range(audit_module.MAX_EVENTS + 10):
        log.take(AuditEvent(event_id=f"worker-{number}", at_unix_ns=2 + number, service="worker", actor="planner"))
    shown = log.newest(audit_module.MAX_EVENTS)
    assert len(shown) == audit_module.MAX_WORKER_EVENTS + 1
    assert shown[0].id == f"worker-{audit_module.MAX_EVENTS + 9}" and shown[-1].actor == "ada"
