"""The knowledge about observed servers that status and verdict have beside their telemetry."""

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
    """An observed server; texts are empty where nothing is known."""

    name: str
    url: str
    role: str
    model: str
    state: str
    """One of unknown, learning, observed, exact, away and foreign."""
    trouble: str
    """The reason why nothing is known of it; empty if something is."""
    since_unix_ms: int
    restarts: int
    """The number of times that its counters have begun anew since it is observed."""


@dataclass(frozen=True, slots=True)
class ObservedFleetStatus:
    servers: list[ObservedServerStatus]
    trouble: str
    """The reason why the list of servers may be out of date; empty if it is not."""


class TrafficSource(Protocol):
    """Recent traffic: the log of finished requests, or the counters of observed servers."""

    def take(self, event: RequestEvent, now_ns: int) -> None: ...

    def traffic(self, now_ns: int, awaited: Iterable[tuple[int, int]] = ()) -> Traffic: ...

    def cache_hit(self, model: str, now_ns: int) -> float: ...

    def late(self, model: str, now_ns: int, span_ns: int) -> Punctuality:
        """Return how many first tokens came in a span, and how many of them too late."""
        ...

    def ended(self, model: str, now_ns: int, span_ns: int) -> int:
        """Return how many requests that had a first token ended in a span."""
        ...

    def slow(self, model: str, now_ns: int, span_ns: int) -> Punctuality:
        """Return how many answers ended in a span, and how many of them were over their TPOT."""
        ...

    def prompt_lengths(self, model: str, now_ns: int) -> tuple[float, float]:
        """Return the mean prompt length, and the mean by tokens over it; (0, 1) without requests."""
        ...

    def mean_output_tokens(self, model: str, now_ns: int) -> float: ...

    def refused_tokens_per_s(self, model: str, now_ns: int, span_ns: int) -> float: ...

    def targets_ns(self, model: str) -> tuple[int, int]:
        """Return the usual TTFT limit and TPOT target; 0 where there is none."""
        ...

    def asked_targets_ns(self) -> dict[str, tuple[int, int]]: ...


class ObservedTrafficSource(TrafficSource, Protocol):
    def tpot_ms(self, model: str, now_ns: int) -> float | None:
        """Return the mean time between tokens over the last two seconds; None without any."""
        ...

    def report(
        self, end_ns: int, window_ns: int, awaited: Mapping[str, AwaitedTokens] = MappingProxyType({})
    ) -> RequestsReport:
        """Summarise the requests that ended in a window."""
        ...


class ObservedView(Protocol):
    """Observed servers, which take the place of a suite."""

    @property
    def traffic(self) -> ObservedTrafficSource: ...

    @property
    def pod_label(self) -> PodLabel | None:
        """The label with the role of servers that are pods; None if they are none."""
        ...

    @property
    def look_every_ns(self) -> int:
        """The least time between two evaluations."""
        ...

    def status(self) -> ObservedFleetStatus: ...

    def roles_differ(self, models: Sequence[str]) -> frozenset[str]:
        """Return those of the models whose servers do not all do both phases, so that roles can be changed."""
        ...
