"""Queue lengths and arrival rates from the reports of gateways. Their number is bounded, and silent ones are
dropped.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import sqrt
from typing import Final, NamedTuple

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandTotals
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue
from libs.policy.newest import put_newest
from libs.telemetry.recent import RecentCounts, recent_sums

SILENT_NS: Final = 2_000_000_000
"""The time without a report after which a gateway and its queue count as gone, while other gateways report."""
# Gateways report every 0.2 s, or every 0.6 s while idle.
GONE_NS: Final = 60_000_000_000
"""The time without any report after which no gateway is assumed to exist. Until then, queue lengths are unknown."""
OLD_NS: Final = 30_000_000_000
"""The age at which a report counts as outdated, for example after a replay by the broker."""
MAX_GATEWAYS: Final = 256
"""The maximum number of gateways that are tracked; the one that has been silent longest is dropped."""
MAX_MODELS: Final = 64
"""The maximum number of models taken from one gateway's report."""
MAX_AGES: Final = 12
"""The maximum number of age classes taken for one model of a report."""
MAX_AGE_MS: Final = 86_400_000
"""The bound on the waiting time of a request; longer waits are clipped."""
MAX_AWAITED: Final = 100_000
"""The bound on the requests in one age class; more are clipped."""
NS_PER_MS: Final = 1_000_000
MAX_TOKENS: Final = 2**40
"""The bound on the tokens of one gateway and model; higher counts are clipped."""


class ModelBacklog(NamedTuple):
    """The queue of one model, summed over all gateways."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    decode_prompt_tokens: int = 0
    """The tokens that requests waiting for decode still have to compute once they get a slot."""
    hopeful_tokens: int = 0
    """Prompt tokens of requests that can still meet their deadline; all tokens if a gateway does not report it."""
    batch_requests: int = 0
    """Waiting requests that are lines of batch jobs."""
    batch_tokens: int = 0
    """Prompt tokens of those lines, a part of `hopeful_tokens`."""
    batch_bound: int = 0
    """Lines of batch jobs that workers hold."""
    images: int = 0
    """The images of prompts in `prompt_tokens`."""

    @property
    def prompt_tokens(self) -> int:
        return self.prefill_tokens + self.decode_prompt_tokens

    @property
    def mean_prompt_tokens(self) -> float:
        """The mean length of the waiting prompts; 0 if none wait."""
        return self.prompt_tokens / max(self.prefill_requests + self.decode_requests, 1)

    @property
    def images_per_token(self) -> float:
        return self.images / self.prompt_tokens if self.prompt_tokens else 0.0

    def plus(self, queue: ModelQueue) -> "ModelBacklog":
        """Return the sum of this backlog and one gateway's queue."""
        tokens = queue.hopeful_tokens if queue.HasField("hopeful_tokens") else MAX_TOKENS
        every = min(queue.prefill_tokens, MAX_TOKENS) + min(queue.decode_prompt_tokens, MAX_TOKENS)
        return ModelBacklog(
            self.prefill_requests + queue.prefill_requests,
            self.prefill_tokens + min(queue.prefill_tokens, MAX_TOKENS),
            self.decode_requests + queue.decode_requests,
            self.decode_prompt_tokens + min(queue.decode_prompt_tokens, MAX_TOKENS),
            self.hopeful_tokens + min(tokens, every),
            self.batch_requests + queue.batch_requests,
            self.batch_tokens + min(queue.batch_tokens, MAX_TOKENS),
            self.batch_bound + queue.batch_bound,
            self.images + min(queue.images, MAX_TOKENS),
        )


class AwaitedTokens(NamedTuple):
    """Interactive requests of one model without a first token, at gateways and workers."""

    ages: tuple[tuple[int, int], ...] = ()
    """Pairs of (time since arrival in ns, requests): a mean for those of about the same age."""
    overdue: int = 0
    """The number of requests whose first token is overdue."""

    @property
    def requests(self) -> int:
        return sum(count for _, count in self.ages)

    def plus(self, other: "AwaitedTokens") -> "AwaitedTokens":
        return AwaitedTokens(self.ages + other.ages, self.overdue + other.overdue)


class _Report(NamedTuple):
    received_ns: int
    incarnation: int
    reported_unix_ns: int
    queues: tuple[ModelQueue, ...]


