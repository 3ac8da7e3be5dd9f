"""The planner's mode in words, and the port to where it outlives a restart."""

from types import MappingProxyType
from typing import Final, Literal, Protocol

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_ADVISORY, MODE_AUTO, MODE_OFF, Mode

ModeWord = Literal["off", "advisory", "auto"]
MODES: Final = MappingProxyType({"off": MODE_OFF, "advisory": MODE_ADVISORY, "auto": MODE_AUTO})


def mode_word(mode: Mode) -> str:
    """off, advisory, auto, ..."""
    return Mode.Name(mode).removeprefix("MODE_").lower()


class ModeStore(Protocol):
    """Remembers the mode. Without it a mode holds until the planner restarts."""

    async def load(self) -> Mode | None:
        """What was last kept; None when nothing was, or the store is away."""
        ...

    async def keep(self, mode: Mode) -> bool:
        """Remember a mode; whether that worked."""
        ...
