"""KV transfers of one worker: those it receives over its link, and those that others read from it.

A link carries blocks as they become ready. The sender's side is not modelled.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from libs.contracts.errors import KvLost
from libs.engine.kv_blocks import Offer, ReceivedTotals
from libs.engine.offers import MAX_UNKNOWN_MS
from libs.engine.reports import FinishReason
from libs.lab.cluster.core import LabCore
from libs.lab.cluster.host.device import Device, Rest
from libs.lab.cluster.host.shape import WorkerShape
from libs.lab.cluster.sequence import CountedSequence
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.policy.worker.handing_over import TransferSpeed

MAX_FETCHES: Final = 64
"""The maximum number of sequences whose KV a worker receives at a time, as bounded in `libs.engine.local`."""


@dataclass(eq=False, slots=True)
class Stream:
    """The transfer of one sequence's blocks to one receiver."""

    sequence: CountedSequence
    held: Offer | None
    """The blocks at their source; None while their name is known there but their prompt has not begun."""
    at: int
    """The number of blocks that have arrived or are on the link."""
    requested_ns: int
    open: bool = False
    """True if the request for the blocks has reached the source."""
    moving: bool = False
    first: int = 0
    """The number of blocks found in the receiver's own cache."""
    ready_ns: int = 0
    """The time at which the first blocks under a name were ready; 0 before."""
    expected: bool = False
    """True if the source has had the prompt of the blocks' name."""

    @property
    def ready(self) -> int:
        """The number of blocks that the source could send now."""
        return self.held.ready - self.at if self.held is not None else 0

    @property
    def done(self) -> bool:
        """Return whether the source has finished the prompt and all blocks have arrived."""
        held = self.held
        return not self.moving and held is not None and held.whole and self.at >= len(held.blocks)


