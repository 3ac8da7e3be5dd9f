"""Facts about observed servers that status and verdict use besides telemetry."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.policy.verdict.late import Punctuality
from libs.policy.verdict.state import PodLabel
from libs.telemetry.gateways import AwaitedTokens
from services.metrics.requests import RequestsReport
from services.metrics.status.traffic import Traffic


@dataclass(frozen=True, slots=True)
class ObservedServerStatus:
    """An observed server; texts are empty if unknown."""

    name: str
    url: str
    role: str
    model: str
    state: str
    """One of unknown, learning, observed, exact, away and foreign."""
    trouble: str
    """The reason why nothing is known about the server; empty otherwise."""
    since_unix_ms: int
    restarts: int
    """The number of times that the server's counters restarted since it was first observed."""


@dataclass(frozen=True, slots=True)
class ObservedFleetStatus:
    servers: list[ObservedServerStatus]
    trouble: str
    """The reason why the list of servers may be out of date; empty if it is current."""


class TrafficSource(Protocol):
    """Recent traffic: the log of finished requests, or the counters of observed servers."""

    def take(self, event: RequestEvent, now_ns: int) -> None: ...

    def traffic(self, now_ns: int, awaited: Iterable[tuple[int, int]] = ()) -> Traffic: ...

    def cache_hit(self, model: str, now_ns: int) -> float: ...

    def late(self, model: str, now_ns: int, span_ns: int) -> Punctuality:
        """Return the number of first tokens in a span, and the number of those that were late."""
        ...

    def ended(self, model: str, now_ns: int, span_ns: int) -> int:
        """Return the number of requests with a first token that ended in a span."""
        ...

    def slow(self, model: str, now_ns: int, span_ns: int) -> Punctuality:
        """Return the number of answers that ended in a span, and the number of those that exceeded their TPOT."""
        ...

    def prompt_lengths(self, model: str, now_ns: int) -> tuple[float, float]:
        """Return the mean prompt length, and the ratio of the mean by tokens to it; (0, 1) without requests."""
        ...

    def mean_output_tokens(self, model: str, now_ns: int) -> float: ...

    def refused_tokens_per_s(self, model: str, now_ns: int, span_ns: int) -> float: ...

    def targets_ns(self, model: str) -> tuple[int, int]:
        """Return the usual TTFT limit and TPOT target; 0 where there is none."""
        ...

    def requested_targets_ns(self) -> dict[str, tuple[int, int]]: ...


class ObservedTrafficSource(TrafficSource, Protocol):
    def tpot_ms(self, model: str, now_ns: int) -> float | None:
        """Return the mean time between tokens over the last two seconds; None without tokens."""
        ...

    def report(
        self, end_ns: int, window_ns: int, awaited: Mapping[str, AwaitedTokens] = MappingProxyType({})
    ) -> RequestsReport:
        """Summarise the requests that ended in a window."""
        ...


class ObservedView(Protocol):
    """Observed servers, which replace a suite."""

    @property
    def traffic(self) -> ObservedTrafficSource: ...

    @property
    def pod_label(self) -> PodLabel | None:
        """The label with the role of servers that are pods; None for servers that are not."""
        ...

    @property
    def look_every_ns(self) -> int:
        """The minimum time between two evaluations."""
        ...

    def status(self) -> ObservedFleetStatus: ...

    def roles_differ(self, models: Sequence[str]) -> frozenset[str]:
        """Return the models whose servers do not all serve both phases, so that roles can be changed."""
        ...
