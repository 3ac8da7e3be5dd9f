"""Planner and metrics service behind their key gates, without a socket."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import httpx

from libs.keys.audit import AuditMiddleware
from libs.keys.book import KeySet, Role, draw_key
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


def there(path: str) -> str:
    """The path with something in place of its parameters."""
    for name in ("decision_id", "worker_id", "silence_id", "name:path", "request_id:path"):
        path = path.replace("{" + name + "}", "thing")
    return path.replace("{name}", "fulcrum") or "/"


class CapturingTransport(SystemTransport):
    """A transport that records the app that would be served."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.app: Any = None

    @asynccontextmanager
    async def http(self, app: Any, _sock: Any, **_: Any) -> AsyncIterator[str]:  # type: ignore[override]
        self.app = app
        yield "http://127.0.0.1"


class Served:
    """One service behind its key gate, with its routes, its bus, and a key of each role."""

    def __init__(self, app: Any, secrets: dict[Role, str], book: KeySet, bus: MemoryBus) -> None:
        assert isinstance(app, AuditMiddleware) and isinstance(app._app, KeyGate)
        self.app, self.secrets, self.book, self.bus = app, secrets, book, bus
        self.routes = routes(app._app._app.routes)  # type: ignore[attr-defined]

    async def ask(self, case: tuple[str, str], body: Any, key: str | None, **more: str) -> httpx.Response:
        method, path = case[0], there(case[1])
        headers = {**({"authorization": f"Bearer {key}"} if key else {}), **more}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            verb = "GET" if method == "MOUNT" else method
            return await http.request(verb, path, json=body, headers=headers)


@asynccontextmanager
async def serving(service: str) -> AsyncIterator[Served]:
    clock, tasks, table = SystemClock(), TaskOwner(), KeyTable(open_without_keys=True, token=TOKEN)
    book, secrets = KeySet(), {}
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
        yield Served(transport.app, secrets, book, bus)
