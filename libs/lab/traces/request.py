"""One request of a trace, whichever file or generator it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Counts in place of tokens. `number` is its place in the trace."""

    number: int
    arrival_ns: int
    """From the start of the trace. For a later turn of a session that is replayed closed-loop: its arrival in the
    trace, which only says where it stands among others."""
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] = ()
    """Keys of the prompt's blocks, in order, each chained to those before it: equal ids at equal places are equal
    prefixes. Empty: the prompt shares nothing."""
    max_output_tokens: int = 0
    """What the client allowed; 0: not known, taken for `output_tokens`."""
    model: str = ""
    tenant: str = ""
    service_class: str = ""
    """Requests of one class are scored together, e.g. "chat", "long-prompt"."""
    session: int = 0
    """Of a conversation; 0: none."""
    turn: int = 0
    """Within the session, from 0."""
    think_ns: int = 0
    """From the end of the turn before to this one's arrival."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: Sequence[TraceRequest]
    block_tokens: int = 0
    """Prompt tokens behind one hash id; 0: no request has any."""
    notes: Sequence[str] = field(default_factory=tuple)
    """What a reader should know: how arrivals were spread, what was left out, each a sentence."""

    @property
    def duration_ns(self) -> int:
        """First to last arrival; 0 with fewer than two requests."""
        return self.requests[-1].arrival_ns - self.requests[0].arrival_ns if self.requests else 0
