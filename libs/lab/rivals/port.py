"""The interface of rival policies: their view of the simulated cluster, and their actions.

A router chooses workers for each request on arrival, as systems with a queue in each worker do. A mover examines
the cluster at fixed intervals and changes roles. Both are pure, without a clock or randomness.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from libs.policy.roles import Role
from libs.policy.speed import Speed
from libs.policy.step_time import StepWork


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_ns: int
    tpot_ns: int


@dataclass(slots=True)
class SeenWorker:
    """One worker at one moment, as reported by the telemetry of any of these systems."""

    index: int
    role: Role
    budget_tokens: int
    """The prompt tokens of a step in role mixed."""
    ready: bool
    """True if the worker accepts new work, being neither about to start nor about to leave."""
    speed: Speed
    max_sequences: int
    kv_blocks: int
    block_tokens: int
    prompts: int = 0
    """The number of prompts queued or being computed."""
    prompt_tokens: int = 0
    """The tokens of these prompts that are still to be computed."""
    backlog_ns: float = 0.0
    """The time to compute them by the worker's step-time model."""
    decodes: int = 0
    """The number of sequences that run, including those whose prompts are being computed."""
    prefills: int = 0
    """The number of `decodes` whose prompts are being computed; 0 if unknown."""
    queued_decodes: int = 0
    """The number of sequences that wait for a slot or for their KV before they decode."""
    kv_tokens: int = 0
    decode_step_ns: float = 0.0
    """The time of a decode step over the present decodes by the step-time model; 0 without decodes."""
    free_blocks: int = 0
    steps: Sequence[tuple[StepWork, int]] = ()
    """The pair (work, duration_ns) of each step since the mover's last call, for movers with `wants_steps` only."""


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request from its router's point of view on arrival."""

    number: int
    input_tokens: int
    slo: Slo
    cached_tokens: Sequence[int]
    """The tokens of the request's prefix in each worker's cache, by worker index."""


@dataclass(frozen=True, slots=True)
class RecentRequests:
    """The requests that arrived or ended since the mover's last call."""

    arrived: int = 0
    mean_input_tokens: float = 0.0
    """The mean over requests that arrived; 0 if there were none."""
    ended: int = 0
    """The number of requests that ended, which is the weight of means over outputs."""
    mean_output_tokens: float = 0.0
    """The mean over requests that ended; 0 if there were none."""


@dataclass(frozen=True, slots=True)
class SeenCluster:
    """The cluster from a mover's point of view."""

    now_ns: int
    workers: Sequence[SeenWorker]
    interval: RecentRequests
    slo: Slo
    """The SLO of a typical request; its TTFT limit is that of the interval's mean input."""


@dataclass(frozen=True, slots=True)
class Move:
    index: int
    role: Role
    budget_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt on a worker that is not fully computed. Orders treat it as `libs.policy.gateway.order.Ordered`."""

    arrival_unix_ns: int
    ttft_deadline_unix_ns: int
    prompt_tokens: int
    left_ns: float
    """The time to compute the prompt's remaining tokens alone."""
    resumed: bool
    """True if a part of the prompt was computed here, beyond the part found in the cache."""
    batch: bool = False
    flow: str = ""


class PromptTurn(NamedTuple):
    """The moment at which a worker sorts its prompts."""

    now_ns: int
    starts_ns: float
    """The time at which the first of these prompts can start, after those that the worker has already admitted."""
    pace: float | None
    """The nanoseconds of `left_ns` completed per nanosecond while prompts waited; None if unknown."""


PromptOrder = Callable[[Sequence[QueuedPrompt], PromptTurn], Sequence[tuple[float, ...]]]
"""A function that returns a sort key for each prompt; the lowest is computed first."""