class GatewayReports:
    def __init__(self) -> None:
        self._latest: OrderedDict[str, _Report] = OrderedDict()

    def take(self, message: GatewayQueues, now_ns: int) -> None:
        """Record a message received at `now_ns`; a message older than the newest changes nothing."""
        if message.told_unix_ns < now_ns - OLD_NS:
            return
        key, known = message.gateway_id, self._latest.get(message.gateway_id)
        age = message.incarnation, message.told_unix_ns
        if (
            known is not None
            and age < (known.incarnation, known.reported_unix_ns)
            and now_ns < known.received_ns + SILENT_NS
        ):
            return
        self._latest.pop(key, None)
        if message.last:
            return
        put_newest(self._latest, key, _Report(now_ns, *age, tuple(message.queues[:MAX_MODELS])), MAX_GATEWAYS)

    def waiting(self, now_ns: int) -> dict[str, ModelBacklog] | None:
        """Return the backlog of each model with waiting requests; None if gateways exist but none reports."""
        newest_ns = self._newest_ns()
        if newest_ns is None or now_ns > newest_ns + GONE_NS:
            return {}
        if now_ns > newest_ns + SILENT_NS:
            return None
        return _by_model(queue for report in self._live(newest_ns) for queue in report.queues)

    def awaited(self, now_ns: int) -> dict[str, AwaitedTokens]:
        """Return the number of requests that wait for a first token, by model; empty while no gateway reports."""
        newest_ns, found = self._newest_ns(), dict[str, AwaitedTokens]()
        if newest_ns is None or now_ns > newest_ns + SILENT_NS:
            return found
        for report in self._live(newest_ns):
            since_ns = max(now_ns - report.received_ns, 0)
            for queue in report.queues:
                if not queue.awaited:
                    continue
                ages = tuple(
                    (min(each.mean_ms, MAX_AGE_MS) * NS_PER_MS + since_ns, min(each.requests, MAX_AWAITED))
                    for each in queue.awaited[:MAX_AGES]
                )
                own = AwaitedTokens(ages, min(queue.overdue, sum(count for _, count in ages)))
                found[queue.model] = found.get(queue.model, AwaitedTokens()).plus(own)
        return found

    def _live(self, newest_ns: int) -> Iterator[_Report]:
        return (report for report in self._latest.values() if report.received_ns > newest_ns - SILENT_NS)

    def waiting_tokens(self, now_ns: int) -> int:
        """Return the waiting prompt tokens of all models; 0 if no gateway reports."""
        return sum(each.prompt_tokens for each in (self.waiting(now_ns) or {}).values())

    def _newest_ns(self) -> int | None:
        return next(reversed(self._latest.values())).received_ns if self._latest else None


def _by_model(queues: Iterable[ModelQueue]) -> dict[str, ModelBacklog]:
    found: dict[str, ModelBacklog] = {}
    for queue in queues:
        found[queue.model] = found.get(queue.model, ModelBacklog()).plus(queue)
    return {model: waiting for model, waiting in found.items() if any(waiting)}


# A few requests a second determine their rate poorly within two seconds: twelve requests are off by a third in every
# other sample. An arrival rate therefore averages up to four spans. It reaches back as long as each older span agrees
# statistically with all newer ones. A gateway with a full queue refuses requests before it knows a prompt's length, so
# only its counts show them. A retried request counts once.
SPAN_NS: Final = 2_500_000_000
"""The shortest time that a rate averages. No arrivals are assumed before a gateway's first message."""
MOST_SPANS: Final = 4
ALIKE: Final = 2.5
"""The number of standard errors by which an older span may differ from the newer ones. A lower bound would mistake
chance for change.
"""
ALIKE_SHARE: Final = 0.05
"""The share of the newer rate by which an older span may always differ, whatever the standard error."""
WHOLE: Final = 0.8
"""The fraction of an older span for which a gateway must have reported."""
BURST_NS: Final = 600_000_000
BURST_SHARE: Final = 0.6
"""The share of two spans' tokens that counts as a burst if it arrived within `BURST_NS`. Rates exclude bursts, which
predict nothing. Measured on a single span, two requests a second would count as a burst in every other sample.
"""
MAX_SAMPLES: Final = 256
"""The maximum number of samples of one gateway, twice those of all spans at ten messages a second."""

_Sample = tuple[int, dict[str, int], dict[str, int]]
"""The time of a gateway's message, with the tokens and images that had arrived by then, by model."""
_Count = tuple[int, int]
"""A pair of a time in ns and the tokens that had arrived by then."""


class Rate(NamedTuple):
    """A rate in tokens per second with its standard error."""

    tokens_per_s: float = 0.0
    error: float = 0.0


class _Gateway:
    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.received_ns = 0
        self.samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)


