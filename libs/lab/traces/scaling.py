"""Cutting a trace to a time window, and scaling it to another rate."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from math import floor, inf
from typing import Final, Literal, get_args

import numpy as np

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.draws import SECOND_NS, check_count
from libs.lab.traces.request import Trace, TraceRequest

ScaleMethod = Literal["compress", "superpose"]

MAX_FACTOR: Final = 10_000.0


def cut(trace: Trace, start_s: float, seconds: float) -> Trace:
    """Return the requests of `seconds` from `start_s` on, renumbered and timed from there.

    A conversation that began earlier starts with its first turn inside the window, at that turn's arrival in the
    trace.
    """
    if not (0 <= start_s < inf and seconds > 0):
        raise InvalidRequest(f"cannot cut {seconds:g} s from {start_s:g} s on: start at 0 or later, and take some")
    start_ns = round(start_s * SECOND_NS)
    end_ns = inf if seconds == inf else start_ns + round(seconds * SECOND_NS)
    kept = (request for request in trace.requests if start_ns <= request.arrival_ns < end_ns)
    part = [replace(request, arrival_ns=request.arrival_ns - start_ns) for request in kept]
    note = f"Cut: {seconds:g} s from {start_s:g} s on."
    return replace(trace, requests=_renumbered(_begun_anew(part)), notes=(*trace.notes, note))


def scale_rate(trace: Trace, factor: float, method: ScaleMethod, seed: int) -> Trace:
    """Return the trace at `factor` times its rate.

    - compress: replay the same requests in 1/factor of the time, think times included. Bursts get steeper and daily
      patterns shorter; the requests that share prefixes stay the same.
    - superpose: overlay copies of the trace on the same time span, each rotated by a random offset, with hash ids and
      conversations of its own. Copies share nothing and bursts average out. A fractional copy is a random choice, of
      whole conversations where there are some. A copy's conversation that crosses the end is split in two, and the
      later part begins anew at the trace's start.
    """
    if method not in get_args(ScaleMethod):
        raise InvalidRequest(f"no method {method!r}: there are {' and '.join(get_args(ScaleMethod))}")
    if not 0 < factor <= MAX_FACTOR:
        raise InvalidRequest(f"factor is {factor:g}: it has to be over 0 and at most {MAX_FACTOR:g}")
    check_count(len(trace.requests) * (1 if method == "compress" else factor))
    if method == "compress":
        requests = tuple(
            replace(each, arrival_ns=round(each.arrival_ns / factor), think_ns=round(each.think_ns / factor))
            for each in trace.requests
        )
        note = f"Rate × {factor:g} by time compression: arrivals and think times are divided by {factor:g}."
    else:
        requests = _superposed(trace, factor, np.random.default_rng(seed))
        note = f"Rate × {factor:g} by superposition of shifted copies that share no prefix (seed {seed})."
    return replace(trace, requests=requests, notes=(*trace.notes, note))


def _superposed(trace: Trace, factor: float, rng: np.random.Generator) -> tuple[TraceRequest, ...]:
    """Overlay copies; the first one is not rotated unless it is thinned."""
    copies = floor(factor)
    laid: list[TraceRequest] = []
    hash_ids = _FreshIds(max((max(each.hash_ids) for each in trace.requests if each.hash_ids), default=0) + 1)
    sessions = _FreshIds(max((each.session for each in trace.requests), default=0) + 1)
    for copy in range(copies + (factor > copies)):
        requests: Iterable[TraceRequest] = trace.requests
        if copy == copies:
            requests = _thinned(requests, factor - copies, rng)
        if copy and trace.requests:
            requests = _turned(requests, _span_ns(trace), int(rng.integers(_span_ns(trace))))
            new_hash_id, new_session = hash_ids.next_copy(), sessions.next_copy()
            requests = [
                replace(
                    each,
                    hash_ids=tuple(map(new_hash_id, each.hash_ids)),
                    session=new_session(each.session) if each.session else 0,
                )
                for each in requests
            ]
        laid.extend(requests)
    # The sort is stable, so that equal arrivals keep the order of copies and of requests.
    laid.sort(key=_by_arrival)
    return _renumbered(laid)


class _FreshIds:
    """A source of unused ids, to replace the ids of a copy."""

    def __init__(self, first: int) -> None:
        self._next = count(first)

    def next_copy(self) -> Callable[[int], int]:
        """Return a function that maps the ids of one copy to fresh ones."""
        given: defaultdict[int, int] = defaultdict(lambda: next(self._next))
        return given.__getitem__


def _span_ns(trace: Trace) -> int:
    """Return the trace's duration plus one mean gap, so that a rotated copy's end does not meet its start."""
    return trace.requests[-1].arrival_ns + max(trace.duration_ns // max(len(trace.requests) - 1, 1), 1)


def _thinned(requests: Iterable[TraceRequest], share: float, rng: np.random.Generator) -> list[TraceRequest]:
    """Keep each request with probability `share`. The turns of a conversation stay together, since otherwise some would
    lack their prefix.
    """
    kept_sessions: dict[int, bool] = {}
    kept = []
    for each in requests:
        keep = bool(rng.random() < share)
        if each.session:
            keep = kept_sessions.setdefault(each.session, keep)
        if keep:
            kept.append(each)
    return kept


def _turned(requests: Iterable[TraceRequest], span_ns: int, shift_ns: int) -> list[TraceRequest]:
    """Shift the arrivals, wrapping those beyond the end to the start. Wrapped turns get the session id -session."""
    stays, wraps = [], []
    for each in requests:
        at_ns = each.arrival_ns + shift_ns
        if at_ns < span_ns:
            stays.append(replace(each, arrival_ns=at_ns))
        else:
            wraps.append(replace(each, arrival_ns=at_ns - span_ns, session=-each.session))
    return [*_begun_anew(wraps), *stays]


def _begun_anew(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Renumber the turns of each conversation from 0; the first turn has no think time."""
    first_turns: dict[int, int] = {}
    found = []
    for each in requests:
        if each.session:
            turn = each.turn - first_turns.setdefault(each.session, each.turn)
            if turn != each.turn or (not turn and each.think_ns):
                found.append(replace(each, turn=turn, think_ns=each.think_ns if turn else 0))
                continue
        found.append(each)
    return found


def _renumbered(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    return tuple(each if each.number == place else replace(each, number=place) for place, each in enumerate(requests))


def _by_arrival(request: TraceRequest) -> int:
    return request.arrival_ns
