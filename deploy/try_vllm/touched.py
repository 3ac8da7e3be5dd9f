"""A name of vLLM that this project touches, and how."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The way in which a name is used, which decides what must exist."""

    NAME = "name"
    """A module, class, function, constant, or an attribute of one."""
    CALL = "call"
    """A function, method or class that takes the given arguments."""
    OVERRIDE = "override"
    """A method that a subclass here replaces, with the same arguments, and that vLLM itself calls."""
    TEXT = "text"
    """A string that occurs as a constant in a module, or in any of a package."""
    METRIC = "metric"
    """A metric that vLLM defines; its library adds `_total` to the name of a counter."""
    STAND_IN = "stand-in"
    """An object of this project that vLLM stores in an attribute. It has all that vLLM uses of it."""
    FILE = "file"
    """A file of the wheel, compiled modules among them, by the beginning of its path."""


WITH_TEXT = frozenset({Kind.TEXT, Kind.METRIC, Kind.STAND_IN})


@dataclass(frozen=True, slots=True)
class CallArguments:
    positional: int = 0
    names: tuple[str, ...] = ()
    partly: bool = False
    """True if there are more, from * or **."""

    def __str__(self) -> str:
        return f"({', '.join(['_'] * self.positional + [f'{each}=' for each in self.names] + ['...'] * self.partly)})"


@dataclass(frozen=True, slots=True)
class Touched:
    name: str
    """The dotted name. For a TEXT the module or package, for a FILE the beginning of its path."""
    kind: Kind
    where: str
    """Our file, and its line where it is known."""
    arguments: CallArguments | None = None
    text: str = ""
    """The string of a TEXT or METRIC, our class of an OVERRIDE, the attribute of a STAND_IN."""
    optional: bool = False
    """True if our code does without it."""

    def __str__(self) -> str:
        what = (
            self.name if self.kind in {Kind.NAME, Kind.CALL, Kind.OVERRIDE, Kind.FILE} else f"{self.name}: {self.text}"
        )
        return f"{self.kind.value:8}  {what}{self.arguments or ''}{' (optional)' * self.optional}  {self.where}"
