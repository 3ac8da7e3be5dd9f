"""The actuator for the launcher of `fulcrum up --spare N`, whose spare workers are processes of its suite."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec

from libs.actuators.port import ActuatorDown, Started

TIMEOUT_S: Final = 2.0


class SpareState(msgspec.Struct, frozen=True):
    worker_ids: list[str]
    most: int
    model: str


class SpareWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request to the launcher."""

    count: int
    first_to_end: list[str] = []


class ProcessActuator:
    """An actuator that calls the launcher over HTTP on loopback, with the suite's token."""

    kind = "process"

    def __init__(self, url: str, token: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False, transport=transport
        )

    async def look(self) -> Started:
        return await self._ask("GET", None)

    async def have(self, count: int, *, first_to_end: Sequence[str] = ()) -> None:
        await self._ask("PUT", msgspec.json.encode(SpareWish(count, list(first_to_end))))

    async def show(self, roles: Mapping[str, str]) -> None:
        # A process has no labels.
        ...

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, body: bytes | None) -> Started:
        headers: dict[str, Any] = {"content-type": "application/json"} if body is not None else {}
        try:
            answer = await self._http.request(method, "/v1/spares", content=body, headers=headers)
            if not answer.is_success:
                raise ActuatorDown(f"the launcher refused: HTTP {answer.status_code} {answer.text[:200]}")
            found = msgspec.json.decode(answer.content, type=SpareState)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise ActuatorDown(f"the launcher does not answer: {error!r}") from error
        return Started(tuple(found.worker_ids), found.most, found.model)
