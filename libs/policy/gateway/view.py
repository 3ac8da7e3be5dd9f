"""What one binding round works on: workers as this gateway sees them, requests that wait, and who gets whom.

Also whether these workers can serve a model at all. Pure.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from libs.policy.speed import UNKNOWN_SPEED, Speed


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as one gateway sees it at one moment."""

    id: str
    model: str
    kv_kind: str
    """Workers with equal kinds can exchange blocks."""
    takes_prefill: bool
    takes_decode: bool
    takes_both: bool
    prefill_credits: int
    decode_credits: int
    """A request that runs on one worker from start to end is bound against one of these."""
    load: int
    """Sequences there, running, waiting and bound."""
    turn: int = 0
    """Grows with each binding of this gateway: the worker that was bound longest ago has the lowest."""
    speed: Speed = UNKNOWN_SPEED
    reported_backlog_ns: float = 0.0
    """Prefill time queued at the last load report."""
    reported_unix_ns: int = 0
    unseen_ns: float = 0.0
    """Prefill time of prompts that this gateway sent since."""
    prompt_tokens: int = 0
    """Of both, still to compute."""
    decode_sequences: int = 0
    kv_tokens: int = 0
    """What its sequences hold, about what one of its decode steps reads."""
    arriving_kv_tokens: int = 0
    """On their way there from other workers."""
    free_kv_tokens: float = math.inf
    streams_kv: bool = True
    prompts: int = 0
    """Of this gateway, being computed there against prefill credits."""
    batch_prompts: int = 0
    """Of them, those of batch lines."""

    def backlog_ns(self, now_ns: int) -> float:
        """Time until it has computed all its prompts: the reported backlog has shrunk since the report."""
        return max(self.reported_backlog_ns - max(now_ns - self.reported_unix_ns, 0), 0.0) + self.unseen_ns


@dataclass(frozen=True, slots=True)
class Ask:
    """What one waiting request needs."""

    sequence_id: int
    model: str
    tokens: int = 0
    """To be computed or pulled: the prompt, and what was generated before."""
    kv_kind: str | None = None
    """Set when its prompt is computed and its blocks wait for a decode worker of this kind."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of the prompt's start, how many have their KV at a worker already, by worker id."""
    avoid: frozenset[str] = frozenset()
    """Workers that failed it: taken only where there are no others."""
    batch: bool = False
    """Nobody waits for it in person."""


@dataclass(frozen=True, slots=True)
class BindingPrediction:
    """What a request is expected to see of the workers it was bound to."""

    ttft_ns: float
    """From binding to the first token."""
    second_ns: float
    """From the first token to the second."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Who serves a request."""

    sequence_id: int
    prompt_worker: str | None
    """None: the prompt is computed already."""
    decode_worker: str
    """Equal to `prompt_worker` when one worker does both."""
    predicted: BindingPrediction


@dataclass(slots=True, eq=False)
class WorkerRoom:
    """A view, and what a binding round has changed of it so far."""

    view: WorkerView
    prefill_credits: int
    decode_credits: int
    load: int
    turn: int
    backlog_ns: float
    decode_sequences: int
    arriving_kv_tokens: int
    free_kv_tokens: float
    batch_prompts: int
    prompt_tokens: int

    @classmethod
    def of(cls, view: WorkerView, now_ns: int) -> "WorkerRoom":
        """Nothing is bound yet."""
        return cls(
            view,
            view.prefill_credits,
            view.decode_credits,
            view.load,
            view.turn,
            view.backlog_ns(now_ns),
            view.decode_sequences,
            view.arriving_kv_tokens,
            view.free_kv_tokens,
            view.batch_prompts,
            view.prompt_tokens,
        )

    @property
    def runs_out_of_prompts(self) -> bool:
        """Whether a step could lack prompt tokens before the next prompt is there. What a worker cannot begin yet waits
        in a gateway, where it can still go elsewhere, or let others by: credits bound how many are there, but not how
        long they are."""
        return _runs_out(self.prompt_tokens, self.view.speed)

    def admits(self, ask: Ask) -> bool:
        """Whether the prompt may take a prefill credit: batch lines leave half of a gateway's to people who may come,
        where it has more than one."""
        return not ask.batch or self.batch_prompts < max((self.view.prefill_credits + self.view.prompts) // 2, 1)


def rooms(workers: Iterable[WorkerView]) -> dict[str, int]:
    """How many requests can be bound at most, by model: each takes a decode credit."""
    found: dict[str, int] = {}
    for view in workers:
        found[view.model] = found.get(view.model, 0) + max(view.decode_credits, 0)
    return found


def prompts_may_start(workers: Iterable[WorkerView], model: str) -> bool:
    """Whether some worker of the model takes a prompt now, credits of the other phase aside."""
    return any(
        view.model == model
        and ((view.takes_prefill and view.prefill_credits > 0) or (view.takes_both and view.decode_credits > 0))
        and _runs_out(view.prompt_tokens, view.speed)
        for view in workers
    )


def _runs_out(prompt_tokens: int, speed: Speed) -> bool:
    return prompt_tokens <= speed.chunk_tokens or prompt_tokens <= speed.filled_tokens()


def serves_decode(workers: Iterable[WorkerView], model: str, kv_kind: str) -> bool:
    """Whether some worker could take over blocks of this kind, credits aside."""
    return any(view.model == model and view.takes_decode and view.kv_kind == kv_kind for view in workers)


def why_not(workers: Iterable[WorkerView], model: str) -> str:
    """What keeps a model that has workers from being served, to be added to a sentence; empty where it has none."""
    views = [view for view in workers if view.model == model]
    if any(view.takes_prefill for view in views) and any(view.takes_decode for view in views):
        return ": its prefill and decode workers have different kinds of KV, `fulcrum workers` tells in what"
    return ""


def serves(workers: Iterable[WorkerView], model: str) -> bool:
    """Whether both phases of the model have a worker, credits aside."""
    views = [view for view in workers if view.model == model]
    if any(view.takes_both for view in views):
        return True
    return any(view.takes_prefill and serves_decode(views, model, view.kv_kind) for view in views)
