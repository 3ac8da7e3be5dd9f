"""Assignment of arrivals to conversations, in which each prompt contains the earlier turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Final

import numpy as np

from libs.lab.traces.draws import SECOND_NS
from libs.lab.traces.request import TraceRequest

SESSION_BLOCK_TOKENS: Final = 64
MAX_SESSION_TOKENS: Final = 32_768
"""The longest context of a conversation. A turn that would exceed it begins a new one."""
ANSWER_TOKEN_NS: Final = 20_000_000
"""The time that an output token is assumed to take where the end of an answer is needed before any engine has run."""

# Low bits of a hash id that hold the block's index; the conversation's id is above. MAX_TOKENS in blocks fits.
_ID_BITS: Final = 24


@dataclass(slots=True)
class _Conversation:
    session: int
    turns_left: int
    history_tokens: int = 0
    turn: int = 0
    hash_ids: list[int] = field(default_factory=list)
    """Ids of the whole blocks so far, shared by the prompts of all turns."""

    def prompt_ids(self, prompt_tokens: int) -> tuple[int, ...]:
        blocks = prompt_tokens // SESSION_BLOCK_TOKENS
        first = self.session << _ID_BITS
        self.hash_ids.extend(range(first + len(self.hash_ids), first + blocks))
        return tuple(self.hash_ids[:blocks])


def converse(
    requests: Sequence[TraceRequest], rng: np.random.Generator, *, open_sessions: int, turns: float, think_s: float
) -> list[TraceRequest]:
    """Assign each arrival to the one of `open_sessions` conversations that has been ready longest.

    Arrivals and outputs stay the same; a request's prompt length becomes what its turn adds to the conversation. A
    conversation ends after a geometric number of turns with mean `turns`, and another takes its place. Think times
    are exponential with mean `think_s`. With too few conversations for the rate, arrivals come before their think
    time has passed, which only an open-loop replay reproduces. Sessions and hash ids count from 1 in order of
    arrival.
    """
    thinks_ns = np.rint(rng.exponential(think_s, len(requests)) * SECOND_NS).astype(np.int64)
    lengths = rng.geometric(1 / turns, len(requests))
    # Pairs of ready time in ns and index; all are ready at first. A conversation is None until its first turn.
    ready = [(0, place) for place in range(min(open_sessions, len(requests)))]
    heapify(ready)
    current: list[_Conversation | None] = [None] * len(ready)
    next_think_ns = [0] * len(ready)
    sessions = 0
    found = []
    for request, think_ns, length in zip(requests, thinks_ns.tolist(), lengths.tolist(), strict=True):
        place = ready[0][1]
        conversation = current[place]
        added = request.input_tokens
        if conversation is None or conversation.history_tokens + added + request.output_tokens > MAX_SESSION_TOKENS:
            sessions += 1
            conversation = current[place] = _Conversation(sessions, length)
        prompt_tokens = conversation.history_tokens + added
        found.append(
            TraceRequest(
                number=request.number,
                arrival_ns=request.arrival_ns,
                input_tokens=prompt_tokens,
                output_tokens=request.output_tokens,
                hash_ids=conversation.prompt_ids(prompt_tokens),
                service_class=request.service_class,
                session=conversation.session,
                turn=conversation.turn,
                think_ns=next_think_ns[place] if conversation.turn else 0,
            )
        )
        conversation.history_tokens = prompt_tokens + request.output_tokens
        conversation.turn += 1
        conversation.turns_left -= 1
        if not conversation.turns_left:
            current[place] = None
        answered_ns = request.arrival_ns + request.output_tokens * ANSWER_TOKEN_NS
        next_think_ns[place] = think_ns
        heapreplace(ready, (answered_ns + think_ns, place))
    return found
