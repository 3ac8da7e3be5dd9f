"""Traces generated from a spec string: arrival processes, conversations, and scenarios whose mix shifts."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from itertools import chain
from math import ceil, isfinite
from types import MappingProxyType
from typing import Final

import numpy as np

from libs.contracts.errors import InvalidRequest, quoted
from libs.lab.traces.draws import (
    SECOND_NS,
    Whole,
    check_count,
    gamma_ns,
    log_normal_tokens,
    on_off_ns,
    poisson_ns,
    swell_ns,
)
from libs.lab.traces.request import Trace, TraceRequest

SESSION_BLOCK_TOKENS: Final = 64
MAX_SESSION_TOKENS: Final = 32_768
"""The longest context of a conversation. A turn that would exceed it begins a new conversation."""
ANSWER_TOKEN_NS: Final = 20_000_000
"""The time that an output token is assumed to take if the end of an answer is needed before any engine has run."""

# The low bits of a hash id contain the block's index; the conversation's id is above. MAX_TOKENS in blocks fits.
_ID_BITS: Final = 24


@dataclass(slots=True)
class _Conversation:
    session: int
    turns_left: int
    history_tokens: int = 0
    turn: int = 0
    hash_ids: list[int] = field(default_factory=list)
    """The ids of the whole blocks so far, shared by the prompts of all turns."""

    def prompt_ids(self, prompt_tokens: int) -> tuple[int, ...]:
        blocks = prompt_tokens // SESSION_BLOCK_TOKENS
        first = self.session << _ID_BITS
        self.hash_ids.extend(range(first + len(self.hash_ids), first + blocks))
        return tuple(self.hash_ids[:blocks])


def converse(
    requests: Sequence[TraceRequest], rng: np.random.Generator, *, open_sessions: int, turns: float, think_s: float
) -> list[TraceRequest]:
    """Assign each arrival to the one of `open_sessions` conversations that has been ready longest.

    Arrivals and outputs stay the same; a request's prompt length becomes the number of tokens that its turn adds to the
    conversation. A conversation ends after a geometric number of turns with mean `turns`, and another takes its place.
    Think times are exponential with mean `think_s`. With too few conversations for the rate, arrivals come before their
    think time has passed, which only an open-loop replay reproduces. Sessions and hash ids count from 1 in order of
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


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a spec may set; both bounds are inclusive."""

    name: str
    default: float
    least: float
    most: float
    says: str
    """The help text, which includes the unit."""

    def __str__(self) -> str:
        return f"{self.name} ({self.says}, {self.least:g} to {self.most:g}, else {self.default:g})"


def parse_spec(spec: str, kinds: Mapping[str, Sequence[Parameter]]) -> tuple[str, dict[str, float]]:
    """Return the kind and a value for each of its parameters.

    Raise InvalidRequest, whose message names the fault and lists the valid choices.
    """
    kind, _, rest = spec.partition(":")
    kind = kind.strip()
    if kind not in kinds:
        raise InvalidRequest(f"no kind of trace {quoted(kind)}: there are {', '.join(kinds)}")
    known = {each.name: each for each in kinds[kind]}
    valid = f"{kind} has {', '.join(map(str, kinds[kind]))}"
    given: dict[str, float] = {}
    for part in rest.split(",") if rest.strip() else ():
        name, equals, text = (each.strip() for each in part.partition("="))
        if not equals:
            raise InvalidRequest(f"{quoted(part)} is not name=value: {valid}", param=name)
        if name not in known:
            raise InvalidRequest(f"no parameter {quoted(name)}: {valid}", param=name)
        if name in given:
            raise InvalidRequest(f"{name} is given twice: {valid}", param=name)
        given[name] = _value(known[name], text, valid)
    return kind, {name: given.get(name, each.default) for name, each in known.items()}


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.IGNORECASE | re.ASCII)


def _value(parameter: Parameter, text: str, valid: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else float("nan")
    if not isfinite(value) or not parameter.least <= value <= parameter.most:
        message = f"{parameter.name} is {quoted(text)}, which is no number in its range: {valid}"
        raise InvalidRequest(message, param=parameter.name)
    return value


CHAT: Final = "chat"
LONG_PROMPT: Final = "long-prompt"
WRITING: Final = "writing"
"""Service classes: short prompts and outputs, prompts far longer than outputs, outputs far longer than prompts."""

MAX_SECONDS: Final = 14 * 86_400.0

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Stream:
    """The requests of one service class in order of arrival."""

    service_class: str
    times_ns: Whole
    prompts: Whole
    outputs: Whole

    def requests(self) -> list[TraceRequest]:
        """Return the stream's requests, numbered from 0 within the stream."""
        rows = zip(self.times_ns.tolist(), self.prompts.tolist(), self.outputs.tolist(), strict=True)
        return [
            TraceRequest(number, at_ns, prompt, output, service_class=self.service_class)
            for number, (at_ns, prompt, output) in enumerate(rows)
        ]


