"""The roles of servers behind sglang-router with `--pd-disaggregation`, changed by its REST API.

sglang-router 0.3.2 lists servers with their role, and removes and adds them while it serves. vllm-router 0.1.17 lists
and removes them too, but refuses to add any (findings/vllm-router-removes-not-adds.sh).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import httpx
import msgspec

from libs.observe.fleet import MOST_SERVERS
from libs.observe.roles import FleetAway, FleetWorker, MoveRefused, check_move

CALL_S: Final = 2.0
SETTLED_S: Final = 15.0
"""The time within which the router must carry out a removal or an addition that it has accepted."""
LOOK_S: Final = 0.1
MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
MAX_SAID: Final = 200
_ROLES: Final = {"prefill": "prefill", "decode": "decode"}


class _Listed(msgspec.Struct, frozen=True):
    url: str
    worker_type: str
    id: str = ""
    is_healthy: bool = True
    priority: int = 50
    cost: float = 1.0
    bootstrap_port: int | None = None


class _List(msgspec.Struct, frozen=True):
    workers: list[_Listed]


class RouterRoles:
    """The roles of a router's servers."""

    kind = "sglang-router"

    def __init__(self, url: str, names: Callable[[], Mapping[str, str]]) -> None:
        """`names` returns the names of observed servers by address."""
        self._url = url.rstrip("/")
        self._names = names
        self._client = httpx.AsyncClient(timeout=CALL_S)

    async def workers(self) -> Sequence[FleetWorker]:
        """Return the router's servers, under their observed names where they have one."""
        return sorted(map(self._worker, await self._list()), key=lambda each: each.name)

    async def set_role(self, worker: FleetWorker, role: str, why: str) -> None:
        """Remove the server and add it in its new role; if that fails, add it in its old one."""
        check_move(worker, role)
        listed = next((each for each in await self._list() if each.id == worker.version), None)
        if listed is None or self._worker(listed) != worker:
            raise MoveRefused(f"{worker.name} has changed since it was read: it is read again")
        if len([each for each in await self._list() if each.worker_type == listed.worker_type]) == 1:
            raise MoveRefused(f"{worker.name} is the router's last {worker.role} server: add another one first")
        await self._call("DELETE", f"/workers/{listed.id}")
        if not await self._settles(lambda found: listed.url not in found):
            raise MoveRefused(
                f"{worker.name}: the router accepted its removal but still lists it: check the router's log"
            )
        if await self._add(listed, role):
            return
        restored = await self._add(listed, worker.role)
        state = f"it is {worker.role} again" if restored else f"add it by hand: POST {self._url}/workers"
        raise MoveRefused(f"{worker.name}: the router did not add it as {role}; {state}")

    async def close(self) -> None:
        await self._client.aclose()

    def _worker(self, listed: _Listed) -> FleetWorker:
        name, role = self._names().get(listed.url.rstrip("/"), ""), _ROLES.get(listed.worker_type, "mixed")
        fixed = "" if name else "it is not among the observed servers: add it to their list"
        if role == "mixed":
            fixed = f"it does both phases: the router lists it as {listed.worker_type[:40]}"
        elif not listed.id:
            fixed = "the router lists it without an id, like vllm-router, which cannot add servers while it runs"
        return FleetWorker(name or listed.url, role, listed.is_healthy, fixed, listed.id)

    async def _list(self) -> list[_Listed]:
        body = await self._call("GET", "/workers")
        try:
            found = msgspec.json.decode(body, type=_List).workers
        except msgspec.MsgspecError as error:
            raise FleetAway(f"the router at {self._url} sent an invalid list of workers: {error}") from None
        return found[:MOST_SERVERS]

    async def _add(self, listed: _Listed, role: str) -> bool:
        """Add a server in a role, and return whether the router lists it in that role."""
        body: dict[str, Any] = {
            "url": listed.url, "worker_type": role, "priority": listed.priority, "cost": listed.cost,
        }  # fmt: skip
        if listed.bootstrap_port is not None and role == "prefill":
            body["bootstrap_port"] = listed.bootstrap_port
        try:
            await self._call("POST", "/workers", body)
        except FleetAway:
            return False
        return await self._settles(lambda found: found.get(listed.url) == role)

    async def _settles(self, holds: Callable[[Mapping[str, str]], bool]) -> bool:
        """Return whether `holds` becomes true of the roles by address within SETTLED_S."""
        end_s = asyncio.get_running_loop().time() + SETTLED_S
        while asyncio.get_running_loop().time() < end_s:
            try:
                if holds({each.url: each.worker_type for each in await self._list()}):
                    return True
            except FleetAway:
                pass  # tried again until the end: the router may be busy with the change
            await asyncio.sleep(LOOK_S)
        return False

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        try:
            async with self._client.stream(method, f"{self._url}{path}", json=body) as response:
                answer = bytearray()
                async for part in response.aiter_bytes():
                    answer += part
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise FleetAway(f"the router at {self._url} answers {path} with over {MAX_ANSWER_BYTES} bytes")
        except httpx.HTTPError as error:
            raise FleetAway(f"the router at {self._url} does not answer: {type(error).__name__}") from None
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            said = answer[:MAX_SAID].decode(errors="replace")
            raise FleetAway(f"the router refuses {method} {path}: {response.status_code} {said}")
        return bytes(answer)
