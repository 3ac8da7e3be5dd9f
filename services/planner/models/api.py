"""The planner's model routes and their responses."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, Field

from libs.contracts.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable, UnknownModel, quoted
from libs.model.info import BUILTIN_SIM
from libs.policy.reserve.following import CountDistribution, UseFollower
from libs.policy.reserve.pool import ClaimRefused, Eviction, GpuClaim, kept_at, refusal
from libs.runtime.clock import Clock
from libs.runtime.web import JsonRoute
from libs.stores.catalogue import (
    DAY_MINUTES,
    MAX_MODELS,
    MAX_NAME_CHARS,
    MAX_RESERVATIONS,
    CatalogueDown,
    ModelCatalogue,
    ModelEntry,
    Reservation,
)
from services.planner.http.admin import Admin
from services.planner.models.keeper import ModelKeeper, claims_of, devices, minute_of

HORIZONS_S = (600, 3_600)


@dataclass(frozen=True, slots=True)
class ReservationAnswer:
    """GPUs reserved at a time of the day, UTC."""

    gpus: int
    from_time: str
    to_time: str


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model of the catalogue, or an adapter of the model `parent`.

    An adapter shows its model's state, workers and wait, and its own uses. A model's `in_flight` excludes its adapters.
    `next_use_s` is the median time to the next request; null means more than a week, or unknown. `expected_wait_s`
    applies to a request that arrives now.
    """

    name: str
    source: str
    parent: str
    size_bytes: int
    state: str
    workers: list[str]
    priority: int
    floor: int
    pinned: bool
    reservations: list[ReservationAnswer]
    ttft_ms: float | None
    tpot_ms: float | None
    load_s: float
    wake_s: float
    load_measured: bool
    last_use: str | None
    next_use_s: float | None
    in_flight: int
    waiting: int
    expected_wait_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The mean and quantiles of a number of models."""

    expected: float
    p50: int
    p90: int
    p99: int


@dataclass(frozen=True, slots=True)
class EvictionAnswer:
    """A worker that may lose its model, and the reason."""

    worker: str
    model: str
    why: str


@dataclass(frozen=True, slots=True)
class CatalogueAnswer:
    """The catalogue, the pool that serves it, and the forecast of its use.

    `gpus` counts workers, each of which holds one model; `devices` counts the GPUs under them, which workers may
    share. `at_once` is the peak of models in use at once in the current window. `asked_within` counts models in use
    or requested within that many seconds. Both are null until a first window has passed.

    `reserve_gpus` suffices in 99 % of windows. `kept_gpus` are held now by floors, pins and reservations;
    `needed_gpus` have work now. Adapters need no GPUs. They are counted apart, and all other figures include their
    requests in their model's.
    """

    models: list[CatalogueModel]
    gpus: int
    devices: int
    needed_gpus: int
    kept_gpus: int
    reserve_gpus: int | None
    window_s: float
    windows: int
    active_now: int
    at_once: Outcomes | None
    asked_within: dict[str, Outcomes | None]
    adapters_active: int
    adapters_asked_within: dict[str, Outcomes | None]
    next_evicted: list[EvictionAnswer]
    switches: dict[str, int]
    cold_starts: int
    switched_s: float


def catalogue_answer(keeper: ModelKeeper, now_ns: int) -> CatalogueAnswer:
    ahead = keeper.follower.ahead
    active = keeper.follower.active
    kept = kept_at(keeper.claims(), minute_of(now_ns))
    return CatalogueAnswer(
        models=[_model(keeper, entry, now_ns) for entry in keeper.found.entries.values()],
        gpus=keeper.gpus,
        devices=devices(keeper.workers),
        needed_gpus=active,
        kept_gpus=sum(kept.values()),
        reserve_gpus=ahead.reserve_gpus if ahead else None,
        window_s=keeper.knobs.window_s,
        windows=keeper.follower.windows,
        active_now=active,
        at_once=Outcomes(round(ahead.peak_expected_gpus, 2), *ahead.quantiles_gpus) if ahead else None,
        asked_within=_requested_within(keeper.follower, now_ns),
        adapters_active=keeper.adapter_follower.active,
        adapters_asked_within=_requested_within(keeper.adapter_follower, now_ns),
        next_evicted=[_eviction(keeper, each) for each in keeper.placed.evictions],
        switches=dict(sorted(keeper.switches.items())),
        cold_starts=keeper.cold_starts,
        switched_s=round(keeper.switched_s, 3),
    )


def _requested_within(follower: UseFollower, now_ns: int) -> dict[str, Outcomes | None]:
    return {str(each): _outcomes(follower.requested_within(now_ns / 1e9, float(each))) for each in HORIZONS_S}


def _model(keeper: ModelKeeper, entry: ModelEntry, now_ns: int) -> CatalogueModel:
    name, on = entry.name, entry.parent or entry.name
    error = keeper.failure(name, now_ns)
    chances = (keeper.adapter_chances if entry.parent else keeper.chances).get(name)
    times = keeper.found.times.get(name)
    in_flight, waiting = keeper.alone(name)
    last_ms = keeper.uses.last_use_ms(name)
    return CatalogueModel(
        name=name,
        source=entry.source,
        parent=entry.parent,
        size_bytes=entry.size_bytes,
        state="failed" if error else keeper.stands(name, now_ns)[0],
        workers=sorted(each.id for each in keeper.workers if each.assignment.model == on),
        priority=entry.priority,
        floor=entry.floor,
        pinned=entry.pinned,
        reservations=[
            ReservationAnswer(each.gpus, clock_time(each.from_minute), clock_time(each.to_minute))
            for each in entry.reservations
        ],
        ttft_ms=entry.ttft_ms,
        tpot_ms=entry.tpot_ms,
        # An adapter is loaded in the first step that needs it.
        load_s=0.0 if entry.parent else round(keeper.load_s(entry), 3),
        wake_s=0.0 if entry.parent else round(keeper.wake_s(entry), 3),
        load_measured=bool(times and times.load_s),
        last_use=datetime.fromtimestamp(last_ms / 1000, UTC).isoformat(timespec="seconds") if last_ms else None,
        next_use_s=round(chances.next_s, 1) if chances and chances.next_s is not None else None,
        in_flight=in_flight,
        waiting=waiting,
        expected_wait_s=keeper.expected_wait_s(name),
        error=error,
    )


def _outcomes(spread: CountDistribution | None) -> Outcomes | None:
    return Outcomes(round(spread.mean, 2), spread.p50, spread.p90, spread.p99) if spread else None


def _eviction(keeper: ModelKeeper, each: Eviction) -> EvictionAnswer:
    model = keeper.models[each.model]
    when = f"its turn goes on for {each.free_in_s:.0f} s" if each.free_in_s else "nobody uses it"
    why = f"{when}; asked again soon with {model.soon:.0%}, a cold start takes {model.load_s:.1f} s"
    return EvictionAnswer(each.worker, each.model, why)


def clock_time(minute: int) -> str:
    """Format a minute of the day, such as 540 as 09:00."""
    return f"{minute // 60:02}:{minute % 60:02}"


def minute_of_time(text: str) -> int | None:
    """Parse a time of day into its minute, such as 09:00 into 540. Return None if it is malformed."""
    hours, colon, minutes = text.partition(":")
    if not (colon and hours.isdecimal() and minutes.isdecimal() and len(minutes) == 2):
        return None
    if text == "24:00":
        return 0
    minute = int(hours) * 60 + int(minutes)
    return minute if int(minutes) < 60 and minute < DAY_MINUTES else None


def refused_text(wanted: GpuClaim, refused: ClaimRefused, gpus: int) -> str:
    """Return an explanation of a refused claim, with the claims that would have to be removed."""
    going = ", ".join(claim_text(each) for each in refused.would_have_to_go)
    way = f"it needs the GPUs of: {going}" if going else "even without all others it would not fit"
    return (
        f"{claim_text(wanted)} cannot be kept: at {clock_time(refused.minute)} UTC {refused.kept_gpus} of {gpus} GPUs"
        f" are kept for others, {refused.missing_gpus} too many; {way}"
    )


def claim_text(claim: GpuClaim) -> str:
    """Describe a claim, such as "floor of 2 for MODEL"."""
    when = ""
    if claim.from_minute != claim.to_minute:
        when = f" from {clock_time(claim.from_minute)} to {clock_time(claim.to_minute)}"
    return f"{claim.kind} of {claim.gpus} for {claim.model}{when}"


T = TypeVar("T")
# The fields of an entry that concern GPUs, which adapters do not have.
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
    """The end of the reservation; equal to `from_time`, it lasts all day."""


def no_catalogue() -> APIRouter:
    """Return the routes of a planner without a catalogue. They answer 404 and say how to get one."""
    router = APIRouter(route_class=JsonRoute, include_in_schema=False)

    @router.get("/v1/models")
    @router.put("/v1/models/{name:path}")
    @router.delete("/v1/models/{name:path}")
    async def refuse(name: str = "") -> None:
        raise NotFound("this suite has no catalogue of models: `fulcrum up --pool 2 --model A --model B` starts one")

    return router


class ModelsApi:
    """The routes of /v1/models and of reservations. Changes are admin requests."""

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
            """Reserve GPUs for a model, or answer with the claims that are in the way. Requires the suite's token."""
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
        """Raise InvalidRequest for changes that are not possible for an adapter."""
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
        """Store an entry. Raise Conflict if its claims do not fit besides those of other models."""
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
        """Await a call to the store. Raise StoreUnavailable if the store cannot be reached."""
        try:
            return await call
        except CatalogueDown as error:
            raise StoreUnavailable(f"the model catalogue is away: {error}") from None
