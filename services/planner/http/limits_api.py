"""The routes of the planner's limits, and the parsing and validation of their JSON form."""

import re
from types import MappingProxyType
from typing import Annotated, Self

import structlog
from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from libs.contracts.errors import Conflict
from libs.policy.capacity import MOST_WORKERS
from libs.policy.planner.limits import (
    DAY_MINUTES,
    MAX_MOVES_PER_S,
    NO_BOUND,
    ModelLimits,
    PlannerLimits,
    QuietHours,
)
from libs.runtime.web import JsonRoute
from services.planner.http.admin import Admin

MAX_PINNED = 10_000
# The smallest useful total. A single worker serves both phases.
LEAST_WORKERS = 2
MAX_QUIET = 24
MAX_MODELS = 64
MAX_NAME_CHARS = 200
_HOURS = re.compile(r"([01]\d|2[0-4]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")

Workers = Annotated[int, Field(ge=0, le=MOST_WORKERS)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class ModelLimitsBody(BaseModel):
    """Limits of one model; mixed workers count as decode workers. Null means unbounded, or the planner's default TPOT
    target.
    """

    model_config = ConfigDict(extra="forbid")

    prefill_min: Workers = 1
    """A minimum of 1 is waived for a single worker and for workers that were started as mixed."""
    prefill_max: Workers | None = None
    decode_min: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1
    decode_max: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = None
    workers_min: Workers = 0
    workers_max: Workers | None = None
    gpu_hours_day: Annotated[float, Field(ge=0, le=NO_BOUND)] | None = None
    tpot_ms: Annotated[float, Field(gt=0, le=60_000)] | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for role in ("prefill", "decode", "workers"):
            least, most = getattr(self, f"{role}_min"), getattr(self, f"{role}_max")
            waived = role == "prefill" and (least, most) == (1, 0)  # all workers decode, and some also compute prompts
            if most is not None and least > most and not waived:
                raise ValueError(f"{role}_min is {least}, more than {role}_max, {most}")
        together = self.prefill_min + self.decode_min
        if self.workers_max is not None and together > max(self.workers_max, LEAST_WORKERS):
            raise ValueError(
                f"prefill_min and decode_min are {together} together, more than workers_max, {self.workers_max}"
            )
        return self

    def limits(self) -> ModelLimits:
        return ModelLimits(
            prefill_min=self.prefill_min,
            prefill_max=MOST_WORKERS if self.prefill_max is None else self.prefill_max,
            decode_min=self.decode_min,
            decode_max=MOST_WORKERS if self.decode_max is None else self.decode_max,
            workers_min=self.workers_min,
            workers_max=MOST_WORKERS if self.workers_max is None else self.workers_max,
            gpu_hours_day=NO_BOUND if self.gpu_hours_day is None else self.gpu_hours_day,
            tpot_ms=self.tpot_ms,
        )


class LimitsBody(BaseModel):
    """Limits of all models. An update must carry the `revision` that was read, so that a concurrent change is not
    lost.
    """

    model_config = ConfigDict(extra="forbid")

    revision: Annotated[int, Field(ge=0)] = 0
    moves_per_s: Annotated[int, Field(ge=0, le=MAX_MOVES_PER_S)] = PlannerLimits().moves_per_s
    pinned: Annotated[list[Name], Field(max_length=MAX_PINNED)] = []
    quiet_hours: Annotated[list[str], Field(max_length=MAX_QUIET)] = []
    every: ModelLimitsBody = ModelLimitsBody()
    models: Annotated[dict[Name, ModelLimitsBody], Field(max_length=MAX_MODELS)] = {}

    @field_validator("quiet_hours")
    @classmethod
    def _are_hours(cls, hours: list[str]) -> list[str]:
        for each in hours:
            _quiet(each)
        return hours

    def limits(self) -> PlannerLimits:
        return PlannerLimits(
            moves_per_s=self.moves_per_s,
            pinned=frozenset(self.pinned),
            quiet_hours=tuple(map(_quiet, self.quiet_hours)),
            every=self.every.limits(),
            models=MappingProxyType({name: each.limits() for name, each in self.models.items()}),
        )

    def changed_from(self, before: "LimitsBody") -> str:
        """Describe the differences from earlier limits in words."""
        old, new = before.model_dump(exclude={"revision"}), self.model_dump(exclude={"revision"})
        return ", ".join(f"{name} from {old[name]} to {new[name]}" for name in new if new[name] != old[name]) or "none"


def _quiet(text: str) -> QuietHours:
    """Parse a time range HH:MM-HH:MM. Raise ValueError if it is invalid."""
    found = _HOURS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not HH:MM-HH:MM, UTC, such as 22:00-06:00")
    from_h, from_m, to_h, to_m = map(int, found.groups())
    quiet = QuietHours(from_h * 60 + from_m, to_h * 60 + to_m)
    if max(quiet.from_minute, quiet.to_minute) > DAY_MINUTES or quiet.from_minute == quiet.to_minute:
        raise ValueError(f"{text!r} is no time of the day")
    return quiet


log = structlog.get_logger()

Actor = Annotated[
    str, Query(max_length=MAX_NAME_CHARS, description="The name to record for a caller that shows the suite's token.")
]


class LimitsAnswer(BaseModel):
    """The limits, and whether they survive a restart."""

    limits: LimitsBody
    kept: bool


class LimitsApi:
    """The routes GET and PUT /v1/limits. PUT is an admin request."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._remembered = admin.remembered()
        self._held = LimitsBody()

    async def keep_again(self) -> bool:
        """Repeat a failed write of the limits. Return whether they are stored."""
        return await self._remembered.again()

    def take(self, kept: LimitsBody) -> None:
        """Adopt the limits that the previous leader stored."""
        self._held = kept
        self._remembered.taken()
        self._admin.state.limits = kept.limits()

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)

        @router.get("/v1/limits")
        async def limits() -> LimitsAnswer:
            """Return the limits on decisions."""
            return LimitsAnswer(limits=self._held, kept=self._remembered.kept)

        @router.put(
            "/v1/limits",
            responses={
                401: {"description": "the token is missing or wrong"},
                409: {"description": "the limits have changed since they were read"},
            },
        )
        async def set_limits(
            wanted: LimitsBody, request: Request, actor: Actor = "", authorization: Annotated[str, Header()] = ""
        ) -> LimitsAnswer:
            """Set all limits. Requires the suite's token as `authorization: Bearer TOKEN`."""
            by = self._admin.allow(request, authorization, "setting limits", said=actor)
            if wanted.revision != self._held.revision:
                raise Conflict(
                    f"limits are at revision {self._held.revision} by now: read them again", param="revision"
                )
            before, self._held = self._held, wanted.model_copy(update={"revision": wanted.revision + 1})
            said = wanted.changed_from(before)
            limits, written = wanted.limits(), self._held.model_dump_json()
            self._admin.publish(lambda now_ns: self._admin.state.set_limits(limits, by, said, now_ns))
            await self._remembered.keep(lambda store: store.keep_limits(written))
            return LimitsAnswer(limits=self._held, kept=self._remembered.kept)

        return router


def read_limits(written: str | None) -> LimitsBody:
    """Parse stored limits. Return the defaults if none are stored or they are invalid."""
    if written is None:
        return LimitsBody()
    try:
        return LimitsBody.model_validate_json(written)
    except ValidationError as error:
        log.warning("the stored limits are invalid: no limits apply", error=str(error))
        return LimitsBody()
