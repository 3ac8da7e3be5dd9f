"""Matches requests with their KV transfers, which come from different processes in any order. Pure."""

from collections import OrderedDict, deque
from typing import Final

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, RequestEvent, StepBatch
from services.metrics.traces.spans import HandOff, Span, hand_off_span, spans, trace_context

SETTLE_NS: Final = 1_000_000_000
"""The time for which a finished request waits for its transfers, which workers report ten times a second. A later
transfer is sent when it comes, as a span of the same trace.
"""
MAX_REQUESTS: Final = 20_000
"""The most finished requests that wait; beyond it the oldest is dropped and counted."""
MAX_TRANSFERS: Final = 50_000
"""The most transfers whose request has not ended; beyond it the oldest is dropped. It may belong to an unsampled
request.
"""
MAX_LACKING: Final = 5_000
"""The most requests sent without all their transfers; beyond it those of the oldest are no longer awaited."""
MAX_HAND_OFFS: Final = 64
"""The most transfers of one request, whose choices share its id; further ones get no span."""
_SHARES: Final = 1 << 64


class TraceBuffer:
    """Finished requests that wait until their spans are taken.

    Of the traces that start here the share `share`, 0..1, is kept. A request with a trace context is kept if its
    client samples it.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests: deque[tuple[int, RequestEvent]] = deque()
        self._transfers: OrderedDict[str, list[HandOff]] = OrderedDict()
        self._lacking: OrderedDict[str, list[RequestEvent]] = OrderedDict()
        self._late: deque[Span] = deque(maxlen=MAX_TRANSFERS)
        self.dropped_requests = 0

    def enter(self, record: Record, now_ns: int) -> None:
        """Record a worker's transfers or a finished request; other records are ignored."""
        value = record.value
        if isinstance(value, StepBatch):
            for transfer in value.kv_transfers:
                self._transfer(value.worker_id, transfer)
        elif isinstance(value, RequestEvent):
            self._request(value, now_ns)

    def _transfer(self, worker_id: str, transfer: KvTransfer) -> None:
        if lacking := self._lacking.get(transfer.request_id):
            event = next((one for one in lacking if one.decode_worker == worker_id), lacking[0])
            self._late.append(hand_off_span(event, HandOff(worker_id, transfer)))
            lacking.remove(event)
            if not lacking:
                del self._lacking[transfer.request_id]
            return
        held = self._transfers.setdefault(transfer.request_id, [])
        if len(held) < MAX_HAND_OFFS:
            held.append(HandOff(worker_id, transfer))
        if len(self._transfers) > MAX_TRANSFERS:
            self._transfers.popitem(last=False)

    def _request(self, event: RequestEvent, now_ns: int) -> None:
        context = trace_context(event)
        kept = context.sampled
        if kept is None:
            kept = int.from_bytes(context.trace_id[8:]) < self._share * _SHARES
        if not kept:
            self._transfers.pop(event.request_id, None)
            return
        self._requests.append((now_ns + SETTLE_NS, event))
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popleft()
            self.dropped_requests += 1

    def take(self, now_ns: int, most: int) -> list[Span]:
        """Return late transfers' spans, and those of at most `most` requests that have waited long enough, oldest
        first.
        """
        found = [self._late.popleft() for _ in range(min(most, len(self._late)))]
        while most and self._requests and self._requests[0][0] <= now_ns:
            _, event = self._requests.popleft()
            hand_offs = self._hand_offs(event)
            found += spans(event, hand_offs)
            self._lack(event, _transfers_of(event) - len(hand_offs))
            most -= 1
        return found

    def _lack(self, event: RequestEvent, transfers: int) -> None:
        """Remember a request whose transfers are still to come, once for each."""
        if transfers > 0:
            self._lacking.setdefault(event.request_id, []).extend([event] * min(transfers, MAX_HAND_OFFS))
        if len(self._lacking) > MAX_LACKING:
            self._lacking.popitem(last=False)

    def _hand_offs(self, event: RequestEvent) -> list[HandOff]:
        """Return the hand-offs of one choice. The choices of a request share its id, so each takes as many as it can
        have had.
        """
        come = sorted(self._transfers.pop(event.request_id, []), key=lambda one: one.transfer.start_unix_ns)
        own = [one for one in come if one.worker_id == event.decode_worker] or come
        if event.moves or event.reroutes:
            return come
        if len(come) > 1:
            self._transfers[event.request_id] = [one for one in come if one is not own[0]]
        return own[:1]


def _transfers_of(event: RequestEvent) -> int:
    """Return the least number of transfers that the request must have had."""
    return event.moves + (event.decode_worker not in {"", event.prefill_worker})
