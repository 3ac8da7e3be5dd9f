"""The inputs of a verdict other than telemetry: recently finished requests and the planner's last decisions. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import QueueFull
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_ROLE_MOVED,
    ACTION_SET_LIMITS,
    ACTION_SET_MODE,
    MODE_AUTO,
    Decision,
    Mode,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    RequestEvent,
)
from libs.contracts.roles import role_name
from libs.policy.planner.due import strict_target_ns
from libs.policy.verdict.late import Punctuality
from libs.telemetry.refusals import RefusedTraffic
from libs.telemetry.rollups import MAX_WORKERS
from services.metrics.requests import is_computed, nearest_ranks

SPAN_NS: Final = 10_000_000_000
MAX_MODELS: Final = 64
"""The maximum number of models whose targets are remembered."""
UNAVAILABLE: Final = 503
"""The status of requests that no worker can serve now."""
MAX_REQUESTS: Final = 20_000
"""The maximum number of stored requests; with more in the span, rates cover a shorter time."""


@dataclass(frozen=True, slots=True)
class RefusedRate:
    """The rate of requests refused for one reason."""

    status: int
    """The HTTP status; 0 for all reasons without a row of their own."""
    code: str
    per_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of all models over `window_ms`; refusals are those of the last two to four seconds."""

    window_ms: int
    requests_per_s: float
    prompt_tokens_per_s: float
    """The tokens of computed prompts; requests that ended before their first token are left out."""
    output_tokens_per_s: float
    errors_per_s: float
    """Requests that failed because of the suite."""
    rejected_per_s: float
    """Requests refused for other reasons than lack of room."""
    too_many_per_s: float
    """Requests refused for lack of room (429)."""
    cache_hit: float | None
    """The share of prompt tokens found cached; null without prompts."""
    ttft_p50_ms: float | None
    """The median TTFT of interactive requests. This and the next three fields leave out lines of batch jobs.

    TTFT includes requests that still wait for their first token, with their waiting time so far.
    """
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    batch_lines_per_s: float
    """Lines of batch jobs that ended, a part of `requests_per_s`."""
    batch_waiting: int | None = None
    """Lines that now wait at gateways; more lines of a job follow as these leave. Null while no gateway reports."""
    batch_at_workers: int | None = None
    """Lines of batch jobs that workers hold now."""
    awaited: int = 0
    """Interactive requests that now wait for their first token, which the TTFT figures include."""
    refused: Sequence[RefusedRate] = field(default_factory=list)
    """Refusals by reason, the most frequent first, those for lack of room included."""


_REQUEST: Final = np.dtype(
    [
        ("received_ns", np.int64),
        ("model", np.int64),
        ("prompt_tokens", np.int64),
        ("cached_tokens", np.int64),
        ("output_tokens", np.int64),
        ("ttft_ns", np.int64),
        ("tpot_ns", np.int64),
        ("ttft_limit_ns", np.int64),
        ("tpot_target_ns", np.int64),
        ("served", np.bool_),
        ("failed", np.bool_),
        ("rejected", np.bool_),
        ("too_many", np.bool_),
        ("batch", np.bool_),
    ]
)
"""A finished request. `model` is the hash of the model's name. `served` is true if a first token shows that the prompt
was computed. `batch` is true for a line of a batch job.
"""