class RivalRouter(Protocol):
    """A rival's choice of workers for each request."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the index of the worker that computes the prompt, on arrival.

        The worker is ready, and in role prefill or mixed with a budget. A worker that is not `Rival.prompt_only` keeps
        the request.
        """
        ...

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the index of the worker that continues after `source` has computed the first token.

        The worker is ready and mixed, and may be `source` itself.
        """
        ...


@runtime_checkable
class LearningRouter(RivalRouter, Protocol):
    """A router that learns from the outcomes of its choices. Requests are identified by `SeenRequest.number`."""

    def first_token(self, number: int, ttft_ns: int) -> None:
        """Record the TTFT of a request as observed by its client."""
        ...

    def ended(self, number: int, tpot_ns: float) -> None:
        """Record the end of a request; `tpot_ns` is 0 if it had fewer than two tokens."""
        ...


@dataclass(frozen=True, slots=True)
class SeenSequence:
    """A decoding sequence, with its answer so far."""

    number: int
    """The request's `SeenRequest.number`."""
    worker: int
    kv_tokens: int
    """The tokens of the request's prompt and its answer so far."""
    output_tokens: int
    tpot_ns: float
    """The mean time per token since the first one; 0 with a single token."""
    tpot_limit_ns: int


class SequenceMove(NamedTuple):
    """The move of a decoding sequence, with its KV, to another worker."""

    number: int
    to: int


class SequenceMover(Protocol):
    """A rival's placement of decoding sequences, called at fixed intervals."""

    @property
    def every_ns(self) -> int:
        """The interval between two calls of `sequence_moves`."""
        ...

    def sequence_moves(
        self, workers: Sequence[SeenWorker], sequences: Sequence[SeenSequence]
    ) -> Sequence[SequenceMove]:
        """Return the sequences to move now, each to another ready worker in role mixed."""
        ...


class RivalMover(Protocol):
    """A rival's planner, called at fixed intervals to change roles."""

    @property
    def every_ns(self) -> int:
        """The interval between two calls of `moves`."""
        ...

    @property
    def wants_steps(self) -> bool:
        """Return whether the mover reads `SeenWorker.steps`, which are recorded only then."""
        ...

    def moves(self, seen: SeenCluster) -> Sequence[Move]:
        """Return the role changes to make now."""
        ...


@dataclass(frozen=True, slots=True)
class MoveCost:
    """The cost of a role change in a rival's system."""

    restarts: bool = False
    """True if the worker aborts its sequences, which restart elsewhere, and loses its cache."""
    drains: bool = False
    """True if the worker accepts no new work until its present work is done, and changes its role only then."""
    start_ns: int = 0
    """The time from the decision until the worker accepts new work."""


@dataclass(frozen=True, slots=True)
class RivalSetting:
    """The cluster for which a rival is set up."""

    workers: int
    speed: Speed
    max_sequences: int
    kv_blocks: int
    block_tokens: int
    slo: Slo


@dataclass(frozen=True, slots=True)
class Rival:
    """A serving system with its policies, for comparison with Fulcrum."""

    name: str
    source: str
    """The paper, or the repository with version and the files read."""
    simplified: Sequence[str]
    """Omissions and assumptions, each as a sentence."""
    first_roles: Callable[[RivalSetting], Sequence[Move]]
    """A function that returns one move for each worker, by index."""
    router: Callable[[RivalSetting], RivalRouter]
    mover: Callable[[RivalSetting], RivalMover | None] = lambda cluster: None
    move_cost: MoveCost = field(default_factory=MoveCost)
    binds_at_arrival: bool = False
    """True if the decode worker is chosen together with the prefill worker rather than at the first token."""
    sequence_mover: Callable[[RivalSetting], SequenceMover | None] = lambda cluster: None
    prompt_only: Callable[[SeenWorker], bool] = lambda worker: worker.role == Role.PREFILL
    """A function that returns whether a worker only computes prompts, after which `RivalRouter.decode` chooses the next
    worker.
    """
    prompt_order: PromptOrder | None = None
    """The order of prompts in a worker; None for first come, first served."""
    guard: bool = False
    """True if new sequences and prompts are limited to protect the TPOT of running sequences. If False, they always
    join.
    """
