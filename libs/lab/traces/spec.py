"""Spec strings of the form `kind:name=value,name=value`, checked against the parameters of the kind."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from libs.contracts.errors import InvalidRequest, quoted


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

    Raises InvalidRequest, whose message names the fault and lists the valid choices.
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
