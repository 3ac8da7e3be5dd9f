"""Rivals by name: a kind followed by integers after colons, such as `static:9:7` or `aggregated:512`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.aggregated import aggregated
from libs.lab.rivals.arrow import arrow
from libs.lab.rivals.dynamo import dynamo
from libs.lab.rivals.llm_d import llm_d
from libs.lab.rivals.niyama import niyama
from libs.lab.rivals.port import Rival
from libs.lab.rivals.static_split import static_split
from libs.lab.rivals.taichi import taichi


@dataclass(frozen=True, slots=True)
class RivalKind:
    """A rival and the numbers that its name may carry."""

    make: Callable[..., Rival]
    forms: tuple[str, ...]
    """The permitted forms of the numbers, each a list of their names joined by colons."""

    def usage(self, name: str) -> str:
        """Return every permitted form of the name."""
        return ", ".join(f"{name}:{form}" if form else name for form in self.forms)


SPLIT: Final = ("", "P:D")
RESTARTED: Final = ("", "P:D", "P:D:START_S")

RIVALS: Final[Mapping[str, RivalKind]] = MappingProxyType(
    {
        "static": RivalKind(static_split, ("P:D",)),
        "aggregated": RivalKind(aggregated, ("", "BUDGET_TOKENS")),
        "arrow": RivalKind(arrow, SPLIT),
        "dynamo-load": RivalKind(partial(dynamo, "load"), RESTARTED),
        "dynamo-throughput": RivalKind(partial(dynamo, "throughput"), RESTARTED),
        "dynamo-both": RivalKind(partial(dynamo, "both"), RESTARTED),
        "llm-d": RivalKind(llm_d, RESTARTED),
        "llm-d-throughput": RivalKind(partial(llm_d, throughput=True), RESTARTED),
        "niyama": RivalKind(niyama, ("",)),
        "taichi": RivalKind(taichi, ("", "P:D", "P:D:BUDGET_TOKENS")),
    }
)


def rival(name: str) -> Rival:
    """Return the rival with this name; raise InvalidRequest that lists all names if there is none."""
    kind_name, *numbers = name.split(":")
    kind = RIVALS.get(kind_name)
    if kind is None or not any(len(numbers) == len(form.split(":") if form else []) for form in kind.forms):
        raise InvalidRequest(f"no rival {name!r}; there are: {names()}")
    if not all(number.isascii() and number.isdigit() and len(number) < 10 and int(number) for number in numbers):
        raise InvalidRequest(f"{name!r} has whole numbers above 0 after its colons; there are: {names()}")
    return kind.make(*(int(number) for number in numbers))


def names() -> str:
    """Return the forms in which each rival can be named."""
    return ", ".join(kind.usage(name) for name, kind in RIVALS.items())


def every_split(workers: int) -> list[Rival]:
    """Return every static split of `workers`; the best in hindsight is the one to beat."""
    return [static_split(prefill, workers - prefill) for prefill in range(1, workers)]
