from collections.abc import Awaitable, Mapping
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, Field

from libs.contracts.errors import Conflict, InvalidRequest, StoreUnavailable, UnknownModel, quoted
from libs.model.info import BUILTIN_SIM
from libs.policy.reserve.booking import refusal
from libs.runtime.clock import Clock
from libs.runtime.web import JsonRoute
from libs.stores.catalogue import (
    MAX_MODELS,
    MAX_NAME_CHARS,
    MAX_RESERVATIONS,
    CatalogueDown,
    ModelCatalogue,
    ModelEntry,
    Reservation,
)
from services.planner.http.admin import Admin
from services.planner.models.answers import (
    CatalogueAnswer,
    CatalogueModel,
    catalogue_answer,
    minute_of_time,
    refused_text,
)
from services.planner.models.claims import claims_of
from services.planner.models.keeper import ModelKeeper

T = TypeVar("T")
# Fields of an entry that concern GPUs, of which adapters have none.
_OF_MODELS: Final = ("floor", "priority", "pinned", "size_bytes")
Authorization = Annotated[str, Header()]
_RESPONSES: dict[int | str, dict[str, object]] = {
    401: {"description": "the token is missing or wrong"},
    409: {"description": "it cannot be kept beside what is kept for others, or another planner leads"},
}


class ModelBody(BaseModel):
    """The fields of a model to set; those left out stay as they are."""

    source: str | None = Field(None, min_length=1, max_length=4096)
    parent: str | None = Field(None, min_length=1, max_length=MAX_NAME_CHARS)
    """The model that this entry is a LoRA adapter of."""
    size_bytes: int | None = Field(None, ge=0, le=2**53)
    floor: int | None = Field(None, ge=0, le=65_536)
    priority: int | None = Field(None, ge=-100, le=100)
    ttft_ms: float | None = Field(None, gt=0, le=86_400_000)
    tpot_ms: float | None = Field(None, gt=0, le=86_400_000)
    pinned: bool | None = None


class ReservationBody(BaseModel):
    """GPUs to reserve for a model at a time of the day, UTC. A `gpus` of 0 cancels all its reservations."""

    gpus: int = Field(ge=0, le=65_536)
    from_time: str = Field("00:00", max_length=5)
    to_time: str = Field("00:00", max_length=5)
    """End of the reservation; equal to `from_time`, it lasts all day."""


