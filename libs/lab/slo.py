"""The SLO of clients in its written form: `ttft=max(2s,3x),tpot=50ms`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.request import TraceRequest

EXAMPLE: Final = "ttft=max(2s,3x),tpot=50ms"
_UNITS_NS: Final = {"us": 1e3, "ms": 1e6, "s": 1e9}
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|x)")

IsolatedNs = Callable[[TraceRequest], float]
"""Return the time that a request's prompt takes on an idle worker."""


@dataclass(frozen=True, slots=True)
class _Amount:
    value: float
    times_isolated: bool

    def ns(self, isolated_ns: float) -> float:
        return self.value * isolated_ns if self.times_isolated else self.value


@dataclass(frozen=True, slots=True)
class SloSpec:
    """A TTFT limit as the max or min of several amounts, and a TPOT limit."""

    text: str
    ttft: tuple[_Amount, ...]
    largest: bool
    """Whether the largest of the amounts counts, or the smallest."""
    tpot_ns: int

    def ttft_limit_ns(self, isolated_ns: float) -> int:
        """Return the TTFT limit of a request whose prompt takes `isolated_ns` on an idle worker."""
        return round((max if self.largest else min)(each.ns(isolated_ns) for each in self.ttft))


def parse_slo(text: str) -> SloSpec:
    """Parse an SLO; raise InvalidRequest that shows the expected form."""
    parts = dict(_part(part, text) for part in re.split(r",(?![^(]*\))", text.replace(" ", "")))
    if set(parts) != {"ttft", "tpot"}:
        raise _unreadable(text, "it needs ttft and tpot, each once")
    tpot = _amount(parts["tpot"], text)
    if tpot.times_isolated:
        raise _unreadable(text, "tpot is a time, not a multiple")
    ttft, largest = parts["ttft"], True
    if found := re.fullmatch(r"(max|min)\((.+)\)", ttft):
        largest, ttft = found[1] == "max", found[2]
    amounts = tuple(_amount(each, text) for each in ttft.split(","))
    return SloSpec(text, amounts, largest, round(tpot.value))


def _part(part: str, text: str) -> tuple[str, str]:
    name, is_given, value = part.partition("=")
    if not is_given:
        raise _unreadable(text, f"{part!r} has no value")
    return name, value


def _amount(text: str, whole: str) -> _Amount:
    found = _AMOUNT.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise _unreadable(whole, f"{text!r} is not a time above zero such as 50ms, or a multiple such as 3x")
    unit = found[2]
    return _Amount(float(found[1]) * _UNITS_NS.get(unit, 1.0), unit == "x")


def _unreadable(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"SLO {text!r}: {why}; write it like {EXAMPLE} (3x is three times the prompt's own prefill)")
