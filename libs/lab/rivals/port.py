"""What a rival policy sees of the simulated cluster, and what it may do there.

A router chooses workers for each request at its arrival, as systems with a queue in each worker do. A mover looks at
the cluster at fixed intervals and changes roles. Both are pure: no clock, no chance of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from libs.policy.roles import Role
from libs.policy.speed import Speed
from libs.policy.step_time import StepWork


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request wants."""

    ttft_ns: int
    tpot_ns: int


@dataclass(slots=True)
class SeenWorker:
    """One worker at one moment, as the telemetry of any of these systems reports it."""

    index: int
    role: Role
    budget_tokens: int
    """Prompt tokens of a step in role mixed."""
    ready: bool
    """Takes new work: neither starting nor leaving."""
    speed: Speed
    max_sequences: int
    kv_blocks: int
    block_tokens: int
    prompts: int = 0
    """Prompts queued or being computed."""
    prompt_tokens: int = 0
    """Of them, tokens yet to compute."""
    backlog_ns: float = 0.0
    """Computing those, by the worker's step-time model."""
    decodes: int = 0
    """Sequences that decode."""
    queued_decodes: int = 0
    """Sequences that wait for a place or for their KV, and would decode."""
    kv_tokens: int = 0
    """What all its sequences hold."""
    decode_step_ns: float = 0.0
    """A decode step over what decodes now, by the step-time model; 0 without any."""
    free_blocks: int = 0
    steps: Sequence[tuple[StepWork, int]] = ()
    """(work, duration_ns) of each step since the mover last looked; for movers with `wants_steps` alone."""


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request that is to be routed."""

    number: int
    input_tokens: int
    output_tokens_expected: int
    """What a system may expect: the mean output of requests that have ended so far, or 0 before any."""
    slo: Slo
    cached_tokens: Sequence[int]
    """Tokens of its prefix that each worker has in its cache, by index."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Requests since the mover last looked."""

    arrived: int = 0
    mean_input_tokens: float = 0.0
    """Of those that arrived; 0 without any."""
    ended: int = 0
    """Requests that ended; what means over outputs are weighed by."""
    mean_output_tokens: float = 0.0
    """Of those that ended; 0 without any."""
    mean_ttft_ns: float = 0.0
    """Of those whose first token came; 0 without any."""
    mean_tpot_ns: float = 0.0
    """Of those that ended with more than one token; 0 without any."""


@dataclass(frozen=True, slots=True)
class SeenCluster:
    """The cluster, when a mover looks."""

    now_ns: int
    workers: Sequence[SeenWorker]
    interval: Interval
    slo: Slo
    """Of the typical request: its TTFT limit is that of the interval's mean input."""


@dataclass(frozen=True, slots=True)
class Move:
    """A worker takes another role."""

    index: int
    role: Role
    budget_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt that a worker holds and has not computed to its end; `libs.policy.queue.order.Ordered` to an order."""

    arrival_unix_ns: int
    ttft_deadline_unix_ns: int
    prompt_tokens: int
    left_ns: float
    """Computing what is left of it by itself."""
    resumed: bool
    """Some of it was computed here, beyond what was found in the cache."""
    batch: bool = False
    flow: str = ""
    """Class of its request."""


class PromptTurn(NamedTuple):
    """When a worker sorts its prompts."""

    now_ns: int
    starts_ns: float
    """When the first of these can start: what the worker admitted before is computed."""
    pace: float | None
    """Nanoseconds of `left_ns` that it did in one while prompts waited; None: not known."""


PromptOrder = Callable[[Sequence[QueuedPrompt], PromptTurn], Sequence[tuple[float, ...]]]
"""What a worker sorts its prompts by, a key for each, the least first."""


class RivalRouter(Protocol):
    """Chooses workers."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Index of the worker that computes the prompt, at arrival. It is ready, and prefill or mixed with a budget; a
        mixed one keeps the request to its end."""
        ...

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Index of the worker that decodes what `source` has computed, at the first token. It is ready and mixed and
        may be `source` itself."""
        ...


class RivalMover(Protocol):
    """Changes roles."""

    @property
    def every_ns(self) -> int:
        """Interval between two looks."""
        ...

    @property
    def wants_steps(self) -> bool:
        """Whether `SeenWorker.steps` is to be filled."""
        ...

    def moves(self, seen: SeenCluster) -> Sequence[Move]:
        """What to change now."""
        ...


@dataclass(frozen=True, slots=True)
class MoveCost:
    """How a rival changes a worker's role."""

    restarts: bool = False
    """The worker aborts what it runs, which starts anew elsewhere, and loses its cache."""
    start_ns: int = 0
    """From the decision until it takes new work."""


@dataclass(frozen=True, slots=True)
class RivalSetting:
    """What a rival is set up for."""

    workers: int
    speed: Speed
    max_sequences: int
    kv_blocks: int
    block_tokens: int
    slo: Slo


@dataclass(frozen=True, slots=True)
class Rival:
    """A system to compare with."""

    name: str
    source: str
    """Paper or repository with version, and what of it was read."""
    simplified: Sequence[str]
    """What is left out or assumed, each a sentence."""
    first_roles: Callable[[RivalSetting], Sequence[Move]]
    """One for each worker, by index."""
    router: Callable[[RivalSetting], RivalRouter]
    mover: Callable[[RivalSetting], RivalMover | None] = lambda cluster: None
    move_cost: MoveCost = field(default_factory=MoveCost)
    binds_at_arrival: bool = False
    """Whether the decode worker is chosen with the prefill worker; else once the first token is there."""
    prompt_order: PromptOrder | None = None
    """Of the prompts in a worker; None: as they came."""
    guard: bool = False
    """Whether newcomers and prompts are held to the TPOT of running sequences; off: they always join."""
