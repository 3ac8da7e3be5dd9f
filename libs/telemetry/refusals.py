"""Recently refused requests by HTTP status and error code, from the reports of gateways."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues
from libs.policy.newest import put_newest
from libs.telemetry.gateways import MAX_GATEWAYS, OLD_NS, SILENT_NS

MAX_REASONS: Final = 33
"""The maximum number of reasons taken from one report: 32, and the row of all others."""
MAX_CODE_CHARS: Final = 64
RATE_NS: Final = 2_000_000_000
"""The time that rates average, several reports."""
WINDOW_NS: Final = 10_000_000_000
"""The time for which counts are kept."""
SAMPLE_NS: Final = 250_000_000
"""The minimum time between two kept samples, which bounds them to about fifty per gateway."""

Reason = tuple[int, str]
"""The HTTP status and error code of a refusal."""


@dataclass(frozen=True, slots=True)
class RefusedTraffic:
    """The requests of all gateways in the last `span_ns`."""

    span_ns: int
    requests: int
    """The number of POST requests that arrived."""
    refused: Mapping[Reason, int]

    def per_s(self, count: int) -> float:
        return count * 1e9 / max(self.span_ns, 1)


class _RefusalSample(NamedTuple):
    reported_unix_ns: int
    requests: int
    refused: Mapping[Reason, int]


@dataclass(slots=True)
class _GatewayRefusals:
    incarnation: int
    samples: "deque[_RefusalSample]"
    arrived_ns: int = 0


class RefusalLog:
    """The counts of all gateways over the last window. The one silent for longest is dropped if there are too many."""

    def __init__(self) -> None:
        self._gateways: OrderedDict[str, _GatewayRefusals] = OrderedDict()

    def take(self, message: GatewayQueues, now_ns: int) -> None:
        """Record a report received at `now_ns`. A gateway that restarted counts from zero again."""
        if message.told_unix_ns < now_ns - OLD_NS:
            return
        known = self._gateways.pop(message.gateway_id, None)
        if message.last:
            return
        if known is None or known.incarnation < message.incarnation:
            known = _GatewayRefusals(message.incarnation, deque())
        put_newest(self._gateways, message.gateway_id, known, MAX_GATEWAYS)
        samples, reported_ns = known.samples, message.told_unix_ns
        if known.incarnation > message.incarnation or (samples and samples[-1].reported_unix_ns >= reported_ns):
            return
        known.arrived_ns = now_ns
        if len(samples) > 1 and reported_ns < samples[-2].reported_unix_ns + SAMPLE_NS:
            samples.pop()
        refused: Mapping[Reason, int] = {
            (each.status, each.code[:MAX_CODE_CHARS]): each.count for each in message.refused[:MAX_REASONS]
        }
        if samples and samples[-1].refused == refused:
            refused = samples[-1].refused  # the usual case, in which all samples share one object
        samples.append(_RefusalSample(reported_ns, message.posts, refused))
        # One sample from before the window stays, so that the window is complete.
        while len(samples) > 2 and samples[1].reported_unix_ns <= reported_ns - WINDOW_NS:
            samples.popleft()

    def recent(self, now_ns: int, span_ns: int = RATE_NS) -> RefusedTraffic:
        """Return the refusals within `span_ns`, at most `WINDOW_NS`, before the last report of each live gateway."""
        requests, refused, longest_ns = 0, Counter[Reason](), 0
        for gateway in self._gateways.values():
            samples = gateway.samples
            if len(samples) < 2 or gateway.arrived_ns <= now_ns - SILENT_NS:
                continue
            last = samples[-1]
            before = (each for each in reversed(samples) if each.reported_unix_ns <= last.reported_unix_ns - span_ns)
            first = next(before, samples[0])
            longest_ns = max(longest_ns, last.reported_unix_ns - first.reported_unix_ns)
            requests += max(last.requests - first.requests, 0)
            for reason, count in last.refused.items():
                refused[reason] += max(count - first.refused.get(reason, 0), 0)
        found = {reason: count for reason, count in refused.items() if count}
        return RefusedTraffic(longest_ns, max(requests, sum(found.values())), found)
