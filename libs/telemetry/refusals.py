"""Rate of requests that gateways refuse at full queues, from the counts that they report. Pure.

A gateway with a full queue refuses before it knows a prompt's length, so nothing else shows these requests. A
retried request counts once.
"""

from collections import Counter, deque
from typing import Final

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandTotals
from libs.telemetry.gateways import MAX_GATEWAYS

SPAN_NS: Final = 4_000_000_000
"""The time that a rate averages, twice the interval between messages."""
HEARD_NS: Final = 10_000_000_000
"""The silence after which a gateway no longer counts."""


class Refusals:
    """Counts of all gateways over the last span. The gateway that has been silent longest is dropped when there are
    too many.
    """

    def __init__(self) -> None:
        self._gateways: dict[tuple[str, int], deque[tuple[int, Counter[str]]]] = {}

    def take(self, message: DemandTotals) -> None:
        """Record a gateway's counts since its start."""
        key = (message.gateway_id, message.incarnation)
        samples = self._gateways.pop(key, deque())
        if message.last:
            return
        if len(self._gateways) >= MAX_GATEWAYS:
            del self._gateways[next(iter(self._gateways))]
        self._gateways[key] = samples
        told_ns = message.told_unix_ns
        if samples and samples[-1][0] >= told_ns:
            return
        refused = Counter[str]()
        for each in message.counts:
            if each.service_class != BATCH_CLASS:
                refused[each.model] += each.queue_full
        samples.append((told_ns, refused))
        while len(samples) > 2 and samples[1][0] <= told_ns - SPAN_NS:
            samples.popleft()

    def per_s(self, model: str, now_ns: int) -> float:
        """Return the refused requests per second of one model."""
        rate = 0.0
        for samples in self._gateways.values():
            if len(samples) < 2 or samples[-1][0] <= now_ns - HEARD_NS:
                continue
            (first_ns, first), (last_ns, last) = samples[0], samples[-1]
            rate += max(last[model] - first[model], 0) * 1e9 / (last_ns - first_ns)
        return rate

    def total_per_s(self, now_ns: int) -> float:
        """Return the refused requests per second of all models."""
        models = {model for samples in self._gateways.values() for model in samples[-1][1]}
        return sum(self.per_s(model, now_ns) for model in models)
