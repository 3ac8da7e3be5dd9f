"""Views of workers for a binding round, the models that they can serve, and the silent workers to leave.

A silent worker is frozen, starved or cut off. Silence counts only while the gateway was listening. Time that the
gateway lost because its own machine was busy does not count.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from libs.policy.speed import UNKNOWN_SPEED, Speed


class PlacedImage(NamedTuple):
    """An image of a prompt."""

    end: int
    """The position after its last token in the prompt."""
    digest: bytes


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One gateway's view of a worker at one moment."""

    id: str
    model: str
    kv_kind: str
    """The kind of KV; workers of equal kind can exchange blocks."""
    takes_prefill: bool
    takes_decode: bool
    takes_both: bool
    prefill_credits: int
    decode_credits: int
    """The free decode credits; a request that runs on one worker from start to end takes one of these."""
    load: int
    """The number of sequences there: running, waiting and bound."""
    turn: int = 0
    """The number of this gateway's last binding to the worker; the lowest number was bound longest ago."""
    speed: Speed = UNKNOWN_SPEED
    reported_backlog_ns: float = 0.0
    """The prefill time queued at the last load report."""
    reported_unix_ns: int = 0
    unseen_ns: float = 0.0
    """The prefill time of prompts that this gateway has sent since the report."""
    prompt_tokens: int = 0
    """The prompt tokens still to compute: those last reported, and those sent since."""
    decode_sequences: int = 0
    kv_tokens: int = 0
    """The number of tokens whose KV its sequences hold, which is roughly what one decode step reads."""
    arriving_kv_tokens: int = 0
    """The number of tokens whose KV is on its way there from other workers."""
    free_kv_tokens: float = math.inf
    streams_kv: bool = True
    prompts: int = 0
    """The number of this gateway's prompts that hold a prefill credit of the worker."""
    batch_prompts: int = 0
    """The part of `prompts` that belongs to batch lines."""
    image_ns: float = 0.0
    """The time to encode one image; 0 while unknown."""
    recent_images: Container[bytes] = ()
    """Digests of the images whose embeddings it is believed to keep."""

    def backlog_ns(self, now_ns: int) -> float:
        """Return the time until it has computed all its prompts, images included.

        The reported part has shrunk since the report.
        """
        return max(self.reported_backlog_ns - max(now_ns - self.reported_unix_ns, 0), 0.0) + self.unseen_ns


@dataclass(frozen=True, slots=True)
class BindingRequest:
    """The part of a waiting request that binding depends on."""

    sequence_id: int
    model: str
    tokens: int = 0
    """The number of tokens to compute or pull: the prompt and the output so far."""
    kv_kind: str | None = None
    """The kind of KV of its computed blocks, which its decode worker must share; None before the prompt is computed."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """The leading prompt tokens whose KV each worker already holds, by worker id."""
    avoid: frozenset[str] = frozenset()
    """The ids of workers that failed it, used only if there are no others."""
    batch: bool = False
    """True if the request is a batch line, which nobody waits for interactively."""
    pooled: bool = False
    """True if the request's prompt becomes a vector, so that it needs no decode worker."""
    images: Sequence[PlacedImage] = ()
    due_ns: int = 0
    """The Unix time at which its first token is due; 0 if it has no deadline, or can no longer meet it."""


@dataclass(frozen=True, slots=True)
class BindingPrediction:
    """The latencies expected of the workers that a request was bound to."""

    ttft_ns: float
    """The time from binding to the first token."""
    second_ns: float
    """The time from the first to the second token."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The workers chosen for one request and their expected latency."""

    sequence_id: int
    prompt_worker: str | None
    """The worker that computes the prompt; None if it is already computed."""
    decode_worker: str
    """The worker that decodes, equal to `prompt_worker` if one worker does both; empty if none is needed."""
    predicted: BindingPrediction


