"""Every route of planner and metrics service against every role: who is let in, and a route without a case fails."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import httpx
import pytest

from libs.keys.audit import AuditDoor
from libs.keys.book import KeyBook, Role, draw_key
from libs.keys.gate import KeyGate
from libs.keys.table import KeyTable
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import SystemTransport
from libs.testing.memory.broker import MemoryBroker
from libs.testing.memory.bus import MemoryBus
from libs.testing.memory.models import MemoryCatalogue
from libs.testing.memory.registry import MemoryRegistry
from libs.testing.memory.store import MemoryStore
from services.metrics.run import MetricsPorts, open_metrics
from services.metrics.settings import MetricsSettings
from services.planner.run import PlannerPorts, open_planner
from services.planner.settings import PlannerSettings
from tests.unit.routes import routes

CLUSTER = "local"
TOKEN: Final = "suite-token"
ROLES: Final[tuple[Role, ...]] = ("user", "operator", "admin")
MODEL: Final[dict[str, Any]] = {"source": "builtin:sim"}
ROLE: Final[dict[str, Any]] = {"role": "prefill"}
HISTORY: Final[dict[str, Any]] = {
    "model": "m", "start_unix_s": 0, "step_s": 60, "requests_per_s": [1], "prefill_tokens_per_s": [1],
    "decode_tokens_per_s": [1],
}  # fmt: skip

Cases = dict[tuple[str, str], tuple[Role | None, dict[str, Any] | None]]
"""By method and path: the least role that gets in, None for anybody, and a body where one is wanted."""

SHARED: Final[Cases] = {
    ("GET", "/healthz"): (None, None),
    ("GET", "/health"): (None, None),
    ("GET", "/readyz"): (None, None),
    ("GET", "/openapi.json"): (None, None),
    ("GET", "/docs"): (None, None),
    ("GET", "/docs/oauth2-redirect"): (None, None),
    ("GET", "/redoc"): (None, None),
    ("MOUNT", "/static-offline-docs"): (None, None),
    ("GET", "/metrics"): ("operator", None),
}
PLANNER: Final[Cases] = SHARED | {
    ("GET", "/v1/workers"): ("operator", None),
    ("GET", "/v1/planner"): ("operator", None),
    ("GET", "/v1/decisions"): ("operator", None),
    ("GET", "/v1/decisions/{decision_id}"): ("operator", None),
    ("GET", "/v1/regret"): ("operator", None),
    ("GET", "/v1/mode"): ("operator", None),
    ("PUT", "/v1/mode"): ("operator", {"mode": "recommend"}),
    ("GET", "/v1/limits"): ("operator", None),
    ("PUT", "/v1/limits"): ("operator", {}),
    ("PUT", "/v1/workers/{worker_id}/role"): ("operator", ROLE),
    ("GET", "/v1/models"): ("operator", None),
    ("PUT", "/v1/models/{name:path}"): ("admin", MODEL),
    ("PUT", "/v1/models/{name:path}/reservations"): ("admin", {"gpus": 0}),
    ("DELETE", "/v1/models/{name:path}"): ("admin", None),
}
METRICS: Final[Cases] = SHARED | {
    ("GET", "/login"): (None, None),
    ("POST", "/login"): ("operator", None),
    ("POST", "/logout"): (None, None),
    ("MOUNT", ""): ("operator", None),
    ("GET", "/runbook/{name}"): ("operator", None),
    ("GET", "/v1/occupancy"): ("operator", None),
    ("GET", "/v1/occupancy/efficiency"): ("operator", None),
    ("GET", "/v1/occupancy/history"): ("operator", None),
    ("GET", "/v1/occupancy/windows"): ("operator", None),
    ("GET", "/v1/occupancy/stream"): ("operator", None),
    ("GET", "/v1/requests"): ("operator", None),
    ("GET", "/v1/requests/summary"): ("operator", None),
    ("GET", "/v1/steps"): ("operator", None),
    ("GET", "/v1/links"): ("operator", None),
    ("GET", "/v1/events"): ("operator", None),
    ("GET", "/v1/status"): ("operator", None),
    ("GET", "/v1/status/history"): ("operator", None),
    ("GET", "/v1/decisions"): ("operator", None),
    ("GET", "/v1/alerts"): ("operator", None),
    ("POST", "/v1/alerts/silences"): ("operator", {"alert_name": "a", "for_s": 60}),
    ("POST", "/v1/alerts/acks"): ("operator", {"alert_id": "a"}),
    ("DELETE", "/v1/alerts/silences/{silence_id}"): ("operator", None),
    ("GET", "/v1/audit"): ("operator", None),
    ("GET", "/v1/demand"): ("operator", None),
    ("POST", "/v1/demand"): ("admin", HISTORY),
    ("GET", "/v1/forecast"): ("operator", None),
    ("GET", "/v1/capacity"): ("operator", None),
    ("GET", "/v1/capacity/input"): ("operator", None),
    ("GET", "/v1/capacity/plans"): ("operator", None),
    ("GET", "/v1/models"): ("operator", None),
    ("PUT", "/v1/workers/{worker_id}/role"): ("operator", ROLE),
}
CASES: Final[dict[str, Cases]] = {"planner": PLANNER, "metrics": METRICS}
OWN_DOOR: Final = (("POST", "/login"), ("PUT", "/v1/workers/{worker_id}/role"))
"""Of the metrics service: a login shows its key in the form, and a role is the planner's to refuse."""
ENDLESS: Final = (("GET", "/v1/occupancy/stream"), ("GET", "/v1/capacity"))
"""Which a caller who is let in would wait for."""


