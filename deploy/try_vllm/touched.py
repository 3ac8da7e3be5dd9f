"""A name of vLLM that this project uses, and the kind of use."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of use of a name, which decides what must exist in vLLM."""

    NAME = "name"
    """A module, class, function, constant, or an attribute of one."""
    CALL = "call"
    """A function, method or class that takes the given arguments."""
    OVERRIDE = "override"
    """A method that a subclass here replaces with the same arguments, and that vLLM itself calls."""
    TEXT = "text"
    """A string constant in a module, or in any module of a package."""
    METRIC = "metric"
    """A metric that vLLM defines. The Prometheus library adds `_total` to the name of a counter."""
    STAND_IN = "stand-in"
    """An object of this project that vLLM stores in an attribute. It must have all members that vLLM uses."""
    FILE = "file"
    """A file of the wheel, which may be a compiled module, by the beginning of its path."""


WITH_TEXT = frozenset({Kind.TEXT, Kind.METRIC, Kind.STAND_IN})


@dataclass(frozen=True, slots=True)
class CallArguments:
    positional: int = 0
    names: tuple[str, ...] = ()
    partly: bool = False
    """True if there are further arguments, from * or **."""

    def __str__(self) -> str:
        return f"({', '.join(['_'] * self.positional + [f'{each}=' for each in self.names] + ['...'] * self.partly)})"


@dataclass(frozen=True, slots=True)
class Touched:
    name: str
    """The dotted name. For a TEXT it is the module or package, for a FILE the beginning of its path."""
    kind: Kind
    where: str
    """Our file, with the line if it is known."""
    arguments: CallArguments | None = None
    text: str = ""
    """The string of a TEXT or METRIC, our class of an OVERRIDE, or the attribute of a STAND_IN; otherwise empty."""
    optional: bool = False
    """True if our code also works without the name."""

    def __str__(self) -> str:
        what = (
            self.name if self.kind in {Kind.NAME, Kind.CALL, Kind.OVERRIDE, Kind.FILE} else f"{self.name}: {self.text}"
        )
        return f"{self.kind.value:8}  {what}{self.arguments or ''}{' (optional)' * self.optional}  {self.where}"
