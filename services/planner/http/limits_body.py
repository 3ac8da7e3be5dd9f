"""The JSON form of limits and its validation. Pure."""

import re
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from libs.policy.capacity.table import MOST_WORKERS
from libs.policy.planner.limits import (
    DAY_MINUTES,
    MAX_MOVES_PER_S,
    NO_BOUND,
    ModelLimits,
    PlannerLimits,
    QuietHours,
)

MAX_PINNED = 10_000
# The least meaningful total: one worker alone serves both phases.
LEAST_WORKERS = 2
MAX_QUIET = 24
MAX_MODELS = 64
MAX_NAME_CHARS = 200
_HOURS = re.compile(r"([01]\d|2[0-4]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")

Workers = Annotated[int, Field(ge=0, le=MOST_WORKERS)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class ModelLimitsBody(BaseModel):
    """Limits of one model; mixed workers count as decode workers. Null means unbounded, or the planner's own TPOT
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
            waived = role == "prefill" and (least, most) == (1, 0)  # all are to decode, and compute prompts beside it
            if most is not None and least > most and not waived:
                raise ValueError(f"{role}_min is {least}, more than {role}_max, {most}")
        together = self.prefill_min + self.decode_min
        if self.workers_max is not None and together > max(self.workers_max, LEAST_WORKERS):
            raise ValueError(f"prefill_min and decode_min are {together} together, more than workers_max")
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
    """Parse HH:MM-HH:MM; raise ValueError for anything else."""
    found = _HOURS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not HH:MM-HH:MM, UTC, such as 22:00-06:00")
    from_h, from_m, to_h, to_m = map(int, found.groups())
    quiet = QuietHours(from_h * 60 + from_m, to_h * 60 + to_m)
    if max(quiet.from_minute, quiet.to_minute) > DAY_MINUTES or quiet.from_minute == quiet.to_minute:
        raise ValueError(f"{text!r} is no time of the day")
    return quiet
