"""Tests over scripted channels of the planner's route that gives one worker another role."""

from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL
from libs.keys.audit import AuditMiddleware, changes
from libs.keys.book import KeySet, draw_key
from libs.keys.table import KeyTable
from libs.runtime.tasks import TaskOwner
from libs.runtime.web import make_web_app
from libs.testing.wait import ManualClock
from libs.testing.workers.hosts import RecordingBus
from services.planner.executor import OrderExecutor
from services.planner.http.admin import Admin
from services.planner.http.roles_api import RolesApi
from services.planner.kept import Lead
from services.planner.settings import PlannerSettings
from tests.planner_rig import Cluster
from tests.unit.planner.test_planner_orders import Channel, Network, refused


class Rig:
    """Two workers, and a planner that may change them."""

    def __init__(self, *, token: str = "secret", **roles: Any) -> None:
        self.cluster, self.network = Cluster(**(roles or {"p": "prefill", "d": "decode", "e": "decode"})), Network()
        self.recorded, table = list[AuditEvent](), KeyTable(open_without_keys=True, token=token)
        self.secret, self.key = draw_key("ops", now_s=0, role="operator")
        table.replace(KeySet().with_key(self.key, 0), 0)
        executor = OrderExecutor(self.network, TaskOwner(), planner_id="planner-0", token=token)  # type: ignore[arg-type]
        admin = Admin(self.cluster.state, None, RecordingBus(), ManualClock(), token=token, keys=table)
        app = make_web_app("test", "", not_ready=lambda: None, metrics=CollectorRegistry())
        app.include_router(RolesApi(admin, executor).router())
        door = AuditMiddleware(
            app, table, ManualClock(), service="planner", audited=changes, publish=self.recorded.append
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://p")
        self.worker = self.network.channels["127.0.0.1:1"] = Channel()
        self.worker.may_answer.set()

    async def ask(self, worker: str = "d", token: str = "secret", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await self.http.put(f"/v1/workers/{worker}/role", json={"role": "prefill", **body}, headers=headers)


async def test_a_worker_gets_the_role_in_the_name_of_the_requester() -> None:
    rig = Rig()
    found = (await rig.ask(actor="ann", reason="prompts wait")).json()
    assert (found["worker"], found["role"], found["epoch"], found["changed"]) == ("d", "prefill", 4, True)
    (request,) = rig.worker.requests
    assert (request.role, request.expected_epoch, request.incarnation) == (ROLE_PREFILL, 3, 1)
    assert (request.actor, request.reason) == ("token (ann)", "prompts wait")
    assert rig.worker.closed == 1


async def test_the_key_is_the_actor_in_the_trail_and_at_the_worker_whatever_name_is_sent() -> None:
    """Before, the planner's record had the key, and the worker's had the sent name."""
    rig = Rig()
    assert (await rig.ask(token=rig.secret, actor="somebody else")).status_code == 200
    assert (await rig.ask(role="decode", actor="ann")).status_code == 200
    assert [each.actor for each in rig.worker.requests] == [rig.key.id, "token (ann)"]
    assert [each.actor for each in rig.recorded] == [rig.key.id, "token (ann)"]


@pytest.mark.parametrize(("worker", "role", "does"), [
    ("p", "decode", "computes prompts"), ("p", "standby", "computes prompts"), ("d", "standby", "decodes"),
    ("d", "prefill", "decodes"),
])  # fmt: skip
async def test_the_last_worker_of_a_role_is_moved_only_by_force(worker: str, role: str, does: str) -> None:
    rig = Rig(p="prefill", d="decode")
    answer = await rig.ask(worker, role=role)
    assert answer.status_code == 409
    assert f"{worker} is the last worker of sim that {does}" in answer.text and "force: true" in answer.text
    assert rig.worker.requests == []
    assert (await rig.ask(worker, role=role, force=True)).status_code == 200
    assert rig.worker.requests[0].force


async def test_a_single_worker_may_take_any_role() -> None:
    rig = Rig(d="mixed")
    assert (await rig.ask("d", role="decode")).status_code == 200


async def test_a_worker_that_already_has_the_role_is_not_called() -> None:
    rig = Rig()
    assert (await rig.ask("p")).json()["changed"] is False
    assert rig.worker.requests == []


async def test_a_role_is_taken_back_before_telemetry_shows_it() -> None:
    """Before, the worker still had the old role in the planner's view, and the request to return to it did nothing."""
    rig = Rig()
    assert (await rig.ask(role="prefill")).json()["epoch"] == 4
    found = (await rig.ask(role="decode")).json()
    assert (found["role"], found["epoch"], found["changed"]) == ("decode", 5, True)
    assert [each.expected_epoch for each in rig.worker.requests] == [3, 4]
    assert (await rig.ask(role="decode")).json()["changed"] is False


async def test_the_last_worker_of_a_role_is_known_before_telemetry_shows_the_last_move() -> None:
    rig = Rig()
    assert (await rig.ask("d")).status_code == 200
    assert "e is the last worker of sim that decodes" in (await rig.ask("e")).text


async def test_only_role_mixed_has_a_budget() -> None:
    rig = Rig()
    assert (await rig.ask(role="mixed")).json()["budget_tokens"] == 256
    assert rig.worker.requests[0].role == ROLE_MIXED
    assert (await rig.ask(role="prefill", budget_tokens=8)).status_code == 400


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_without_the_token_no_worker_is_called(token: str) -> None:
    rig = Rig()
    assert (await rig.ask(token=token)).status_code == 401
    assert (await Rig(token="").ask(token=token)).status_code == 401
    assert rig.worker.requests == []


async def test_refusals_give_the_reason() -> None:
    rig = Rig()
    assert (await rig.ask("none")).json()["error"]["code"] == "worker_not_found"
    assert "counts as a planner" in (await rig.ask(actor="planner-7")).text
    assert (await rig.ask(role="king")).status_code == 400
    rig.worker.error = refused(grpc.StatusCode.FAILED_PRECONDITION, "stale_role: epoch is 9")
    assert (await rig.ask()).status_code == 409
    rig.network.token_travels = False
    answer = await rig.ask()
    assert answer.status_code == 503 and "plaintext" in answer.text
    rig.cluster.state.lead = Lead.ANOTHERS
    assert "another planner" in (await rig.ask()).text


def test_a_planner_name_that_workers_would_mistake_for_a_person_is_refused() -> None:
    """Its moves would be restored after a restart of their workers, like those of people."""
    assert PlannerSettings(id="planner-7").id == "planner-7"
    with pytest.raises(ValidationError, match="begins with 'planner', or its moves count as made by a person"):
        PlannerSettings(id="gpu-planner")