_RATE: Final = Parameter("rate", 5, 1e-4, 1e5, "requests a second, on average")
_ISL: Final = Parameter("isl", 1000, 1, 1e6, "mean prompt tokens; in conversations, what a turn adds")
_OSL: Final = Parameter("osl", 200, 1, 1e6, "mean output tokens")
_SECONDS: Final = Parameter("seconds", 600, 0.1, MAX_SECONDS, "length")
_SPREAD: Final = Parameter("spread", 0.8, 0, 3, "standard deviation of the logarithm of lengths, which are log-normal")
_SESSIONS: Final = Parameter("sessions", 0, 0, 1e6, "chat conversations open at once; 0: requests stand alone")
_TURNS: Final = Parameter("turns", 5, 1, 1000, "mean turns of a conversation")
_THINK: Final = Parameter("think", 10, 0, 86_400, "mean seconds from an answer's end to the next turn")
_BASE: Final = (_RATE, _ISL, _OSL, _SECONDS, _SPREAD)
_COMMON: Final = (*_BASE, _SESSIONS, _TURNS, _THINK)

_FLOOD: Final = (
    Parameter("flood_rate", 2, 1e-4, 1e5, "long prompts a second while the flood lasts"),
    Parameter("flood_isl", 8000, 1, 1e6, "their mean prompt tokens"),
    Parameter("flood_at", 0.5, 0, 1, "when the flood begins, as a share of the length"),
    Parameter("flood_seconds", 60, 0.1, 86_400, "how long it lasts"),
)
_WRITING: Final = (
    Parameter("writing_rate", 2, 1e-4, 1e5, "requests for long texts a second, at the height of the evening"),
    Parameter("writing_isl", 300, 1, 1e6, "their mean prompt tokens"),
    Parameter("writing_osl", 2000, 1, 1e6, "their mean output tokens"),
)
_EVENING_S: Final = Parameter("seconds", 4 * 3600, 0.1, MAX_SECONDS, "length")
_EVENING: Final = tuple(_EVENING_S if each is _SECONDS else each for each in _COMMON)

KINDS: Final[Mapping[str, Sequence[Parameter]]] = MappingProxyType(
    {
        "poisson": _COMMON,
        "gamma": (*_COMMON, Parameter("cv", 2, 0.05, 20, "coefficient of variation of gaps; 1 is Poisson")),
        "onoff": (
            *_COMMON,
            Parameter("on", 10, 0.1, 86_400, "mean seconds of arrivals at a stretch"),
            Parameter("off", 10, 0.1, 86_400, "mean seconds of silence between"),
        ),
        "flipflop": (
            *_BASE,
            Parameter("period", 10, 1, 60, "seconds of a prefill-heavy and a decode-heavy half together"),
            Parameter(
                "swing", 4, 1, 100, "isl is times this and osl by this in one half, and the reverse in the other"
            ),
        ),
        "chat-flood": (*_COMMON, *_FLOOD),
        "evening-writing": (*_EVENING, *_WRITING),
        "both": (*_EVENING, *_FLOOD, *_WRITING),
    }
)
"""Parameters of each kind of trace.

The last three are scenarios. The first floods chat traffic with long prompts for a minute. The second adds long-form
writing that rises and falls over an evening. The third has both.
"""


def generate(spec: str, *, seed: int) -> Trace:
    """Return the trace described by a spec such as `poisson:rate=5,isl=1000,osl=200,seconds=600`.

    One seed gives the same trace under one numpy version. Each class of requests has its own generator, so that the
    parameters of a flood do not change the chat traffic. Raise InvalidRequest.
    """
    kind, values = parse_spec(spec, KINDS)
    *generators, talks = (np.random.default_rng([seed, place]) for place in range(_GENERATORS))
    streams = _STREAMS[kind](values, generators)
    check_count(sum(len(each.times_ns) for each in streams))
    parts = [stream.requests() for stream in streams]
    open_sessions = ceil(values.get("sessions", 0))
    if open_sessions:
        # Chats are the first stream of each kind that can have conversations.
        turns, think_s = values["turns"], values["think"]
        parts[0] = converse(parts[0], talks, open_sessions=open_sessions, turns=turns, think_s=think_s)
    requests = sorted(chain.from_iterable(parts), key=_by_arrival)
    if not requests:
        raise InvalidRequest(f"{quoted(spec)} with seed {seed} gives no request: ask for a higher rate or more seconds")
    numbered = tuple(replace(each, number=number) for number, each in enumerate(requests))
    block_tokens = SESSION_BLOCK_TOKENS if open_sessions else 0
    return Trace(spec, numbered, block_tokens, _notes(values, seed, bool(open_sessions)))