class ArrivalRates:
    """Token counts of all gateways over time. The gateway that has been silent longest is dropped when there are too
    many.
    """

    def __init__(self) -> None:
        self._gateways: OrderedDict[str, _Gateway] = OrderedDict()

    def take(self, message: GatewayQueues, now_ns: int) -> None:
        """Record a message received at `now_ns`. A gateway that restarted counts from zero again."""
        key, reported_ns = message.gateway_id, message.told_unix_ns
        known = self._gateways.pop(key, None)
        if message.last:
            return
        if known is None or known.incarnation < message.incarnation:
            known = _Gateway(message.incarnation)
        put_newest(self._gateways, key, known, MAX_GATEWAYS)
        if known.incarnation > message.incarnation or (known.samples and known.samples[-1][0] >= reported_ns):
            return
        known.received_ns = now_ns
        counted = {each.model: each.arrived_tokens for each in message.queues[:MAX_MODELS]}
        images = {
            each.model: each.arrived_images for each in message.queues[:MAX_MODELS] if each.HasField("arrived_images")
        }
        known.samples.append((reported_ns, counted, images))
        # One sample from before the spans stays, so that the oldest span is complete.
        while len(known.samples) > 2 and known.samples[1][0] <= reported_ns - MOST_SPANS * SPAN_NS:
            known.samples.popleft()

    def rate(self, model: str, now_ns: int) -> Rate:
        """Return the rate over all gateways that still report.

        A model's first requests are counted from the last message of their gateway without any.
        """
        rates = [
            _rate(each.samples, model) for each in self._gateways.values() if each.received_ns > now_ns - SILENT_NS
        ]
        return Rate(sum(each.tokens_per_s for each in rates), sqrt(sum(each.error**2 for each in rates)))

    def images_per_token(self, model: str, now_ns: int) -> float | None:
        """Return the images per prompt token of recent arrivals; None if no gateway counts them."""
        found = [each.samples for each in self._gateways.values() if each.received_ns > now_ns - SILENT_NS]
        ends = [(each[0], each[-1]) for each in found if len(each) > 1 and model in each[-1][2]]
        if not ends:
            return None
        images = sum(max(last[2][model] - first[2].get(model, 0), 0) for first, last in ends)
        tokens = sum(max(last[1].get(model, 0) - first[1].get(model, 0), 0) for first, last in ends)
        return images / tokens if tokens else 0.0


class ImageArrivals:
    """The prompt tokens and images that have arrived at each gateway. The gateway that has been silent longest is
    dropped when there are too many.
    """

    def __init__(self) -> None:
        self._gateways: OrderedDict[tuple[str, int], _CountedArrivals] = OrderedDict()
        """The counts of each gateway and incarnation that counts images."""

    def take(self, message: GatewayQueues, now_ns: int) -> None:
        """Record a gateway's counts; a message without counts of images changes nothing."""
        counted = [each for each in message.queues[:MAX_MODELS] if each.HasField("arrived_images")]
        if not counted:
            return
        key = (message.gateway_id, message.incarnation)
        known = self._gateways.get(key)
        if known is None:
            known = _CountedArrivals()
        elif known.told_unix_ns > message.told_unix_ns:
            return
        known.told_unix_ns = message.told_unix_ns
        put_newest(self._gateways, key, known, MAX_GATEWAYS)
        for queue in counted:
            counts = known.models.get(queue.model) or RecentCounts()
            counts.add(now_ns, queue.arrived_tokens, queue.arrived_images)
            put_newest(known.models, queue.model, counts, MAX_MODELS)

    def per_token(self, model: str, now_ns: int) -> float:
        """Return the images per prompt token of the last day, or of all arrivals if it had none; 0 if unknown."""
        found = [each.models.get(model) for each in list(self._gateways.values())]
        tokens, images = recent_sums((each for each in found if each is not None), now_ns)
        return images / tokens if tokens else 0.0


class _CountedArrivals:
    def __init__(self) -> None:
        self.told_unix_ns = 0
        self.models: OrderedDict[str, RecentCounts] = OrderedDict()


