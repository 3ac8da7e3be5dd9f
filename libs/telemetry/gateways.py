"""Queue lengths from the latest report of each gateway. The number of gateways is bounded, and silent ones are
dropped.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue

SILENT_NS: Final = 2_000_000_000
"""The silence after which a gateway is taken for gone, with its queue, while others report. Gateways report five times
a second, idle ones nearly twice.
"""
GONE_NS: Final = 60_000_000_000
"""The time without any report after which no gateway is assumed to exist. Until then, queue lengths are unknown."""
OLD_NS: Final = 30_000_000_000
"""The age at which a report no longer describes the present, as when the broker replays it."""
MAX_GATEWAYS: Final = 256
"""The most gateways that are tracked; the one that has been silent longest is dropped."""
MAX_MODELS: Final = 64
"""The most models taken from one gateway's report."""
MAX_TOKENS: Final = 2**40
"""Bound on the tokens of one gateway and model; higher counts are clipped."""


class ModelBacklog(NamedTuple):
    """The queue of one model, summed over all gateways."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    decode_prompt_tokens: int = 0
    """Tokens that requests waiting for decode still have to compute once they get a slot."""
    hopeful_tokens: int = 0
    """Prompt tokens of requests that can still meet their deadline; all tokens where a gateway does not report it."""
    batch_requests: int = 0
    """Waiting requests that are lines of batch jobs."""
    batch_tokens: int = 0
    """Prompt tokens of those lines, a part of `hopeful_tokens`."""
    batch_bound: int = 0
    """Lines of batch jobs that workers hold."""

    @property
    def prompt_tokens(self) -> int:
        return self.prefill_tokens + self.decode_prompt_tokens

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
        )


class _Report(NamedTuple):
    heard_ns: int
    incarnation: int
    reported_unix_ns: int
    queues: tuple[ModelQueue, ...]


class GatewayReports:
    def __init__(self) -> None:
        self._latest: dict[str, _Report] = {}

    def take(self, message: GatewayQueues, now_ns: int) -> None:
        """Record a message received at `now_ns`; one older than the newest changes nothing."""
        if message.told_unix_ns < now_ns - OLD_NS:
            return
        key, known = message.gateway_id, self._latest.get(message.gateway_id)
        age = message.incarnation, message.told_unix_ns
        if (
            known is not None
            and age < (known.incarnation, known.reported_unix_ns)
            and now_ns < known.heard_ns + SILENT_NS
        ):
            return
        self._latest.pop(key, None)
        if message.last:
            return
        if len(self._latest) >= MAX_GATEWAYS:
            del self._latest[next(iter(self._latest))]
        self._latest[key] = _Report(now_ns, *age, tuple(message.queues[:MAX_MODELS]))

    def waiting(self, now_ns: int) -> dict[str, ModelBacklog] | None:
        """Return the backlog of each model with waiting requests; None if gateways exist but none reports."""
        newest_ns = self._newest_ns()
        if newest_ns is None or now_ns > newest_ns + GONE_NS:
            return {}
        if now_ns > newest_ns + SILENT_NS:
            return None
        heard = (report for report in self._latest.values() if report.heard_ns > newest_ns - SILENT_NS)
        return _by_model(queue for report in heard for queue in report.queues)

    def waiting_tokens(self, now_ns: int) -> int:
        """Return the waiting prompt tokens of all models; 0 if no gateway reports."""
        return sum(each.prompt_tokens for each in (self.waiting(now_ns) or {}).values())

    def _newest_ns(self) -> int | None:
        return next(reversed(self._latest.values())).heard_ns if self._latest else None


def _by_model(queues: Iterable[ModelQueue]) -> dict[str, ModelBacklog]:
    found: dict[str, ModelBacklog] = {}
    for queue in queues:
        found[queue.model] = found.get(queue.model, ModelBacklog()).plus(queue)
    return {model: waiting for model, waiting in found.items() if any(waiting)}
