"""Responses of the planner's model routes, in words and plain numbers. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime

from libs.policy.reserve.booking import ClaimRefused, GpuClaim, kept_at
from libs.policy.reserve.following import Spread, UseFollower
from libs.policy.reserve.pool import Eviction
from libs.stores.catalogue import DAY_MINUTES, ModelEntry
from services.planner.models.claims import devices, minute_of
from services.planner.models.keeper import ModelKeeper

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

    An adapter shows its model's state, workers and wait, and its own uses. A model's `in_flight` excludes its
    adapters. By `next_use_s` a request is as likely as not; null means not within a week, or unknown.
    `expected_wait_s` is that of a request which arrives now.
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
    """A worker that may lose its model, and why it would be chosen."""

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
        asked_within=_asked_within(keeper.follower, now_ns),
        adapters_active=keeper.adapter_follower.active,
        adapters_asked_within=_asked_within(keeper.adapter_follower, now_ns),
        next_evicted=[_eviction(keeper, each) for each in keeper.placed.evictions],
        switches=dict(sorted(keeper.switches.items())),
        cold_starts=keeper.cold_starts,
        switched_s=round(keeper.switched_s, 3),
    )


def _asked_within(follower: UseFollower, now_ns: int) -> dict[str, Outcomes | None]:
    return {str(each): _outcomes(follower.asked_within(now_ns / 1e9, float(each))) for each in HORIZONS_S}


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
        # An adapter is read within the first step that needs it.
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


def _outcomes(spread: Spread | None) -> Outcomes | None:
    return Outcomes(round(spread.mean, 2), spread.p50, spread.p90, spread.p99) if spread else None


def _eviction(keeper: ModelKeeper, each: Eviction) -> EvictionAnswer:
    model = keeper.models[each.model]
    when = f"its turn goes on for {each.free_in_s:.0f} s" if each.free_in_s else "nobody uses it"
    why = f"{when}; asked again soon with {model.soon:.0%}, a cold start takes {model.load_s:.1f} s"
    return EvictionAnswer(each.worker, each.model, why)


def clock_time(minute: int) -> str:
    """Format a minute of the day: 540 is 09:00."""
    return f"{minute // 60:02}:{minute % 60:02}"


def minute_of_time(text: str) -> int | None:
    """Parse a time of the day into its minute, such as 09:00 into 540; return None if it is malformed."""
    hours, colon, minutes = text.partition(":")
    if not (colon and hours.isdecimal() and minutes.isdecimal() and len(minutes) == 2):
        return None
    if text == "24:00":
        return 0
    minute = int(hours) * 60 + int(minutes)
    return minute if int(minutes) < 60 and minute < DAY_MINUTES else None


def refused_text(wanted: GpuClaim, refused: ClaimRefused, gpus: int) -> str:
    """Explain why a claim is refused and which claims would have to go."""
    going = ", ".join(claim_text(each) for each in refused.would_have_to_go)
    way = f"what would have to go: {going}" if going else "even without all others it would not fit"
    return (
        f"{claim_text(wanted)} cannot be kept: at {clock_time(refused.minute)} UTC {refused.kept_gpus} of {gpus} GPUs"
        f" are kept for others, {refused.missing_gpus} too many; {way}"
    )


def claim_text(claim: GpuClaim) -> str:
    """Describe a claim in words, such as "floor of 2 for MODEL"."""
    when = ""
    if claim.from_minute != claim.to_minute:
        when = f" from {clock_time(claim.from_minute)} to {clock_time(claim.to_minute)}"
    return f"{claim.kind} of {claim.gpus} for {claim.model}{when}"