class TrafficLog:
    """The requests of the last seconds. An event delivered twice, which is rare, counts twice."""

    def __init__(self) -> None:
        # Columns, because a status reads all rows a dozen times. The rows in use move to the front when the end is
        # reached.
        self._rows = np.zeros(2 * MAX_REQUESTS, _REQUEST)
        self._first = self._end = 0
        self._targets_ns: dict[str, tuple[int, int]] = {}
        """TTFT limit and TPOT target by model, as last seen."""
        self._strict_ttft_ns: dict[str, int] = {}
        """The strictest TTFT target of a tenth of a model's requests, as last seen."""

    def take(self, event: RequestEvent, now_ns: int) -> None:
        rejected = event.outcome == OUTCOME_REJECTED
        too_many = rejected and event.error_code == QueueFull.code
        limited = event.ttft_deadline_unix_ns > event.arrival_unix_ns
        self._append(
            (
                now_ns,
                hash(event.model),
                event.prompt_tokens,
                event.cached_tokens,
                event.output_tokens,
                event.ttft_ns,
                event.decode_ns // (event.output_tokens - 1) if event.output_tokens > 1 else 0,
                event.ttft_deadline_unix_ns - event.arrival_unix_ns if limited else 0,
                event.tpot_target_us * 1_000,
                is_computed(ok=event.outcome == OUTCOME_OK, ttft_ns=event.ttft_ns),
                event.outcome == OUTCOME_FAILED,
                rejected and not too_many,
                too_many,
                event.service_class == BATCH_CLASS,
            )
        )

    def _append(self, row: tuple[int, ...]) -> None:
        if self._end == len(self._rows):
            kept = self._rows[self._first : self._end].copy()
            self._rows[: len(kept)] = kept
            self._first, self._end = 0, len(kept)
        self._rows[self._end] = row
        self._end += 1
        self._first = max(self._first, self._end - MAX_REQUESTS)

    def _recent(self, now_ns: int, span_ns: int = SPAN_NS) -> NDArray[np.void]:
        """Return the requests of the last `span_ns`, the oldest first."""
        received_ns = self._rows["received_ns"]
        self._first += int(np.searchsorted(received_ns[self._first : self._end], now_ns - SPAN_NS, side="right"))
        since = int(np.searchsorted(received_ns[self._first : self._end], now_ns - span_ns, side="right"))
        return self._rows[self._first + since : self._end]

    def _people(self, model: str, now_ns: int, span_ns: int = SPAN_NS) -> NDArray[np.void]:
        """Return a model's requests of the last `span_ns` without lines of batch jobs."""
        return _people_of(self._recent(now_ns, span_ns), model)

    def traffic(self, now_ns: int, awaited: Iterable[tuple[int, int]] = ()) -> Traffic:
        """Return the traffic of the last span.

        `awaited` holds pairs of a waiting time in ns and the number of interactive requests that have waited so long
        for a first token.
        """
        found, seconds = self._recent(now_ns), SPAN_NS / 1e9
        served, people = found[found["served"]], found[~found["batch"]]
        prompt, cached = int(served["prompt_tokens"].sum()), int(served["cached_tokens"].sum())
        waiting = tuple(awaited)
        ttft_p50_ms, ttft_p95_ms = _p50_p95_ms(people["ttft_ns"], waiting)
        tpot_p50_ms, tpot_p95_ms = _p50_p95_ms(people["tpot_ns"])
        return Traffic(
            window_ms=SPAN_NS // 1_000_000,
            requests_per_s=len(found) / seconds,
            prompt_tokens_per_s=prompt / seconds,
            output_tokens_per_s=int(found["output_tokens"].sum()) / seconds,
            errors_per_s=int(found["failed"].sum()) / seconds,
            rejected_per_s=int(found["rejected"].sum()) / seconds,
            too_many_per_s=int(found["too_many"].sum()) / seconds,
            cache_hit=cached / prompt if prompt else None,
            ttft_p50_ms=ttft_p50_ms,
            ttft_p95_ms=ttft_p95_ms,
            tpot_p50_ms=tpot_p50_ms,
            tpot_p95_ms=tpot_p95_ms,
            batch_lines_per_s=int(found["batch"].sum()) / seconds,
            awaited=sum(count for _, count in waiting),
        )

    def cache_hit(self, model: str, now_ns: int) -> float:
        """Return the share of cached prompt tokens of a model's requests without batch jobs; 0 if nothing is known."""
        own = self._people(model, now_ns)
        own = own[own["served"]]
        prompt = int(own["prompt_tokens"].sum())
        return int(own["cached_tokens"].sum()) / prompt if prompt else 0.0

    def late(self, model: str, now_ns: int, span_ns: int) -> Punctuality:
        """Return the number of interactive requests with a first token in a span, and the number of those that were
        late.
        """
        own = self._people(model, now_ns, span_ns)
        first_token_ns = own["received_ns"] - own["tpot_ns"] * np.maximum(own["output_tokens"] - 1, 0)
        timed = own[(own["ttft_ns"] > 0) & (own["ttft_limit_ns"] > 0) & (first_token_ns > now_ns - span_ns)]
        return Punctuality(len(timed), int((timed["ttft_ns"] > timed["ttft_limit_ns"]).sum()))

    def ended(self, model: str, now_ns: int, span_ns: int) -> int:
        """Return the number of interactive requests with a first token that ended in a span."""
        return int((self._people(model, now_ns, span_ns)["ttft_ns"] > 0).sum())

    def slow(self, model: str, now_ns: int, span_ns: int) -> Punctuality:
        """Return the number of interactive answers that ended in a span, and the number of those that exceeded their
        TPOT.
        """
        own = self._people(model, now_ns, span_ns)
        timed = own[(own["tpot_ns"] > 0) & (own["tpot_target_ns"] > 0)]
        return Punctuality(len(timed), int((timed["tpot_ns"] > timed["tpot_target_ns"]).sum()))

    def prompt_lengths(self, model: str, now_ns: int) -> tuple[float, float]:
        """Return the mean prompt length of a model's requests without batch jobs, and their spread.

        The spread is the mean by tokens over that by requests: 1 if all are alike, more if they differ. Without
        requests, the result is (0, 1).
        """
        own = self._people(model, now_ns)["prompt_tokens"].astype(np.float64)
        total = float(own.sum())
        return (total / len(own), float(own @ own) * len(own) / (total * total)) if total else (0.0, 1.0)

    def mean_output_tokens(self, model: str, now_ns: int) -> float:
        """Return the mean answer length of a model's requests without batch jobs; 0 if there were none."""
        own = self._people(model, now_ns)
        own = own[own["served"]]
        return float(own["output_tokens"].mean()) if len(own) else 0.0

    def refused_tokens_per_s(self, model: str, now_ns: int, span_ns: int) -> float:
        """Return the prompt tokens per second of requests refused for lack of room, which count as demand."""
        found = self._recent(now_ns, span_ns)
        own = found[found["too_many"] & (found["model"] == hash(model))]
        return int(own["prompt_tokens"].sum()) * 1e9 / span_ns

    def targets_ns(self, model: str) -> tuple[int, int]:
        """Return the usual TTFT limit and TPOT target of a model's requests, as last known; 0 where there is none.

        Lines of batch jobs are left out, since they may take hours.
        """
        limit_ns, tpot_ns = self._targets_ns.get(model, (0, 0))
        own = _people_of(self._rows[self._first : self._end], model)
        limits, tpots = _known(own["ttft_limit_ns"]), _known(own["tpot_target_ns"])
        found = _median(limits, limit_ns), _median(tpots, tpot_ns)
        if len(own) and (model in self._targets_ns or len(self._targets_ns) < MAX_MODELS):
            self._targets_ns[model] = found
            self._strict_ttft_ns[model] = strict_target_ns(limits) or self._strict_ttft_ns.get(model, 0)
        return found

    def requested_targets_ns(self) -> dict[str, tuple[int, int]]:
        """Return (TPOT, TTFT) by model, as last known, where requests name either; 0 stands for one without.

        The TTFT is the strictest that a tenth of the requests have.
        """
        strict_ns = self._strict_ttft_ns
        found = {model: (tpot_ns, strict_ns.get(model, 0)) for model, (_, tpot_ns) in self._targets_ns.items()}
        return {model: targets for model, targets in found.items() if any(targets)}


