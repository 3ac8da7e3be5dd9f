"""The requests of a trace, independent of the file or generator they came from."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request with token counts instead of tokens. `number` is its index in the trace."""

    number: int
    arrival_ns: int
    """Arrival in ns from the start of the trace. A closed-loop replay uses it only to order the later turns of
    sessions.
    """
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] = ()
    """Keys of the prompt's blocks in order, each chained to the previous ones. Equal ids at equal indices are equal
    prefixes; an empty sequence shares nothing.
    """
    max_output_tokens: int = 0
    """The output limit that the client set; 0 if unknown, in which case `output_tokens` is used."""
    model: str = ""
    tenant: str = ""
    service_class: str = ""
    """The group in which the request is scored, e.g. "chat" or "long-prompt"."""
    session: int = 0
    """The id of the request's conversation; 0 for a request that stands alone."""
    turn: int = 0
    """The index of the turn within its session, counted from 0."""
    think_ns: int = 0
    """The time from the end of the previous turn to this arrival."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace in order of arrival."""

    name: str
    requests: Sequence[TraceRequest]
    block_tokens: int = 0
    """The prompt tokens behind one hash id; 0 if no request has hash ids."""
    notes: Sequence[str] = field(default_factory=tuple)
    """Remarks for readers, one sentence each, such as how arrivals were spread or which requests were left out."""

    @property
    def duration_ns(self) -> int:
        """The time from first to last arrival; 0 with fewer than two requests."""
        return self.requests[-1].arrival_ns - self.requests[0].arrival_ns if self.requests else 0
