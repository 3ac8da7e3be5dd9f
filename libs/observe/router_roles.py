"""The roles of servers behind sglang-router with `--pd-disaggregation`, changed by its REST API.

sglang-router 0.3.2 lists servers with their role, and removes and adds them while it serves. vllm-router 0.1.17 lists
and removes them too, but refuses to add any (findings/vllm-router-removes-not-adds.sh).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httpx
import msgspec
import structlog

from libs.observe.fleet import MOST_SERVERS
from libs.observe.roles import ROLES, FleetAway, FleetWorker, MoveRefused, check_move

CALL_S: Final = 2.0
"""The time that one call may take, including its whole answer."""
SETTLED_S: Final = 15.0
"""The time within which the router must carry out a removal or an addition that it has accepted."""
LOOK_S: Final = 0.1
MOST_LOST: Final = 4
"""The maximum number of servers whose membership in the router is uncertain after a failed change."""
WATCHED_S: Final = 60.0
"""The time for which a server that is listed after a failed change may still be removed by that change."""
MOST_TRIES: Final = 10
"""The maximum number of reads at which a lost server is added back."""
MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
MAX_SAID: Final = 200
log = structlog.get_logger()


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


@dataclass(slots=True)
class _Lost:
    """A server that a change may have removed permanently."""

    listed: _Listed
    requested_s: float
    tries: int = 0


class RouterRoles:
    kind = "sglang-router"

    def __init__(self, url: str, names: Callable[[], Mapping[str, str]]) -> None:
        """Create the roles; `names` returns the names of observed servers by address."""
        self._url = url.rstrip("/")
        self._names = names
        self._client = httpx.AsyncClient(timeout=CALL_S)
        self._lost: dict[str, _Lost] = {}
        """The servers by address whose removal was requested, until they are known to be back."""

    async def workers(self) -> Sequence[FleetWorker]:
        """Return the router's servers, under their observed names if they have one.

        Servers lost by an earlier change are first added back in their old role. Raise FleetAway with their addresses
        while that fails.
        """
        found = await self._list()
        if self._lost:
            found = await self._put_back(found)
        return sorted(map(self._worker, found), key=lambda each: each.name)

    async def set_role(self, worker: FleetWorker, role: str, why: str) -> None:
        """Remove the server and add it in its new role; if that fails, add it in its old one."""
        check_move(worker, role)
        there = await self._list()
        listed = next((each for each in there if each.id == worker.version), None)
        if listed is None or self._worker(listed) != worker:
            raise MoveRefused(f"{worker.name} has changed since it was read: it is read again")
        if sum(each.worker_type == listed.worker_type for each in there) == 1:
            raise MoveRefused(f"{worker.name} is the router's last {worker.role} server: add another one first")
        if len(self._lost) >= MOST_LOST:
            raise MoveRefused(f"{worker.name} stays: {MOST_LOST} servers have not come back to the router")
        # From here on, restore the server however this call ends.
        self._lost[listed.url] = _Lost(listed, asyncio.get_running_loop().time())
        await self._call("DELETE", f"/workers/{listed.id}")
        if not await self._settles(lambda found: listed.url not in found):
            raise MoveRefused(
                f"{worker.name}: the router accepted its removal but still lists it: check the router's log"
            )
        if await self._add(listed, role):
            del self._lost[listed.url]
            return
        if await self._add(listed, worker.role):
            del self._lost[listed.url]
            raise MoveRefused(f"{worker.name}: the router did not take it as {role}; it is {worker.role} again")
        state = f"it is added back at each read, or by hand: POST {self._url}/workers"
        raise MoveRefused(f"{worker.name}: the router did not take it as {role} and lacks it now; {state}")

    async def _put_back(self, found: list[_Listed]) -> list[_Listed]:
        """Add the lost servers that the router does not list, and return the new list."""
        there, missing = {each.url for each in found}, []
        for url, lost in list(self._lost.items()):
            if url in there:
                if asyncio.get_running_loop().time() >= lost.requested_s + WATCHED_S:
                    del self._lost[url]
                continue
            lost.tries += 1
            if await self._add(lost.listed, lost.listed.worker_type):
                del self._lost[url]
                continue
            missing.append(url)
            if lost.tries >= MOST_TRIES:
                log.error("a server removed for a change of role could not be added to the router again", server=url)
                del self._lost[url]
        if missing:
            raise FleetAway(
                f"the router lacks {', '.join(missing)}, which a change of role removed: it is added at"
                f" {MOST_TRIES} reads, or by hand: POST {self._url}/workers"
            )
        return await self._list()

    async def close(self) -> None:
        """Add lost servers back if the router accepts them now, and disconnect. Idempotent."""
        lost, self._lost = [each.listed for each in self._lost.values()], {}
        try:
            there = {each.url for each in await self._list()} if lost else set()
            for each in lost:
                if each.url not in there and not await self._add(each, each.worker_type):
                    log.error(
                        "a server removed for a change of role could not be added to the router again", server=each.url
                    )
        except FleetAway as error:
            log.warning("servers may be missing at the router", servers=[each.url for each in lost], error=str(error))
        finally:
            await self._client.aclose()

    def _worker(self, listed: _Listed) -> FleetWorker:
        name = self._names().get(listed.url.rstrip("/"), "")
        role = listed.worker_type if listed.worker_type in ROLES else "mixed"
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
        """Return whether `holds`, a condition on the roles by address, becomes true within SETTLED_S."""
        end_s = asyncio.get_running_loop().time() + SETTLED_S
        while asyncio.get_running_loop().time() < end_s:
            try:
                if holds({each.url: each.worker_type for each in await self._list()}):
                    return True
            except FleetAway:
                pass  # retried until the end, because the router may be busy with the change
            await asyncio.sleep(LOOK_S)
        return False

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        try:
            async with (
                asyncio.timeout(CALL_S),
                self._client.stream(method, f"{self._url}{path}", json=body) as response,
            ):
                answer = bytearray()
                async for part in response.aiter_bytes():
                    answer += part
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise FleetAway(f"the router at {self._url} answers {path} with over {MAX_ANSWER_BYTES} bytes")
        except (httpx.HTTPError, TimeoutError) as error:
            raise FleetAway(f"the router at {self._url} does not answer: {type(error).__name__}") from None
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            said = answer[:MAX_SAID].decode(errors="replace")
            raise FleetAway(f"the router refuses {method} {path}: {response.status_code} {said}")
        return bytes(answer)