def _people_of(found: NDArray[np.void], model: str) -> NDArray[np.void]:
    people: NDArray[np.void] = found[~found["batch"] & (found["model"] == hash(model))]
    return people


def _known(values: NDArray[np.int64]) -> list[int]:
    """Return the values above 0 in ascending order."""
    found: list[int] = np.sort(values[values > 0]).tolist()
    return found


def _median(ordered: Sequence[int], default: int) -> int:
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return sum(middle) // len(middle) if middle else default


def with_refusals(traffic: Traffic, found: RefusedTraffic, too_many_per_s: float) -> Traffic:
    """Add the requests that gateways refused, most of which never became a request with an event.

    `too_many_per_s` is the rate of requests refused for lack of room, each counted once however often it was sent
    again.
    """
    rates = sorted((RefusedRate(*reason, found.per_s(count)) for reason, count in found.refused.items()), key=_order)
    rejected = sum(each.per_s for each in rates if each.code != QueueFull.code and each.status != UNAVAILABLE)
    return replace(
        traffic,
        rejected_per_s=max(traffic.rejected_per_s, rejected),
        too_many_per_s=max(traffic.too_many_per_s, too_many_per_s),
        refused=rates,
    )


def _order(rate: RefusedRate) -> tuple[float, int, str]:
    return -rate.per_s, rate.status, rate.code


def _p50_p95_ms(
    values_ns: NDArray[np.int64], more: Sequence[tuple[int, int]] = ()
) -> tuple[float | None, float | None]:
    """Return median and 95th percentile of the values above 0 in ms; `more` is that of `nearest_ranks`."""
    found = nearest_ranks(values_ns[values_ns > 0], (50, 95), more)
    if found is None:
        return None, None
    median, p95 = (found / 1e6).tolist()
    return median, p95


