"""The metrics service's answer to `GET /v1/status`, typed. Fields that a newer service adds are ignored."""

from typing import Any, Final, Literal

import msgspec

from libs.contracts.errors import StartupError

STATUS_PATH: Final = "/v1/status"
# Verdicts that call for no action.
CALM_CODES: Final = frozenset(("balanced", "idle"))
UNKNOWN_CODE: Final = "unknown"
TOO_SMALL_CODE: Final = "too_small"


class ActionAnswer(msgspec.Struct, frozen=True):
    """A command to paste, and the range of pressure that it should leave on the worse-off phase."""

    command: str
    workers: list[str]
    role: str
    budget_tokens: int = 0
    pressure_then: float | None = None
    pressure_least: float | None = None
    pressure_most: float | None = None
    backlog_least_s: float | None = None
    backlog_most_s: float | None = None
    ttft_p95_least_ms: float | None = None
    ttft_p95_most_ms: float | None = None
    tpot_p95_least_ms: float | None = None
    tpot_p95_most_ms: float | None = None
    instruction: str = ""
    """The manual change at observed servers, for which there is no command."""


class CauseAnswer(msgspec.Struct, frozen=True):
    """One cause of delay, with the workers that are responsible."""

    code: str
    sentence: str
    since_unix_ms: int
    model: str = ""
    action: ActionAnswer | None = None
    workers: list[str] = []


class VerdictAnswer(msgspec.Struct, frozen=True):
    """The verdict, whose sentence is shown first."""

    code: str
    sentence: str
    since_unix_ms: int
    model: str = ""
    action: ActionAnswer | None = None
    causes: list[CauseAnswer] = []


class LastMoveAnswer(msgspec.Struct, frozen=True):
    """The last change of a worker's role, whoever made it."""

    worker: str
    from_role: str
    to_role: str
    actor: str
    reason: str
    at_unix_ms: int


class PlannerStateAnswer(msgspec.Struct, frozen=True):
    """The planner's last decision; `heard` is False if it has been silent."""

    heard: bool
    mode: str | None
    leader: str | None
    acts: bool
    idle_because: str = ""
    decided_unix_ms: int | None = None
    reason: str = ""
    reason_code: str = ""
    last_move: LastMoveAnswer | None = None


class PrefillPool(msgspec.Struct, frozen=True):
    """The prefill pool of a model. Shares are 0..1; null means unknown."""

    pressure: float | None
    workers: int
    gpus: int
    busy: float | None = None
    encode: float | None = None
    """The part of `busy` in steps that encoded images."""
    starved: float | None = None
    waiting_prompt_tokens: int | None = None
    waiting_requests: int | None = None
    waiting_s: float | None = None


class DecodePool(msgspec.Struct, frozen=True):
    """The decode pool of a model.

    `largest_batch` is that within the TPOT target, and `slots` is as configured, both over all workers.
    """

    pressure: float | None
    workers: int
    gpus: int
    busy: float | None = None
    encode: float | None = None
    """The part of `busy` in steps that encoded images."""
    kv_wait: float | None = None
    running: int | None = None
    held: int | None = None
    slots: int | None = None
    largest_batch: float | None = None
    kv_used: float | None = None
    tpot_ms: float | None = None
    tpot_target_ms: float | None = None
    bound: str | None = None


class Mixed(msgspec.Struct, frozen=True):
    workers: int = 0


class SplitAnswer(msgspec.Struct, frozen=True):
    prefill: int
    decode: int


class ModelStatusAnswer(msgspec.Struct, frozen=True):
    """The state of one model; `cluster_pressure` is the least over all splits of its workers."""

    model: str
    verdict: str
    known: bool
    prefill: PrefillPool
    decode: DecodePool
    unknown_because: str | None = None
    cluster_pressure: float | None = None
    best_split: SplitAnswer | None = None
    mixed: Mixed = Mixed()


class RefusedAnswer(msgspec.Struct, frozen=True):
    """The requests a second that are refused for one reason; status 0 means all other reasons."""

    status: int
    code: str
    per_s: float


class TrafficAnswer(msgspec.Struct, frozen=True):
    """The traffic of all models per second, over `window_ms`."""

    window_ms: int
    requests_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    errors_per_s: float | None = None
    rejected_per_s: float | None = None
    too_many_per_s: float | None = None
    cache_hit: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p95_ms: float | None = None
    batch_lines_per_s: float | None = None
    batch_waiting: int | None = None
    batch_at_workers: int | None = None
    awaited: int = 0
    refused: tuple[RefusedAnswer, ...] = ()


class EstimateAnswer(msgspec.Struct, frozen=True):
    """Estimated share of prefill in busy time with its bounds; null if nothing ran."""

    prefill: float | None
    low: float | None
    high: float | None


class ObservedServerAnswer(msgspec.Struct, frozen=True):
    """An observed server, whose state is one of unknown, learning, observed, exact, away and foreign."""

    name: str
    url: str
    state: str
    trouble: str = ""
    since_unix_ms: int = 0


class ObservedAnswer(msgspec.Struct, frozen=True):
    servers: list[ObservedServerAnswer]
    trouble: str = ""

    @property
    def exact(self) -> int:
        """The number of servers that report their steps."""
        return sum(each.state == "exact" for each in self.servers)

    @property
    def estimated(self) -> int:
        """The number of servers whose GPU time is estimated, or will be."""
        return sum(each.state in ("unknown", "learning", "observed") for each in self.servers)


class WorkerLifeAnswer(msgspec.Struct, frozen=True):
    """A worker's state, one of starting, running, silent, restarting, gone and back."""

    id: str
    life: str
    life_since_unix_ms: int
    model: str = ""
    role: str = ""


class Status(msgspec.Struct, frozen=True):
    as_of_unix_ms: int
    age_ms: int | None
    live: bool
    verdict: VerdictAnswer
    planner: PlannerStateAnswer
    models: list[ModelStatusAnswer]
    traffic: TrafficAnswer
    not_live_because: str | None = None
    alerts_firing: int = 0
    workers: list[WorkerLifeAnswer] = []
    estimate: EstimateAnswer | None = None
    observed: ObservedAnswer | None = None
    """Observed servers, which replace a suite."""


Phase = Literal["prefill", "decode"]


def parse_status(answer: Any) -> Status:
    """Parse an answer of `/v1/status`. Raise StartupError for any other content."""
    try:
        return msgspec.convert(answer, Status)
    except msgspec.ValidationError as error:
        raise StartupError(f"the metrics service answers {STATUS_PATH} in unknown form ({error}): update it") from None
