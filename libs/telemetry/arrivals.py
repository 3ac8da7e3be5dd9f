"""How many prompt tokens come a second, by model, from what gateways have counted. Pure."""

from collections import deque
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues
from libs.telemetry.gateways import MAX_GATEWAYS, MAX_MODELS, SILENT_NS

SPAN_NS: Final = 2_500_000_000
"""What a rate is of; before a gateway's first message nothing came."""
BURST_NS: Final = 600_000_000
BURST_SHARE: Final = 0.6
"""Where as much of what came in a span came within `BURST_NS`, it was a burst, and tells nothing of what is to come."""
MAX_SAMPLES: Final = 64
"""Of one gateway: twice what it tells in the span."""

_Sample = tuple[int, dict[str, int]]


class _Gateway:
    """What one gateway counted, over the last span."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.heard_ns = 0
        self.samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)


class ArrivalRates:
    """Counts of all gateways over time; the longest silent gateway goes."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Gateway] = {}

    def take(self, message: GatewayQueues, now_ns: int) -> None:
        """Enter a message that came at `now_ns`; a gateway that restarted counts anew."""
        key, reported_ns = message.gateway_id, message.told_unix_ns
        known = self._gateways.pop(key, None)
        if message.last:
            return
        if known is None or known.incarnation < message.incarnation:
            known = _Gateway(message.incarnation)
        if len(self._gateways) >= MAX_GATEWAYS:
            del self._gateways[next(iter(self._gateways))]
        self._gateways[key] = known
        if known.incarnation > message.incarnation or (known.samples and known.samples[-1][0] >= reported_ns):
            return
        known.heard_ns = now_ns
        counted = {each.model: each.arrived_tokens for each in message.queues[:MAX_MODELS]}
        known.samples.append((reported_ns, counted))
        # One sample from before the span stays, so that the span is whole.
        while len(known.samples) > 2 and known.samples[1][0] <= reported_ns - SPAN_NS:
            known.samples.popleft()

    def tokens_per_s(self, model: str, now_ns: int) -> float:
        """Over the last span, of gateways that are heard; the first requests for a model count from its gateway's
        last message without any."""
        return sum(_rate(each.samples, model) for each in self._gateways.values() if each.heard_ns > now_ns - SILENT_NS)


def _rate(samples: "deque[_Sample]", model: str) -> float:
    if len(samples) < 2:
        return 0.0
    counted = [(reported_ns, counts.get(model, 0)) for reported_ns, counts in samples]
    (first_ns, first), (last_ns, last) = counted[0], counted[-1]
    came = max(last - first, 0)
    burst = _largest_burst(counted)
    lasting = came - burst if burst > BURST_SHARE * came else came
    return lasting * 1e9 / max(last_ns - first_ns, SPAN_NS)


def _largest_burst(counted: list[tuple[int, int]]) -> int:
    """The most that came within `BURST_NS`, or between two messages that are further apart."""
    most = begin = 0
    for end in range(1, len(counted)):
        while begin < end - 1 and counted[end][0] - counted[begin][0] > BURST_NS:
            begin += 1
        most = max(most, counted[end][1] - counted[begin][1])
    return most
