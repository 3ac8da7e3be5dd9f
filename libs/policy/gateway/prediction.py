"""How long a request waits for its first and its second token on given workers. Pure; nanoseconds throughout.

TTFT = prompts before it there + its own uncached tokens, at that worker's speed and beside that worker's decodes. The
second token waits for what of the KV transfer does not hide behind the prompt, then for one decode step. Not modelled:
the network, the gateway, sequences that decode only later, and room for KV that comes free in time.
"""

from collections.abc import Iterable
from typing import Final

from libs.policy.gateway.view import Ask, BindingPrediction, WorkerRoom, WorkerView
from libs.policy.speed import UNKNOWN_SPEED, Speed

_TYPICAL: Final = 1024
"""Prompt tokens by which speeds are compared."""
NO_KV_ROOM_NS = 10e9
"""A worker whose KV is full makes others' sequences end first, or preempts them: worse than any queue worth joining."""


def prompt_ns(ask: Ask, room: WorkerRoom) -> float:
    """Computing what of the prompt has no KV there; at least its last token."""
    view, tokens = room.view, ask.tokens
    cached = ask.cached_tokens.get(view.id, 0)
    if cached >= tokens:
        cached = tokens - 1
    beside_ns = view.speed.decode_ns(room.decode_sequences, view.kv_tokens) if view.takes_decode else 0.0
    return view.speed.prompt_ns(tokens - cached, tokens * tokens - cached * cached, beside_ns)


def fastest_speed(workers: Iterable[WorkerView], model: str) -> Speed:
    """Of those that compute prompts of a model: what a request could hope for at best."""
    speeds = {id(view.speed): view.speed for view in workers if view.model == model and _computes_prompts(view)}
    return min(speeds.values(), key=lambda speed: speed.prompt_ns(_TYPICAL, _TYPICAL**2), default=UNKNOWN_SPEED)


def first_token_ns(ask: Ask, room: WorkerRoom) -> float:
    """From now to the first token, were its prompt sent there."""
    wait_ns = room.backlog_ns + prompt_ns(ask, room)
    return wait_ns if _missing_tokens(ask, room) <= room.free_kv_tokens else wait_ns + NO_KV_ROOM_NS


def hidden_ns(ask: Ask, source: WorkerRoom | None) -> float:
    """How long a prompt that is computed at `source` can hide the transfer of its KV; 0 for one computed before."""
    return prompt_ns(ask, source) if source is not None and source.view.streams_kv else 0.0


def second_token_ns(ask: Ask, room: WorkerRoom, hidden_ns: float) -> float:
    """From the first token to the second, were its KV to be pulled there while `hidden_ns` pass anyway."""
    view = room.view
    missing = _missing_tokens(ask, room)
    wait_ns = (room.arriving_kv_tokens + missing) * view.speed.kv_token_ns
    if view.streams_kv:
        wait_ns = max(wait_ns - hidden_ns, 0.0)
    wait_ns += _step_ns(ask, room)
    return wait_ns if missing <= room.free_kv_tokens else wait_ns + NO_KV_ROOM_NS


def predict(ask: Ask, source: WorkerRoom | None, room: WorkerRoom) -> BindingPrediction:
    """Both, for the workers that were chosen; a prompt that is computed already has no first token to come."""
    if source is room:
        return BindingPrediction(first_token_ns(ask, room), _step_ns(ask, room))
    ttft_ns = first_token_ns(ask, source) if source is not None else 0.0
    return BindingPrediction(ttft_ns, second_token_ns(ask, room, hidden_ns(ask, source)))


def take(ask: Ask, source: WorkerRoom | None, room: WorkerRoom, turn: int) -> None:
    """Count a binding in what later ones of the round find."""
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