def _rate(samples: "deque[_Sample]", model: str) -> Rate:
    if len(samples) < 2:
        return Rate()
    counted = [(reported_ns, counts.get(model, 0)) for reported_ns, counts, _ in samples]
    last_ns = counted[-1][0]
    parts = [
        _part(counted, last_ns - SPAN_NS * (number + 1), last_ns - SPAN_NS * number) for number in range(MOST_SPANS)
    ]
    tokens = [part[-1][1] - part[0][1] if len(part) > 1 else 0 for part in parts]
    came, whole = _lasting(parts[0], sum(tokens[:2]))
    rate, spans = came * 1e9 / max(parts[0][-1][0] - parts[0][0][0], SPAN_NS), 1
    for number in range(1, MOST_SPANS):
        part = parts[number]
        if not whole or len(part) < 2 or part[-1][0] - part[0][0] < WHOLE * SPAN_NS:
            break
        older, whole = _lasting(part, sum(tokens[number - 1 : number + 1]))
        older_rate = older * 1e9 / (part[-1][0] - part[0][0])
        error = sqrt(_variance(counted, part[0][0]) * (1 / spans + 1) * 1e9 / SPAN_NS)
        if not whole or not older or abs(older_rate - rate) > max(ALIKE * error, ALIKE_SHARE * rate):
            break
        rate, spans = (rate * spans + older_rate) / (spans + 1), spans + 1
    return Rate(rate, sqrt(_variance(counted, last_ns - spans * SPAN_NS) * 1e9 / (spans * SPAN_NS)))


def _part(counted: list[_Count], begin_ns: int, end_ns: int) -> list[_Count]:
    """Return the samples of a span and the last one before it, if there is one.

    With fewer than two samples, nothing is known about the span.
    """
    upto = [each for each in counted if each[0] <= end_ns]
    first = max((number for number, each in enumerate(upto) if each[0] <= begin_ns), default=0)
    return upto[first:]


def _lasting(part: list[_Count], beside: int) -> tuple[int, bool]:
    """Return the tokens of a span without its burst, and True if it had no burst.

    A burst is a large share of `beside`, the tokens of two spans.
    """
    came = max(part[-1][1] - part[0][1], 0)
    burst = _largest_burst(part)
    return (came - burst, False) if burst > BURST_SHARE * max(beside, came) else (came, True)


def _variance(counted: list[_Count], begin_ns: int) -> float:
    """Estimate the variance of tokens per second from the differences of neighbouring messages.

    A single change of the rate adds little.
    """
    came = [(after[1] - before[1]) for before, after in pairwise(counted) if after[0] > begin_ns]
    seconds = (counted[-1][0] - max(begin_ns, counted[0][0])) / 1e9
    return sum((after - before) ** 2 for before, after in pairwise(came)) / 2 / seconds if seconds > 0 else 0.0


def _largest_burst(counted: list[_Count]) -> int:
    """Return the most tokens that arrived within `BURST_NS`, or between two messages that are further apart."""
    most = begin = 0
    for end in range(1, len(counted)):
        while begin < end - 1 and counted[end][0] - counted[begin][0] > BURST_NS:
            begin += 1
        most = max(most, counted[end][1] - counted[begin][1])
    return most


REFUSAL_SPAN_NS: Final = 4_000_000_000
"""The time that a rate averages, twice the interval between messages."""
REFUSAL_SILENT_NS: Final = 10_000_000_000
"""The silence after which a gateway no longer counts."""


class FleetRefusals:
    """Counts of all gateways over the last span. The gateway that has been silent longest is dropped when there are
    too many.
    """

    def __init__(self) -> None:
        self._gateways: OrderedDict[tuple[str, int], deque[tuple[int, Counter[str]]]] = OrderedDict()

    def take(self, message: DemandTotals) -> None:
        """Record a gateway's counts since its start."""
        key = (message.gateway_id, message.incarnation)
        samples = self._gateways.pop(key, deque())
        if message.last:
            return
        put_newest(self._gateways, key, samples, MAX_GATEWAYS)
        reported_ns = message.told_unix_ns
        if samples and samples[-1][0] >= reported_ns:
            return
        refused = Counter[str]()
        for each in message.counts:
            if each.service_class != BATCH_CLASS:
                refused[each.model] += each.queue_full
        samples.append((reported_ns, refused))
        while len(samples) > 2 and samples[1][0] <= reported_ns - REFUSAL_SPAN_NS:
            samples.popleft()

    def per_s(self, model: str, now_ns: int) -> float:
        rate = 0.0
        for samples in self._gateways.values():
            if len(samples) < 2 or samples[-1][0] <= now_ns - REFUSAL_SILENT_NS:
                continue
            (first_ns, first), (last_ns, last) = samples[0], samples[-1]
            rate += max(last[model] - first[model], 0) * 1e9 / (last_ns - first_ns)
        return rate

    def total_per_s(self, now_ns: int) -> float:
        models = {model for samples in self._gateways.values() for model in samples[-1][1]}
        return sum(self.per_s(model, now_ns) for model in models)
