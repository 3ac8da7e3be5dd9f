"""How long a request waits for its first and second token on given workers, in nanoseconds.

TTFT is the time of the prompts before it plus that of its own uncached tokens, at the worker's speed and beside
that worker's decodes. The second token waits for the part of the KV transfer that does not overlap with the prompt,
then for one decode step. Not modelled are the network, the gateway, sequences that begin to decode later, and KV
space that is freed in time.
"""

from collections.abc import Iterable
from typing import Final

from libs.policy.gateway.view import Ask, BindingPrediction, WorkerRoom, WorkerView
from libs.policy.speed import UNKNOWN_SPEED, Speed

# Prompt tokens at which speeds are compared.
_TYPICAL: Final = 1024
NO_KV_ROOM_NS = 10e9
"""The penalty for a worker without free KV blocks.

The request would wait for other sequences to end there or preempt them, which is worse than any queue worth
joining.
"""


def prompt_ns(ask: Ask, room: WorkerRoom) -> float:
    """Return the time to compute the uncached part of the prompt, which is at least its last token."""
    view, tokens = room.view, ask.tokens
    cached = ask.cached_tokens.get(view.id, 0)
    if cached >= tokens:
        cached = tokens - 1
    beside_ns = view.speed.decode_ns(room.decode_sequences, view.kv_tokens) if view.takes_decode else 0.0
    return view.speed.prompt_ns(tokens - cached, tokens * tokens - cached * cached, beside_ns)


def fastest_speed(workers: Iterable[WorkerView], model: str) -> Speed:
    """Return the fastest speed among the workers that compute prompts of a model."""
    speeds = {id(view.speed): view.speed for view in workers if view.model == model and _computes_prompts(view)}
    return min(speeds.values(), key=lambda speed: speed.prompt_ns(_TYPICAL, _TYPICAL**2), default=UNKNOWN_SPEED)


def first_token_ns(ask: Ask, room: WorkerRoom) -> float:
    """Return the time from now to the first token if the prompt goes to this worker."""
    wait_ns = room.backlog_ns + prompt_ns(ask, room)
    return wait_ns if _missing_tokens(ask, room) <= room.free_kv_tokens else wait_ns + NO_KV_ROOM_NS


def hidden_ns(ask: Ask, source: WorkerRoom | None) -> float:
    """Return how much of the KV transfer the prompt at `source` can overlap; 0 if it is already computed."""
    return prompt_ns(ask, source) if source is not None and source.view.streams_kv else 0.0


def second_token_ns(ask: Ask, room: WorkerRoom, hidden_ns: float) -> float:
    """Return the time from the first to the second token if this worker pulls the KV, `hidden_ns` of it overlapped."""
    view = room.view
    missing = _missing_tokens(ask, room)
    wait_ns = (room.arriving_kv_tokens + missing) * view.speed.kv_token_ns
    if view.streams_kv:
        wait_ns = max(wait_ns - hidden_ns, 0.0)
    wait_ns += _step_ns(ask, room)
    return wait_ns if missing <= room.free_kv_tokens else wait_ns + NO_KV_ROOM_NS


def predict(ask: Ask, source: WorkerRoom | None, room: WorkerRoom) -> BindingPrediction:
    """Return both times for the chosen workers; an already computed prompt has a TTFT of 0."""
    if source is room:
        return BindingPrediction(first_token_ns(ask, room), _step_ns(ask, room))
    ttft_ns = first_token_ns(ask, source) if source is not None else 0.0
    return BindingPrediction(ttft_ns, second_token_ns(ask, room, hidden_ns(ask, source)))


def take(ask: Ask, source: WorkerRoom | None, room: WorkerRoom, turn: int) -> None:
    """Count a binding in the rooms that later requests of the round see."""
    missing = _missing_tokens(ask, room)
    if source is not None:
        source.backlog_ns += prompt_ns(ask, source)
        source.prompt_tokens += max(_missing_tokens(ask, source), 1)
        source.turn = turn
    if source is not None and source is not room:
        source.prefill_credits -= 1
        source.batch_prompts += ask.batch
        source.load += 1
        source.free_kv_tokens -= _missing_tokens(ask, source)
        room.arriving_kv_tokens += missing
    room.decode_credits -= 1
    room.load += 1
    room.turn = turn
    room.decode_sequences += 1
    room.free_kv_tokens -= missing


def _step_ns(ask: Ask, room: WorkerRoom) -> float:
    return room.view.speed.decode_ns(room.decode_sequences + 1, room.view.kv_tokens + ask.tokens)


def _missing_tokens(ask: Ask, room: WorkerRoom) -> int:
    return max(ask.tokens - ask.cached_tokens.get(room.view.id, 0), 0)


def _computes_prompts(view: WorkerView) -> bool:
    return view.takes_prefill or view.takes_both