STATUS_VALID_NS: Final = 5_000_000_000
"""The silence after which a planner no longer counts as live; a leading one publishes a decision a second."""
MAX_TARGETS: Final = 64
"""The maximum number of models whose targets are remembered."""
MAX_TEXT: Final = 500
NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LastMove:
    """The last observed role change of a worker, whoever made it."""

    worker: str
    from_role: str
    """The former role; empty if unknown."""
    to_role: str
    actor: str
    reason: str
    at_unix_ms: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """The planner's state according to its decisions."""

    heard: bool
    mode: str | None
    """The mode off, advisory or auto; null before the first decision."""
    leader: str | None
    """The id of the leading planner; null if none reports or none leads."""
    acts: bool
    """True if the planner carries out its decisions."""
    idle_because: str
    """The reason why a planner in mode auto does not act; empty if it acts or does not report."""
    decided_unix_ms: int | None
    reason: str
    reason_code: str
    last_move: LastMove | None


class PlannerNews:
    """The planner's state, mode and targets, as its published decisions report them."""

    def __init__(self) -> None:
        self._newest: Decision | None = None
        self._received_ns = 0
        self._moved: tuple[Decision, str] | None = None
        self._roles: dict[str, str] = {}
        self._tpot_ns: dict[str, int] = {}

    def take(self, decision: Decision, now_ns: int) -> None:
        if decision.action == ACTION_ROLE_MOVED:
            worker, role = decision.worker_id, role_name(decision.assignment)
            if self._moved is None or decision.decided_unix_ns >= self._moved[0].decided_unix_ns:
                self._moved = decision, self._roles.get(worker, "")
            if worker in self._roles or len(self._roles) < MAX_WORKERS:
                self._roles[worker] = role
            return
        if decision.action == ACTION_SET_LIMITS:
            return
        newest = self._newest
        if newest is None or decision.decided_unix_ns >= newest.decided_unix_ns:
            self._newest, self._received_ns = decision, now_ns
            self._tpot_ns |= {each.model: each.tpot_ns for each in decision.targets if each.tpot_ns}
            self._tpot_ns = dict(list(self._tpot_ns.items())[-MAX_TARGETS:])

    def tpot_ns(self, model: str, now_ns: int) -> int | None:
        """Return the TPOT target that a live planner applies to a model; None without one."""
        return self._tpot_ns.get(model) if now_ns - self._received_ns < STATUS_VALID_NS else None

    def knows_role(self, worker: str, role: str) -> None:
        """Record a worker's role from telemetry, so that its next move is listed with the former role."""
        if worker not in self._roles and len(self._roles) < MAX_WORKERS:
            self._roles[worker] = role

    def status(self, now_ns: int) -> PlannerStatus:
        newest = self._newest
        heard = newest is not None and now_ns - self._received_ns < STATUS_VALID_NS
        if newest is None:
            return PlannerStatus(False, None, None, False, "", None, "", "", self._last_move(now_ns))
        mode = Mode.Name(newest.mode).removeprefix("MODE_").lower() if newest.mode in Mode.values() else "unknown"
        reported = newest.action != ACTION_SET_MODE
        leads = newest.leads or not newest.HasField("leads")
        return PlannerStatus(
            heard=heard,
            mode=mode,
            leader=newest.planner_id[:MAX_TEXT] if heard and leads else None,
            acts=heard and leads and newest.mode == MODE_AUTO and not newest.idle_because,
            idle_because=newest.idle_because[:MAX_TEXT] if heard else "",
            decided_unix_ms=newest.decided_unix_ns // NS_PER_MS,
            reason=newest.reason[:MAX_TEXT] if reported else "",
            reason_code=newest.reason_code[:MAX_TEXT] if reported else "",
            last_move=self._last_move(now_ns),
        )

    def _last_move(self, now_ns: int) -> LastMove | None:
        if self._moved is None:
            return None
        moved, before = self._moved
        return LastMove(
            worker=moved.worker_id[:MAX_TEXT],
            from_role=before,
            to_role=role_name(moved.assignment),
            actor=moved.actor[:MAX_TEXT],
            reason=moved.reason[:MAX_TEXT],
            at_unix_ms=moved.decided_unix_ns // NS_PER_MS,
            age_ms=max(now_ns - moved.decided_unix_ns, 0) // NS_PER_MS,
        )