class CapturingTransport(SystemTransport):
    """Keeps the app that would be served."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.app: Any = None

    @asynccontextmanager
    async def http(self, app: Any, _sock: Any, **_: Any) -> AsyncIterator[str]:  # type: ignore[override]
        self.app = app
        yield "http://127.0.0.1"


class Served:
    """One service behind its door, its routes, and a key of each role."""

    def __init__(self, app: Any, secrets: dict[Role, str], book: KeyBook) -> None:
        assert isinstance(app, AuditDoor) and isinstance(app._app, KeyGate)
        self.app, self.secrets, self.book = app, secrets, book
        self.routes = routes(app._app._app.routes)  # type: ignore[attr-defined]

    async def ask(self, case: tuple[str, str], body: Any, key: str | None, **more: str) -> httpx.Response:
        method, path = case
        for name in ("decision_id", "worker_id", "silence_id", "name:path"):
            path = path.replace("{" + name + "}", "thing")
        headers = {**({"authorization": f"Bearer {key}"} if key else {}), **more}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            verb = "GET" if method == "MOUNT" else method
            return await http.request(verb, path.replace("{name}", "fulcrum") or "/", json=body, headers=headers)


@asynccontextmanager
async def serving(service: str) -> AsyncIterator[Served]:
    clock, tasks, table = SystemClock(), TaskOwner(), KeyTable(open_without_keys=True, token=TOKEN)
    book, secrets = KeyBook(), {}
    for role in ROLES:
        secrets[role], key = draw_key("a", now_s=0, role=role)
        book = book.with_key(key, 0)
    table.replace(book, 0)
    bus, store = MemoryBus(MemoryBroker(), CLUSTER), MemoryStore()
    common: dict[str, Any] = {"sock": None, "clock": clock, "tasks": tasks}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        stack.push_async_callback(tasks.close)
        if service == "metrics":
            own = MetricsSettings.model_validate({"token": TOKEN})
            transport = CapturingTransport(own)
            opening: Any = open_metrics(
                settings=own, ports=MetricsPorts(bus, keys=table), transport=transport, **common
            )
        else:
            settings = PlannerSettings.model_validate({"token": TOKEN})
            transport = CapturingTransport(settings)
            registry, models = MemoryRegistry(store, CLUSTER), MemoryCatalogue(store, CLUSTER)
            ports = PlannerPorts(bus, registry, models=models, keys=table)
            opening = open_planner(settings=settings, ports=ports, transport=transport, **common)
        await stack.enter_async_context(opening)
        yield Served(transport.app, secrets, book)


@pytest.fixture(params=sorted(CASES))
async def service(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Served]]:
    async with serving(request.param) as served:
        yield request.param, served


async def test_every_route_has_a_case(service: tuple[str, Served]) -> None:
    name, served = service
    assert served.routes == set(CASES[name])


async def test_each_route_lets_in_its_role_and_whoever_is_above_it(service: tuple[str, Served]) -> None:
    name, served = service
    for case, (least, body) in CASES[name].items():
        nobody = await served.ask(case, body, None)
        if least is None:
            assert nobody.status_code not in (401, 403), case
            continue
        assert nobody.status_code == 401, case
        assert (await served.ask(case, body, "sk-fulcrum-wrong")).status_code == 401, case
        if case in OWN_DOOR and name == "metrics":
            continue
        for role in ROLES:
            if ROLES.index(role) >= ROLES.index(least):
                if case not in ENDLESS:
                    assert (await served.ask(case, body, served.secrets[role])).status_code not in (401, 403), case
                continue
            refused = await served.ask(case, body, served.secrets[role])
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied"), case


async def test_a_session_of_the_page_reads_and_changes_nothing() -> None:
    async with serving("metrics") as served:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            assert (await http.post("/login", data={"key": served.secrets["admin"]})).status_code == 303
            assert (await http.get("/v1/alerts")).status_code == 200
            for (method, path), (_, body) in METRICS.items():
                if method in ("POST", "PUT", "DELETE") and path not in ("/login", "/logout"):
                    there = path.replace("{silence_id}", "x").replace("{worker_id}", "x")
                    assert (await http.request(method, there, json=body)).status_code == 401, path