class ModelsApi:
    """The routes of /v1/models and of reservations; changes are admin verbs."""

    def __init__(self, keeper: ModelKeeper, store: ModelCatalogue, admin: Admin, clock: Clock) -> None:
        self._keeper = keeper
        self._store = store
        self._admin = admin
        self._clock = clock

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute, tags=["models"])

        @router.get("/v1/models")
        async def models() -> CatalogueAnswer:
            """Return the catalogue, the pool that serves it, and the forecast of its use."""
            return catalogue_answer(self._keeper, self._clock.now_ns())

        @router.put("/v1/models/{name:path}/reservations", responses=_RESPONSES)
        async def reserve(
            name: str, body: ReservationBody, request: Request, authorization: Authorization = ""
        ) -> CatalogueModel:
            """Reserve GPUs for a model, or answer what would have to go. Requires the suite's token."""
            self._check(request, authorization)
            return await self._reserve(name, body)

        @router.put("/v1/models/{name:path}", responses=_RESPONSES)
        async def put(
            name: str, body: ModelBody, request: Request, authorization: Authorization = ""
        ) -> CatalogueModel:
            """Add a model or change it. Requires the suite's token."""
            self._check(request, authorization)
            return await self._put(name, body)

        @router.delete("/v1/models/{name:path}", responses=_RESPONSES)
        async def remove(name: str, request: Request, authorization: Authorization = "") -> dict[str, str]:
            """Remove a model. Running requests finish; waiting ones are answered with 404."""
            self._check(request, authorization)
            self._entry(name)
            await self._write(self._store.remove(name))
            self._keeper.forget(name)
            return {"removed": name}

        return router

    def _check(self, request: Request, authorization: str) -> None:
        self._admin.allow(request, authorization, "changing models", least="admin")

    async def _put(self, name: str, body: ModelBody) -> CatalogueModel:
        if not name or len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(f"a model's name has 1 to {MAX_NAME_CHARS} characters", param="name")
        before = self._keeper.found.entries.get(name)
        if before is None and len(self._keeper.found.entries) >= MAX_MODELS:
            raise InvalidRequest(f"the catalogue has {MAX_MODELS} models already", param="name")
        entry = before or ModelEntry(name, BUILTIN_SIM, 0)
        changes = body.model_dump(exclude_none=True)
        if changes.get("parent", entry.parent):
            self._check_adapter(name, changes, before)
        return await self._keep(msgspec.structs.replace(entry, **changes))

    def _check_adapter(self, name: str, changes: Mapping[str, object], before: ModelEntry | None) -> None:
        """Raise InvalidRequest for changes that an adapter does not allow."""
        parent = str(changes.get("parent") or (before.parent if before else ""))
        if before is not None and before.parent != parent:
            raise InvalidRequest(f"{quoted(name)} is in the catalogue already, as another: remove it", param="parent")
        above = self._keeper.found.entries.get(parent)
        if parent == name or (above is not None and above.parent):
            raise InvalidRequest(f"{quoted(parent)} is an adapter itself", param="parent")
        if odd := next((each for each in _OF_MODELS if changes.get(each)), ""):
            raise InvalidRequest(f"{odd} is of models: an adapter has its model's workers", param=odd)

    async def _reserve(self, name: str, body: ReservationBody) -> CatalogueModel:
        entry = self._entry(name)
        if entry.parent:
            raise InvalidRequest(f"{quoted(name)} is an adapter: reserve GPUs for {entry.parent}", param="name")
        if not body.gpus:
            return await self._keep(msgspec.structs.replace(entry, reservations=()))
        start, end = minute_of_time(body.from_time), minute_of_time(body.to_time)
        if start is None or end is None:
            raise InvalidRequest("times of the day are HH:MM, UTC", param="from_time" if start is None else "to_time")
        if len(entry.reservations) >= MAX_RESERVATIONS:
            raise InvalidRequest(f"a model has {MAX_RESERVATIONS} reservations at most", param="name")
        wanted = Reservation(body.gpus, start, end)
        others = tuple(each for each in entry.reservations if each != wanted)
        return await self._keep(msgspec.structs.replace(entry, reservations=(*others, wanted)))

    async def _keep(self, entry: ModelEntry) -> CatalogueModel:
        """Store an entry. Raise Conflict if its claims do not fit beside those of other models."""
        keeper = self._keeper
        held = keeper.found.entries.get(entry.name)
        before = claims_of(held) if held else []
        others = [claim for claim in keeper.claims() if claim.model != entry.name]
        for wanted in claims_of(entry):
            if wanted in before:
                continue
            own = [claim for claim in claims_of(entry) if claim != wanted]
            refused = refusal([*others, *own], wanted, keeper.gpus)
            if refused is not None:
                raise Conflict(refused_text(wanted, refused, keeper.gpus))
        await self._write(self._store.put(entry))
        keeper.take_catalogue(await self._write(self._store.read()))
        now_ns = self._clock.now_ns()
        (found,) = [each for each in catalogue_answer(keeper, now_ns).models if each.name == entry.name]
        return found

    def _entry(self, name: str) -> ModelEntry:
        entry = self._keeper.found.entries.get(name)
        if entry is None:
            raise UnknownModel(f"model {quoted(name)} is not in the catalogue", param="name")
        return entry

    async def _write(self, call: Awaitable[T]) -> T:
        """Await a call to the store. Raise StoreUnavailable if the store is away."""
        try:
            return await call
        except CatalogueDown as error:
            raise StoreUnavailable(f"the model catalogue is away: {error}") from None
