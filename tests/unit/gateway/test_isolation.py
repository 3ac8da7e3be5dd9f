"""Tests of two tenants at one gateway: no route gives one the other's data, and a route without a case fails."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from libs.contracts.topics import BATCH_JOBS
from libs.keys.book import KeySet, Role, draw_key
from libs.keys.gate import KeyGate
from libs.keys.store import FileKeys
from libs.keys.table import KeyTable
from libs.model.info import BUILTIN_SIM
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner
from libs.stores.responses import MemoryResponses
from libs.testing.batch.work import MemoryWork, running, store
from libs.testing.wait import until
from services.gateway.batch.begin import AllowedTopics
from services.gateway.batch.bounds import TenantBounds
from services.gateway.batch.output import PART_PURPOSE
from services.gateway.batch.routes import make_batch_router
from services.gateway.batch.view import JobView
from services.gateway.messages.exchange import MessageReader
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.endpoint import CompletionEndpoint, CompletionReader, Reader
from services.gateway.request.exchange import Stalls
from services.gateway.request.formats import ChatFormat, CompletionFormat
from services.gateway.request.intake import Intake, RequestLimits
from services.gateway.request.parse import parse_chat, parse_completion
from services.gateway.request.prompt import load_catalog
from services.gateway.request.recorder import DemandPublisher
from services.gateway.responses.exchange import ResponseReader
from services.gateway.responses.request import StoredResponses, make_responses_router
from services.gateway.routes import GatewayRoutes, make_routes, make_tenant_router, need, token_routes
from tests.unit.routes import head_differs, routes

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "open", "prompt": "a"}}\n'
UNUSED: Any = None
KEPT = StoredResponses(MemoryResponses(time.time), 600)


@dataclass
class World:
    """One gateway, a file and a batch of tenant a, and clients of four callers; `nobody` has no key."""

    app: GatewayRoutes
    gate: KeyGate
    a: httpx.AsyncClient
    b: httpx.AsyncClient
    operator: httpx.AsyncClient
    admin: httpx.AsyncClient
    nobody: httpx.AsyncClient
    file: str
    part: str
    batch: str


def make_app(files: Any, view: JobView, work: MemoryWork, keys: FileKeys, table: KeyTable) -> GatewayRoutes:
    catalog = load_catalog({"open": BUILTIN_SIM, "closed": BUILTIN_SIM})
    clock, metrics = SystemClock(), GatewayMetrics()
    intake = Intake(
        catalog=catalog, fleet=UNUSED, hints=UNUSED, threads=UNUSED, defaults=UNUSED, limits=RequestLimits(8, 8, 8)
    )  # fmt: skip

    def endpoint(route: str, reader: Reader) -> CompletionEndpoint:
        return CompletionEndpoint(
            route, reader=reader, intake=intake, dispatcher=UNUSED, metrics=metrics,
            clock=clock, tasks=TaskOwner(), stalls=Stalls(8, 10**6), demand=DemandPublisher(UNUSED, "g", clock),
            max_body_bytes=10**5,
        )  # fmt: skip

    return make_routes(
        hot={
            "/v1/chat/completions": endpoint("/v1/chat/completions", CompletionReader(parse_chat, ChatFormat)),
            "/v1/completions": endpoint("/v1/completions", CompletionReader(parse_completion, CompletionFormat)),
            "/v1/responses": endpoint("/v1/responses", ResponseReader(KEPT)),
            "/v1/messages": endpoint("/v1/messages", MessageReader()),
        } | token_routes(intake, catalog, Stalls(8, 10**6), 10**5),
        routers=[make_tenant_router(keys, table, clock), make_responses_router(KEPT), make_batch_router(
            bus=work, files=files, view=view, clock=clock, topics=AllowedTopics("shared.*,own.{tenant}.*"),
            max_file_bytes=10**5, max_line_bytes=10**5, bounds=TenantBounds(table),
        )],
        catalog=catalog,
        fleet=SimpleNamespace(views=dict),  # type: ignore[arg-type]
        draining=lambda: False,
        metrics=metrics,
        version="0",
    )  # fmt: skip


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    work, files, clock = MemoryWork(BATCH_JOBS), await store(tmp_path), SystemClock()
    view, table = JobView(work), KeyTable(open_without_keys=True)
    key_store, book, keys = FileKeys(tmp_path / "keys" / "keys.json"), KeySet(), {}
    app = make_app(files, view, work, key_store, table)
    roles: dict[str, Role] = {"a": "user", "b": "user", "operator": "operator", "admin": "admin"}
    for tenant, role in roles.items():
        keys[tenant], key = draw_key(tenant, now_s=0, role=role, models=("open",) if tenant == "a" else ())
        book = book.with_key(key, 0)
    await key_store.change(lambda _: book)
    table.replace(book, 0)
    gate = KeyGate(app, table, clock, need=need)
    transport = httpx.ASGITransport(gate)

    def client(key: str | None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)

    async with running(view.follow()):
        await until(view.replayed.is_set)
        clients = {name: client(keys[name]) for name in roles}
        file = (await upload(clients["a"])).json()["id"]
        async with files.draft("file-batch_x-output-1", max_bytes=9) as draft:
            await draft.write(b"answers")
            part = (await draft.keep(name="p", purpose=PART_PURPOSE, tenant="a")).id
        batch = (await begin(clients["a"], file)).json()["id"]
        yield World(app, gate, **clients, nobody=client(None), file=file, part=part, batch=batch)


async def upload(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    form: Any = {"purpose": (None, "batch"), "file": ("lines", LINE)}
    return await http.post("/v1/files", files=form, headers=headers)


async def begin(http: httpx.AsyncClient, file: str, **own: Any) -> httpx.Response:
    body = {"endpoint": "/v1/completions", "input_file_id": file, "completion_window": "24h", **own}
    return await http.post("/v1/batches", json=body)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def listed(answer: httpx.Response) -> set[str]:
    return {each["id"] for each in answer.json()["data"]}


async def completions(world: World, path: str, question: dict[str, Any]) -> None:
    others = await world.b.post(path, json=question, headers={"x-fulcrum-tenant": "a"})
    assert code(others) == (403, "permission_denied")
    higher = await world.b.post(path, json=question, headers={"x-fulcrum-class": "interactive"})
    assert code(higher) == (403, "permission_denied")
    await named_model(world, path, question)


async def named_model(world: World, path: str, question: dict[str, Any]) -> None:
    denied = await world.a.post(path, json={**question, "model": "closed"})
    absent = await world.a.post(path, json={**question, "model": "absent"})
    assert code(denied) == code(absent) == (404, "model_not_found")
    assert "closed" not in absent.json()["error"]["message"]


async def chat(world: World) -> None:
    await completions(world, "/v1/chat/completions", {"model": "open", "messages": [{"role": "user", "content": "a"}]})


async def text(world: World) -> None:
    await completions(world, "/v1/completions", {"model": "open", "prompt": "a"})


OWN_RESPONSE = b'{"items": [], "response": {"id": "resp_a", "output": []}}'


async def response(world: World) -> None:
    question = {"model": "open", "input": "a"}
    await completions(world, "/v1/responses", question)
    await KEPT.store.keep("a", "resp_a", OWN_RESPONSE, 600)
    others = await world.b.post("/v1/responses", json={**question, "previous_response_id": "resp_a"})
    absent = await world.b.post("/v1/responses", json={**question, "previous_response_id": "resp_0"})
    assert code(others) == code(absent) == (404, "response_not_found")


async def message(world: World) -> None:
    question = {"model": "open", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    await completions(world, "/v1/messages", question)


async def count_tokens(world: World) -> None:
    question = {"model": "open", "messages": [{"role": "user", "content": "a"}]}
    await named_model(world, "/v1/messages/count_tokens", question)


async def one_response(world: World) -> None:
    await KEPT.store.keep("a", "resp_a", OWN_RESPONSE, 600)
    for other in (world.b, world.operator, world.admin):
        assert code(await other.get("/v1/responses/resp_a")) == (404, "response_not_found")
    assert (await world.a.get("/v1/responses/resp_a")).json()["id"] == "resp_a"
    as_a = await world.b.get("/v1/responses/resp_a", headers={"x-fulcrum-tenant": "a"})
    assert code(as_a) == (403, "permission_denied")


async def delete_response(world: World) -> None:
    await KEPT.store.keep("a", "resp_a", OWN_RESPONSE, 600)
    for other in (world.b, world.operator, world.admin):
        assert code(await other.delete("/v1/responses/resp_a")) == (404, "response_not_found")
    assert (await world.a.delete("/v1/responses/resp_a")).json()["deleted"]
    assert code(await world.a.get("/v1/responses/resp_a")) == (404, "response_not_found")


async def tokenize(world: World) -> None:
    await named_model(world, "/tokenize", {"model": "open", "prompt": "a"})


async def detokenize(world: World) -> None:
    await named_model(world, "/detokenize", {"model": "open", "tokens": [97]})


async def models(world: World) -> None:
    assert listed(await world.a.get("/v1/models")) == {"open"}
    assert listed(await world.b.get("/v1/models")) == {"open", "closed"}


async def one_model(world: World) -> None:
    assert code(await world.a.get("/v1/models/closed")) == (404, "model_not_found")
    assert (await world.a.get("/v1/models/open")).status_code == 200


async def upload_file(world: World) -> None:
    assert code(await upload(world.b, **{"x-fulcrum-tenant": "a"})) == (403, "permission_denied")
    own = (await upload(world.b)).json()["id"]
    assert (await world.a.get(f"/v1/files/{own}")).status_code == 404


async def list_files(world: World) -> None:
    assert listed(await world.a.get("/v1/files")) == {world.file}
    assert listed(await world.b.get("/v1/files")) == set()
    assert listed(await world.operator.get("/v1/files")) == {world.file, "file-1"}  # which is nobody's
    assert (await world.b.get("/v1/files", params={"after": world.file})).status_code == 400


async def one_file(world: World, suffix: str = "") -> None:
    path = f"/v1/files/{world.file}{suffix}"
    unknown = await world.b.get(f"/v1/files/file-none{suffix}")
    refused = await world.b.get(path)
    assert code(refused) == code(unknown) == (404, "file_not_found")
    assert refused.text.replace(world.file, "") == unknown.text.replace("file-none", "")
    assert (await world.a.get(path)).status_code == (await world.operator.get(path)).status_code == 200
    assert code(await world.a.get(f"/v1/files/{world.part}{suffix}")) == (404, "file_not_found")


async def content(world: World) -> None:
    await one_file(world, "/content")


async def delete_file(world: World) -> None:
    spare = (await upload(world.a)).json()["id"]
    assert code(await world.b.delete(f"/v1/files/{spare}")) == (404, "file_not_found")
    assert code(await world.operator.delete(f"/v1/files/{spare}")) == (403, "permission_denied")
    assert (await world.a.get(f"/v1/files/{spare}")).status_code == 200
    assert (await world.admin.delete(f"/v1/files/{spare}")).status_code == 200


async def create_batch(world: World) -> None:
    others = await begin(world.b, world.file)
    assert (code(others), others.json()["error"]["param"]) == ((404, "file_not_found"), "input_file_id")
    own = (await upload(world.b)).json()["id"]
    named = await begin(world.b, own, metadata={"tenant": "a"})
    assert named.json()["fulcrum"]["tenant"] == "b"
    assert code(await begin(world.b, own, priority=1)) == (403, "permission_denied")
    for topic in ("shared.x", "own.a.x", "own.b", "own.b.x.y"):
        assert code(await begin(world.b, own, output_topic=topic)) == (403, "topic_not_allowed"), topic
    same_key = {"idempotency-key": "nightly"}
    for http, file in ((world.a, world.file), (world.b, own)):
        body = {"endpoint": "/v1/completions", "input_file_id": file}
        assert (await http.post("/v1/batches", json=body, headers=same_key)).status_code == 200


async def list_batches(world: World) -> None:
    assert listed(await world.a.get("/v1/batches")) == {world.batch}
    assert listed(await world.b.get("/v1/batches")) == set()
    assert listed(await world.operator.get("/v1/batches")) == {world.batch}


async def one_batch(world: World) -> None:
    assert code(await world.b.get(f"/v1/batches/{world.batch}")) == (404, "batch_not_found")
    assert (await world.a.get(f"/v1/batches/{world.batch}")).json()["id"] == world.batch
    assert (await world.operator.get(f"/v1/batches/{world.batch}")).status_code == 200


async def cancel_batch(world: World) -> None:
    path = f"/v1/batches/{world.batch}"
    assert code(await world.b.post(f"{path}/cancel")) == (404, "batch_not_found")
    assert code(await world.operator.post(f"{path}/cancel")) == (403, "permission_denied")
    assert (await world.a.get(path)).json()["cancelling_at"] is None
    assert (await world.a.post(f"{path}/cancel")).status_code == 200


async def delete_tenant(world: World) -> None:
    for other in (world.a, world.b, world.operator):
        assert code(await other.delete("/v1/tenants/a")) == (403, "permission_denied")
    assert (await world.a.get("/v1/files")).status_code == 200
    assert (await world.admin.delete("/v1/tenants/a%20b")).status_code == 400
    assert (await world.admin.delete("/v1/tenants/a")).json() == {"id": "a", "object": "tenant", "deleted": True}
    assert code(await world.a.get("/v1/files")) == (401, "invalid_api_key")
    assert listed(await world.operator.get("/v1/files")) == {"file-1"}
    assert listed(await world.operator.get("/v1/batches")) == set()
    assert (await world.b.get("/v1/files")).status_code == 200


async def prometheus(world: World) -> None:
    assert code(await world.a.get("/metrics")) == (403, "permission_denied")
    assert code(await world.nobody.get("/metrics")) == (401, "invalid_api_key")
    assert (await world.operator.get("/metrics")).status_code == 200


async def ready(world: World) -> None:
    assert (await world.nobody.get("/readyz")).json() == {"ready": False, "models": {}}


async def public(_world: World) -> None:
    """Do nothing, since the route is the same in every cluster and reveals nothing."""


CASES: dict[tuple[str, str], Callable[[World], Awaitable[None]]] = {
    ("POST", "/v1/chat/completions"): chat,
    ("POST", "/v1/completions"): text,
    ("POST", "/v1/responses"): response,
    ("GET", "/v1/responses/{response_id}"): one_response,
    ("DELETE", "/v1/responses/{response_id}"): delete_response,
    ("POST", "/v1/messages"): message,
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/{name:path}"): one_model,
    ("POST", "/v1/files"): upload_file,
    ("GET", "/v1/files"): list_files,
    ("GET", "/v1/files/{file_id}"): one_file,
    ("GET", "/v1/files/{file_id}/content"): content,
    ("DELETE", "/v1/files/{file_id}"): delete_file,
    ("POST", "/v1/batches"): create_batch,
    ("GET", "/v1/batches"): list_batches,
    ("GET", "/v1/batches/{batch_id}"): one_batch,
    ("POST", "/v1/batches/{batch_id}/cancel"): cancel_batch,
    ("DELETE", "/v1/tenants/{tenant}"): delete_tenant,
    ("GET", "/metrics"): prometheus,
    ("GET", "/readyz"): ready,
    ("GET", "/healthz"): public,
    ("GET", "/health"): public,
    ("GET", "/openapi.json"): public,
    ("GET", "/docs"): public,
    ("GET", "/docs/oauth2-redirect"): public,
    ("GET", "/redoc"): public,
    ("MOUNT", "/static-offline-docs"): public,
}


def is_public(case: tuple[str, str]) -> bool:
    return CASES[case] in (public, ready)


async def test_every_route_of_the_gateway_has_an_ownership_case(world: World) -> None:
    assert routes(world.app.routes) == set(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if not is_public(case)], ids=" ".join)
async def test_without_a_key_a_route_reveals_only_how_to_authenticate(world: World, case: tuple[str, str]) -> None:
    answer = await world.nobody.request(case[0], case[1].replace("{file_id}", world.file))
    assert code(answer) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("case", CASES, ids=" ".join)
async def test_a_tenant_can_neither_read_nor_change_another_tenants_data(world: World, case: tuple[str, str]) -> None:
    await CASES[case](world)


def there(world: World, path: str) -> str:
    """The path with what is there in place of its parameters."""
    for name, value in {
        "{file_id}": world.file, "{batch_id}": world.batch, "{name:path}": "open", "{tenant}": "a",
        "{response_id}": "resp_a",
    }.items():  # fmt: skip
        path = path.replace(name, value)
    return path


async def test_a_tenant_or_class_that_is_not_the_keys_is_refused_on_every_route(world: World) -> None:
    for (method, path), case in CASES.items():
        if is_public((method, path)):
            continue
        for name, value in (("x-fulcrum-tenant", "a"), ("x-fulcrum-class", "interactive")):
            refused = await world.b.request(method, there(world, path), headers={name: value})
            assert code(refused) == (403, "permission_denied"), (method, path, name)
        operator = await world.operator.request(method, there(world, path), headers={"x-fulcrum-tenant": "a"})
        assert code(operator) == (403, "permission_denied"), (method, path)
        if path != "/metrics" and case is not delete_tenant:
            own = await world.b.request(method, there(world, path), headers={"x-fulcrum-tenant": "b"})
            assert own.status_code != 403, (method, path)
            unreadable = await world.b.request(method, there(world, path), headers={"x-fulcrum-tenant": "b c"})
            assert code(unreadable) == (400, "invalid_request"), (method, path)


async def test_an_admin_who_acts_for_a_tenant_lists_that_tenants_data(world: World) -> None:
    for path, own in (("/v1/files", world.file), ("/v1/batches", world.batch)):
        assert own in listed(await world.admin.get(path))
        assert listed(await world.admin.get(path, headers={"x-fulcrum-tenant": "a"})) == {own}
        assert listed(await world.admin.get(path, headers={"x-fulcrum-tenant": "b"})) == set()


async def test_head_is_answered_like_get_on_every_route(world: World) -> None:
    await KEPT.store.keep("admin", "resp_a", OWN_RESPONSE, 600)
    key = world.admin.headers["authorization"]
    found = {path for method, path in routes(world.app.routes) if method in ("GET", "POST")}
    assert len(found) > 15
    for path in {*map(partial(there, world), found), "/nowhere", "/docs/", "/static-offline-docs/favicon.png"}:
        for headers in ({}, {"authorization": key}):
            assert await head_differs(world.gate, path, headers) == "", path
    head = await world.a.head(f"/v1/files/{world.file}/content")
    assert (head.headers["content-length"], head.content) == (str(len(LINE)), b"")
    assert set((await world.nobody.post("/healthz")).headers["allow"].split(", ")) == {"GET", "HEAD"}