def _notes(values: Values, seed: int, has_sessions: bool) -> tuple[str, ...]:
    notes = [f"Generated with seed {seed}; lengths are log-normal with spread {values['spread']:g} around their means."]
    if has_sessions:
        notes.append(
            f"Later turns of conversations are dealt to the arrivals as if an output token took "
            f"{ANSWER_TOKEN_NS / 1e6:g} ms; a closed-loop replay goes by think times instead."
        )
    return tuple(notes)


def _by_arrival(request: TraceRequest) -> int:
    return request.arrival_ns


def _stream(
    rng: np.random.Generator, service_class: str, times_ns: Whole, *, isl: float, osl: float, spread: float
) -> _Stream:
    prompts = log_normal_tokens(rng, isl, spread, len(times_ns))
    return _Stream(service_class, times_ns, prompts, log_normal_tokens(rng, osl, spread, len(times_ns)))


def _chat(values: Values, rng: np.random.Generator, times_ns: Whole) -> _Stream:
    return _stream(rng, CHAT, times_ns, isl=values["isl"], osl=values["osl"], spread=values["spread"])


def _poisson(values: Values, generators: Sequence[np.random.Generator]) -> list[_Stream]:
    rng = generators[0]
    return [_chat(values, rng, poisson_ns(rng, values["rate"], values["seconds"]))]


def _gamma(values: Values, generators: Sequence[np.random.Generator]) -> list[_Stream]:
    rng = generators[0]
    return [_chat(values, rng, gamma_ns(rng, values["rate"], values["cv"], values["seconds"]))]


def _on_off(values: Values, generators: Sequence[np.random.Generator]) -> list[_Stream]:
    rng = generators[0]
    return [_chat(values, rng, on_off_ns(rng, values["rate"], values["on"], values["off"], values["seconds"]))]


def _flip_flop(values: Values, generators: Sequence[np.random.Generator]) -> list[_Stream]:
    rng, swing, period_ns = generators[0], values["swing"], round(values["period"] * SECOND_NS)
    times_ns = poisson_ns(rng, values["rate"], values["seconds"])
    is_first_half = times_ns % period_ns < period_ns // 2
    isl, osl, spread = values["isl"], values["osl"], values["spread"]
    return [
        _stream(rng, LONG_PROMPT, times_ns[is_first_half], isl=isl * swing, osl=osl / swing, spread=spread),
        _stream(rng, WRITING, times_ns[~is_first_half], isl=isl / swing, osl=osl * swing, spread=spread),
    ]


def _flood(values: Values, rng: np.random.Generator) -> _Stream:
    start_s = values["flood_at"] * values["seconds"]
    times_ns = poisson_ns(rng, values["flood_rate"], min(values["flood_seconds"], values["seconds"] - start_s))
    start_ns = round(start_s * SECOND_NS)
    isl, osl, spread = values["flood_isl"], values["osl"], values["spread"]
    return _stream(rng, LONG_PROMPT, times_ns + start_ns, isl=isl, osl=osl, spread=spread)


def _evening(values: Values, rng: np.random.Generator) -> _Stream:
    times_ns = swell_ns(rng, values["writing_rate"], values["seconds"])
    isl, osl, spread = values["writing_isl"], values["writing_osl"], values["spread"]
    return _stream(rng, WRITING, times_ns, isl=isl, osl=osl, spread=spread)


def _chat_flood(values: Values, generators: Sequence[np.random.Generator]) -> list[_Stream]:
    return [*_poisson(values, generators), _flood(values, generators[1])]


def _evening_writing(values: Values, generators: Sequence[np.random.Generator]) -> list[_Stream]:
    return [*_poisson(values, generators), _evening(values, generators[2])]


def _both(values: Values, generators: Sequence[np.random.Generator]) -> list[_Stream]:
    return [*_poisson(values, generators), _flood(values, generators[1]), _evening(values, generators[2])]


_GENERATORS: Final = 4
"""Random generators, one each for chats (and the simple kinds), floods, writing, and conversations."""
_STREAMS: Final[Mapping[str, Callable[[Values, Sequence[np.random.Generator]], list[_Stream]]]] = MappingProxyType(
    {
        "poisson": _poisson,
        "gamma": _gamma,
        "onoff": _on_off,
        "flipflop": _flip_flop,
        "chat-flood": _chat_flood,
        "evening-writing": _evening_writing,
        "both": _both,
    }
)