class ReceivingLink:
    """The link of one receiver, on which concurrent streams take turns block by block, as live pulls do with chunks."""

    def __init__(self, time: VirtualTime, block_ps: int, arrived: Callable[[Stream], None]) -> None:
        """Create the link. `arrived` is called when all blocks in transit for a sequence have arrived."""
        self._time = time
        self._block_ps = block_ps
        self._arrived = arrived
        self._left: dict[Stream, int] = {}
        """The blocks in transit, by stream."""
        self._turns: deque[Stream] = deque()
        """The streams in turn; the first one has a block on the link."""
        self._since_ps = 0
        """The time up to which the link has been accounted for."""
        self._plans = 0

    @property
    def moving(self) -> int:
        """The number of sequences whose blocks are on the link."""
        return len(self._turns)

    def pull(self, stream: Stream) -> None:
        """Send the blocks that are ready, in addition to those in transit."""
        blocks = stream.ready
        if blocks <= 0:
            return
        self._pass()
        stream.at += blocks
        stream.moving = True
        if stream not in self._left:
            if not self._turns:
                self._since_ps = self._time.now_ps
            self._turns.append(stream)
        self._left[stream] = self._left.get(stream, 0) + blocks
        self._plan()

    def drop(self, stream: Stream) -> None:
        """Remove a stream that the receiver no longer needs."""
        if stream in self._left:
            self._pass()
            if stream is self._turns[0]:
                self._since_ps = self._time.now_ps
            self._leave(stream)
            self._plan()

    def _leave(self, stream: Stream) -> None:
        del self._left[stream]
        self._turns.remove(stream)

    def _pass(self) -> None:
        """Advance the link to now. Only streams that end at this moment can be complete."""
        if not self._turns:
            return
        blocks = (self._time.now_ps - self._since_ps) // self._block_ps
        self._since_ps += blocks * self._block_ps
        rounds, more = divmod(blocks, len(self._turns))
        for place, stream in enumerate(self._turns):
            self._left[stream] -= rounds + (place < more)
        self._turns.rotate(-more)

    def _plan(self) -> None:
        """Schedule a wake-up for the time at which the next stream ends, unless something changes before."""
        self._plans += 1
        if self._turns:
            blocks, place = min((self._left[stream], place) for place, stream in enumerate(self._turns))
            before = (blocks - 1) * len(self._turns) + place + 1 if blocks else 0
            self._time.at_ps(self._since_ps + before * self._block_ps, partial(self._come, self._plans))

    def _come(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._pass()
        here = [stream for stream in self._turns if not self._left[stream]]
        for stream in here:
            self._leave(stream)
            stream.moving = False
        self._plan()
        for stream in here:
            self._arrived(stream)


# The same delay as in `libs.worker.kv_client`.
ACK_DELAY_PS: Final = 10_000_000 * PS_PER_NS
MAX_UNKNOWN_PS: Final = MAX_UNKNOWN_MS * 1_000_000 * PS_PER_NS


class Owner(Protocol):
    """The callbacks to the worker that owns the KV."""

    @property
    def down(self) -> bool: ...

    def enter(self) -> None:
        """Begin an event at the worker, as `LabWorker.enter` does."""
        ...

    def leave(self) -> None:
        """End the event and act on its results."""
        ...

    def received_at(self, transfers: TransferSpeed) -> None:
        """Record the transfer speed after the blocks of a sequence have arrived."""
        ...

    def was_read(self, opaque: bytes) -> None:
        """Handle a handle whose blocks have all been read, and which is released."""
        ...


class Fetching:
    """The KV transfers to and from one worker."""

    def __init__(self, shape: WorkerShape, time: VirtualTime, device: Device) -> None:
        self._hop_ps = shape.hop_ps
        self._block_tokens = shape.block_tokens
        self._block_bytes = shape.kv_block_bytes
        self._time = time
        self._device = device
        self._owner: Owner | None = None
        self._peers: dict[str, Fetching] = {}
        self._link = ReceivingLink(time, shape.block_ps, self._part_came)
        self._streams: dict[int, Stream] = {}
        self._unrequested: list[CountedSequence] = []
        """Sequences beyond `MAX_FETCHES`, whose KV has yet to be requested."""
        self._unacknowledged: dict[str, list[Stream]] = {}
        """Completed streams by worker id of their source, which keeps the blocks until the acknowledgement."""
        self._readers: dict[bytes, tuple[Fetching, Stream]] = {}
        """Receivers by the handle that they read from here while it fills."""
        self._transfers = TransferSpeed(shape.block_tokens)

    def start(self, owner: Owner, peers: "dict[str, Fetching]") -> None:
        """Join the cluster; `peers` are by worker id."""
        self._owner, self._peers = owner, peers

    @property
    def _core(self) -> LabCore:
        return self._device.core

    @property
    def rest(self) -> Rest:
        """Return the category of the time in which the worker computes nothing."""
        waits = self._link.moving or any(stream.ready > 0 for stream in self._streams.values())
        return Rest.KV_WAIT if waits else Rest.STARVED if self._streams else Rest.IDLE

    # ------------------------------------------------------------ from others

    def ask(self) -> bool:
        """Request the KV of sequences that have been given blocks.

        Return whether a source had lost its KV, in which case other sequences may have been given blocks in the
        meantime.
        """
        core, lost = self._device.core, False
        for sequence in core.take_fetches():
            assert isinstance(sequence, CountedSequence)
            self._unrequested.append(sequence)
        while self._unrequested and len(self._streams) < MAX_FETCHES:
            sequence = self._unrequested.pop(0)
            kv = sequence.request.kv
            assert kv is not None
            core.kv_requested(sequence)
            source, now_ns, found = self._peers[kv.worker_id], self._time.now_ns(), sequence.found_blocks
            held: Offer | None = None
            try:
                if not kv.named or kv.opaque in source._core.offers:
                    held = source._core.offers.pull(kv.opaque, now_ns)
            except KvLost as error:
                core.kv_failed(sequence, FinishReason.KV_LOST, error.message, now_ns)
                lost = True
                continue
            stream = self._streams[sequence.request.sequence_id] = Stream(sequence, held, found, now_ns, first=found)
            source._readers[kv.opaque] = self, stream
            self._acknowledge(kv.worker_id)
            # One hop for the request and one for the response.
            self._time.in_ps(self._hop_ps, partial(self._requested, stream, named=kv.named))
        return lost

    def _requested(self, stream: Stream, *, named: bool) -> None:
        if self._awaits(stream):
            self._source(stream).requested_by(self, stream)
        # What the source of a named handle has later is in a response of its own.
        pulls = not named or stream.ready > 0 or stream.done
        if named and pulls and not stream.ready_ns:
            stream.ready_ns = self._time.now_ns()
        self._time.in_ps(self._hop_ps, partial(self._opened, stream, pulls=pulls))

    def _opened(self, stream: Stream, *, pulls: bool) -> None:
        stream.open = True
        if pulls:
            self.more(stream)

    def more(self, stream: Stream) -> None:
        """Pull blocks that may have become ready at their source."""
        if stream.open and self._awaits(stream):
            self._pull(stream)

    def _part_came(self, stream: Stream) -> None:
        if self._awaits(stream):  # otherwise the sequence has been aborted
            self._pull(stream)

    def _awaits(self, stream: Stream) -> bool:
        return self._streams.get(stream.sequence.request.sequence_id) is stream

    def _pull(self, stream: Stream) -> None:
        # The engine is notified of the last part only.
        assert self._owner is not None
        rests = self._device.free
        if rests:
            self._device.account_rest()
        self._link.pull(stream)
        if stream.done:
            self._owner.enter()
            self._arrived(stream)
            self._owner.leave()
        elif rests:
            self._device.rest = self.rest

    def _arrived(self, stream: Stream) -> None:
        assert self._owner is not None
        del self._streams[stream.sequence.request.sequence_id]
        now_ns, blocks = self._time.now_ns(), stream.at - stream.first
        received = ReceivedTotals(blocks, blocks * self._block_bytes)
        assert stream.held is not None
        if stream.ready_ns:
            requested_ns = stream.requested_ns + self._hop_ps // PS_PER_NS
            received.first_waited_ns = received.waited_ns = max(stream.ready_ns - requested_ns, 1)
            received.token_ids = stream.held.token_ids
        self._core.kv_arrived(stream.sequence, received, stream.requested_ns, now_ns)
        self._transfers.arrived(blocks, now_ns - stream.requested_ns - received.first_waited_ns)
        self._owner.received_at(self._transfers)
        self._owe_acknowledgement(stream)

    def _owe_acknowledgement(self, stream: Stream) -> None:
        """Queue an acknowledgement, which travels with the next request to the same source or alone after
        `ACK_DELAY_PS`.
        """
        kv = stream.sequence.request.kv
        assert kv is not None
        unacknowledged = self._unacknowledged.setdefault(kv.worker_id, [])
        unacknowledged.append(stream)
        if len(unacknowledged) == 1:

            def waited() -> None:
                if self._unacknowledged.get(kv.worker_id) is unacknowledged:
                    self._acknowledge(kv.worker_id)

            self._time.in_ps(ACK_DELAY_PS, waited)

    def _acknowledge(self, worker_id: str) -> None:
        for stream in self._unacknowledged.pop(worker_id, ()):
            self._time.in_ps(self._hop_ps, partial(self._peers[worker_id].acknowledged, stream))

    def lost(self, stream: Stream) -> None:
        """Fail the sequence of a stream whose source is gone."""
        if not self._awaits(stream):
            return
        assert self._owner is not None
        del self._streams[stream.sequence.request.sequence_id]
        self._link.drop(stream)
        self._owner.enter()
        self._core.kv_failed(stream.sequence, FinishReason.KV_LOST, "its source is gone", self._time.now_ns())
        self._owner.leave()

    def abort(self, sequence_id: int) -> None:
        """Stop fetching the blocks of a sequence."""
        stream = self._streams.pop(sequence_id, None)
        if stream is not None:
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        self._link.drop(stream)
        self._source(stream).left(stream)

    def _source(self, stream: Stream) -> "Fetching":
        kv = stream.sequence.request.kv
        assert kv is not None
        return self._peers[kv.worker_id]

    # ------------------------------------------------------------ for others

    def left(self, stream: Stream) -> None:
        """Handle a reader that has left before it had all blocks."""
        kv = stream.sequence.request.kv
        assert kv is not None
        self._readers.pop(kv.opaque, None)
        if stream.held is not None:
            self._core.offers.leave(stream.held, self._time.now_ns())

    def requested_by(self, reader: "Fetching", stream: Stream) -> None:
        """Handle a request for blocks, which under a name may arrive before their prompt does."""
        if stream.held is None and not self._expects(stream):
            self._time.in_ps(MAX_UNKNOWN_PS, partial(self._unknown_until_now, reader, stream))

    def _unknown_until_now(self, reader: "Fetching", stream: Stream) -> None:
        if stream.held is None and not self._expects(stream):
            self._lose(reader, stream)

    def _expects(self, stream: Stream) -> bool:
        kv = stream.sequence.request.kv
        assert kv is not None
        stream.expected = stream.expected or self._core.offers.expects(kv.opaque)
        return stream.expected

    def _lose(self, reader: "Fetching", stream: Stream) -> None:
        """Fail a stream whose prompt did not come, or has left before it began."""
        kv = stream.sequence.request.kv
        assert kv is not None
        if self._readers.get(kv.opaque) == (reader, stream):
            del self._readers[kv.opaque]
            self._time.in_ps(self._hop_ps, partial(reader.lost, stream))

    def begun(self) -> None:
        """Find the blocks of prompts that have begun for those who await them by name, with what is cached of them."""
        if not self._readers:
            return
        for opaque, (reader, stream) in list(self._readers.items()):
            if stream.held is not None:
                continue
            if opaque in self._core.offers:
                stream.held = self._core.offers.pull(opaque, self._time.now_ns())
                self._notify(reader, stream)
            elif self._expects(stream) and not self._core.offers.expects(opaque):
                self._lose(reader, stream)

    def notify_readers(self) -> None:
        """Notify readers that more blocks may be ready."""
        if not self._readers:
            return
        for opaque, (reader, stream) in list(self._readers.items()):
            self._notify(reader, stream)
            if stream.held is not None and stream.held.whole:
                del self._readers[opaque]

    def _notify(self, reader: "Fetching", stream: Stream) -> None:
        if stream.ready > 0 or stream.done:
            stream.ready_ns = stream.ready_ns or self._time.now_ns()
            self._time.in_ps(self._hop_ps, partial(reader.more, stream))

    def acknowledged(self, stream: Stream) -> None:
        """Handle a reader's acknowledgement of all blocks of a handle."""
        assert self._owner is not None
        if self._owner.down:
            return
        assert stream.held is not None
        self._owner.enter()
        now_ns, opaque = self._time.now_ns(), stream.held.opaque
        self._readers.pop(opaque, None)
        self._core.offers.leave(stream.held, now_ns)
        self._owner.was_read(opaque)
        self._core.release(opaque, now_ns)
        self._owner.leave()

    # ------------------------------------------------------------ the end of a process

    def readers(self) -> "list[tuple[Fetching, Stream]]":
        """Return the receivers of handles whose prompts are still being computed."""
        return list(self._readers.values())

    def awaiting(self) -> "list[tuple[Fetching, Stream]]":
        """Return the receivers in the whole cluster that await blocks from this worker."""
        return [
            (each, stream)
            for each in self._peers.values()
            for stream in each._streams.values()
            if each._source(stream) is self
        ]

    def give_up(self) -> None:
        """Drop everything that is being received or read here."""
        for stream in self._streams.values():
            self._drop(stream)
        self._streams.clear()
        self._unrequested.clear()
        self._unacknowledged.clear()
        self._readers.clear()

    def forget(self) -> None:
        """Reset the learned speed of the link."""
        self._transfers = TransferSpeed(self._block_tokens)