@dataclass(slots=True, eq=False)
class WorkerRoom:
    """A worker as the current binding round sees it, with the bindings made so far."""

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
        """Return the room of a worker before anything is bound."""
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
        """Return whether a step could lack prompt tokens before the next prompt arrives.

        A prompt that the worker cannot begin yet waits in a gateway, where it can still go elsewhere or let others
        pass. Credits limit the number of prompts at a worker, but not their length.
        """
        return _runs_out(self.prompt_tokens, self.view.speed)

    def admits(self, request: BindingRequest) -> bool:
        """Return whether the prompt may take a prefill credit.

        Batch lines leave half of a gateway's credits to interactive requests if it has more than one.
        """
        return not request.batch or self.batch_prompts < max((self.view.prefill_credits + self.view.prompts) // 2, 1)


def rooms(workers: Iterable[WorkerView]) -> dict[str, int]:
    """Return the number of requests that can be bound, by model. Each takes a decode credit."""
    found: dict[str, int] = {}
    for view in workers:
        found[view.model] = found.get(view.model, 0) + max(view.decode_credits, 0)
    return found


def prompt_rooms(workers: Iterable[WorkerView]) -> dict[str, int]:
    """Return the number of prompts that can be bound without a decode worker, by model."""
    found: dict[str, int] = {}
    for view in workers:
        if view.takes_prefill:
            found[view.model] = found.get(view.model, 0) + max(view.prefill_credits, 0)
    return found


def prompts_may_start(workers: Iterable[WorkerView], model: str) -> bool:
    """Return whether some worker of the model accepts a prompt now, regardless of the other phase's credits."""
    return any(
        view.model == model
        and ((view.takes_prefill and view.prefill_credits > 0) or (view.takes_both and view.decode_credits > 0))
        and _runs_out(view.prompt_tokens, view.speed)
        for view in workers
    )


def _runs_out(prompt_tokens: int, speed: Speed) -> bool:
    return prompt_tokens <= speed.chunk_tokens or prompt_tokens <= speed.filled_tokens()


def serves_decode(workers: Iterable[WorkerView], model: str, kv_kind: str) -> bool:
    """Return whether some worker can take over blocks of this kind, regardless of credits."""
    return any(view.model == model and view.takes_decode and view.kv_kind == kv_kind for view in workers)


def why_not(workers: Iterable[WorkerView], model: str) -> str:
    """Explain why a model with workers is not served, as a clause; empty if there is no reason to give."""
    views = [view for view in workers if view.model == model]
    if any(view.takes_prefill for view in views) and any(view.takes_decode for view in views):
        return ": its prefill and decode workers have different kinds of KV; `fulcrum workers` shows how they differ"
    return ""


def serves(workers: Iterable[WorkerView], model: str) -> bool:
    """Return whether both phases of the model have a worker, regardless of credits."""
    views = [view for view in workers if view.model == model]
    if any(view.takes_both for view in views):
        return True
    return any(view.takes_prefill and serves_decode(views, model, view.kv_kind) for view in views)


def computes_prompts(workers: Iterable[WorkerView], model: str) -> bool:
    """Return whether some worker of the model computes prompts, regardless of credits."""
    return any(view.model == model and (view.takes_prefill or view.takes_both) for view in workers)


SILENT_MS = 350.0
"""The silence after which a worker's sequences go to other workers, if those can take them.

It is three and a half heartbeats, unless a setting overrides it.
"""
QUIET_SHARE = 2.0 / 3.5
"""The part of that silence after which new work goes to other workers, if there are any."""
MAX_AWAY_SHARE = 0.5
"""The share of a model's workers that may be left at once, at least one.

If more are quiet together, the cause is probably the network or this machine. They are then left only after
`MAX_SILENT_MS`.
"""
MAX_SILENT_MS = 30_000.0
"""The silence in ms after which any worker is abandoned, unless a setting overrides it.

It limits the wait for a process whose event loop is stuck while its connections stay open.
"""


@dataclass(frozen=True, slots=True)
class WorkerSilence:
    """A connected worker and its silence, of which only a fifth counts for an idle worker."""

    place: int
    """The worker's number in the caller's list."""
    model: str
    silent_ms: float
    view: WorkerView | None
    """The worker's view; None if it accepts no new work."""


def whom_to_leave(
    workers: Sequence[WorkerSilence],
    away: Counter[str],
    silent_after_ms: float = SILENT_MS,
    max_silent_ms: float = MAX_SILENT_MS,
) -> list[WorkerSilence]:
    """Return the silent workers that the others can replace, and those silent for `max_silent_ms` in any case.

    `away` counts each model's workers that were left earlier and have not come back. Before `max_silent_ms` a worker is
    not left if its model would then be unserved, since there is no replacement.
    """
    leaving: list[WorkerSilence] = []
    for model in {each.model for each in workers}:
        of_model = [each for each in workers if each.model == model]
        rest = [each.view for each in of_model if each.silent_ms < silent_after_ms and each.view is not None]
        quiet = sum(each.silent_ms >= QUIET_SHARE * silent_after_ms for each in of_model) + away[model]
        few = quiet <= max(1, MAX_AWAY_SHARE * (len(of_model) + away[model]))
        bound_ms = silent_after_ms if few and serves(rest, model) else max_silent_ms
        leaving += [each for each in of_model if each.silent_ms >= bound_ms]
    return leaving
