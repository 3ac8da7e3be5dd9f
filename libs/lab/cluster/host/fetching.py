"""KV transfers of one worker: what it receives over its link, and the receivers that it serves."""

from functools import partial
from typing import Final, Protocol

from libs.contracts.errors import KvLost
from libs.engine.kv.handles import Received
from libs.engine.reports import FinishReason
from libs.lab.cluster.core import LabCore
from libs.lab.cluster.host.device import Device
from libs.lab.cluster.host.kv_stream import MAX_FETCHES, ReceivingLink, Stream
from libs.lab.cluster.host.shape import WorkerShape
from libs.lab.cluster.host.spent import Rest
from libs.lab.cluster.sequence import CountedSequence
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.policy.worker.transfers import TransferSpeed

ACK_DELAY_PS: Final = 10_000_000 * PS_PER_NS
"""As `libs.worker.kv.link` has it."""


class Owner(Protocol):
    """Whose KV it is."""

    @property
    def down(self) -> bool:
        """Whether it is dead."""
        ...

    def enter(self) -> None:
        """Something happens there."""
        ...

    def leave(self) -> None:
        """It has happened."""
        ...

    def received_at(self, transfers: TransferSpeed) -> None:
        """A sequence's blocks have come at that speed."""
        ...

    def was_read(self, opaque: bytes) -> None:
        """A reader has all blocks of a handle, which is let go."""
        ...


class Fetching:
    """One worker's."""

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
        self._unasked: list[CountedSequence] = []
        """Beyond `MAX_FETCHES`."""
        self._unacknowledged: dict[str, list[Stream]] = {}
        """Streams of which all is here, by worker id of their source, which keeps their blocks until it hears so."""
        self._readers: dict[bytes, tuple[Fetching, Stream]] = {}
        """Receivers by the handle that they read here while it fills."""
        self._transfers = TransferSpeed(shape.block_tokens)

    def start(self, owner: Owner, peers: "dict[str, Fetching]") -> None:
        """Join the cluster; `peers` by worker."""
        self._owner, self._peers = owner, peers

    @property
    def _core(self) -> LabCore:
        return self._device.core

    @property
    def rest(self) -> Rest:
        """What the worker waits for where it computes nothing."""
        waits = self._link.moving or any(stream.ready > 0 for stream in self._streams.values())
        return Rest.KV_WAIT if waits else Rest.STARVED if self._streams else Rest.IDLE

    # ------------------------------------------------------------ from others

    def ask(self) -> bool:
        """Ask the sources of sequences that have got their blocks; whether one had lost its KV, so that others may have
        got blocks since."""
        core, lost = self._device.core, False
        for sequence in core.take_fetches():
            assert isinstance(sequence, CountedSequence)
            self._unasked.append(sequence)
        while self._unasked and len(self._streams) < MAX_FETCHES:
            sequence = self._unasked.pop(0)
            kv = sequence.request.kv
            assert kv is not None
            core.kv_asked(sequence)
            source, now_ns, found = self._peers[kv.worker_id], self._time.now_ns(), sequence.found_blocks
            try:
                held = source._core.offers.pull(kv.opaque, now_ns)
            except KvLost as error:
                core.kv_failed(sequence, FinishReason.KV_LOST, error.message, now_ns)
                lost = True
                continue
            stream = self._streams[sequence.request.sequence_id] = Stream(sequence, held, found, now_ns, first=found)
            source._readers[held.opaque] = self, stream
            self._acknowledge(kv.worker_id)
            self._in_two_hops(stream)
        return lost

    def _in_two_hops(self, stream: Stream) -> None:
        """For asking and for the answer."""
        opened = partial(self._time.in_ps, self._hop_ps, partial(self._opened, stream))
        self._time.in_ps(self._hop_ps, opened)

    def _opened(self, stream: Stream) -> None:
        stream.open = True
        self.more(stream)

    def more(self, stream: Stream) -> None:
        """Blocks are ready for this worker at their source, perhaps."""
        if stream.open and self._awaits(stream):
            self._pull(stream)

    def _part_came(self, stream: Stream) -> None:
        if self._awaits(stream):  # else it was aborted meanwhile
            self._pull(stream)

    def _awaits(self, stream: Stream) -> bool:
        return self._streams.get(stream.sequence.request.sequence_id) is stream

    def _pull(self, stream: Stream) -> None:
        """Only the last part is the engine's affair."""
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
        received = Received(blocks, blocks * self._block_bytes)
        self._core.kv_arrived(stream.sequence, received, stream.asked_ns, now_ns)
        self._transfers.arrived(blocks, now_ns - stream.asked_ns)
        self._owner.received_at(self._transfers)
        self._owe_acknowledgement(stream)

    def _owe_acknowledgement(self, stream: Stream) -> None:
        """It goes to its source with whatever is asked for there next, or by itself after a while."""
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
        """The source of these blocks is gone."""
        if not self._awaits(stream):
            return
        assert self._owner is not None
        del self._streams[stream.sequence.request.sequence_id]
        self._link.drop(stream)
        self._owner.enter()
        self._core.kv_failed(stream.sequence, FinishReason.KV_LOST, "its source is gone", self._time.now_ns())
        self._owner.leave()

    def abort(self, sequence_id: int) -> None:
        """Await the blocks of a sequence no more."""
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
        """Its reader has gone without all of it."""
        self._readers.pop(stream.held.opaque, None)
        self._core.offers.leave(stream.held, self._time.now_ns())

    def tell_readers(self) -> None:
        """More blocks of what they read may be ready."""
        if not self._readers:
            return
        for opaque, (reader, stream) in list(self._readers.items()):
            if stream.ready > 0 or stream.done:
                self._time.in_ps(self._hop_ps, partial(reader.more, stream))
            if stream.held.whole:
                del self._readers[opaque]

    def acknowledged(self, stream: Stream) -> None:
        """The reader has all blocks of a handle."""
        assert self._owner is not None
        if self._owner.down:
            return
        self._owner.enter()
        now_ns, opaque = self._time.now_ns(), stream.held.opaque
        self._readers.pop(opaque, None)
        self._core.offers.leave(stream.held, now_ns)
        self._owner.was_read(opaque)
        self._core.release(opaque, now_ns)
        self._owner.leave()

    # ------------------------------------------------------------ the end of a process

    def readers(self) -> "list[tuple[Fetching, Stream]]":
        """Receivers of handles whose prompt is still being computed."""
        return list(self._readers.values())

    def awaiting(self) -> "list[tuple[Fetching, Stream]]":
        """Who awaits blocks from here, all of the cluster asked."""
        return [
            (each, stream)
            for each in self._peers.values()
            for stream in each._streams.values()
            if each._source(stream) is self
        ]

    def give_up(self) -> None:
        """Nothing is received or read here any more."""
        for stream in self._streams.values():
            self._drop(stream)
        self._streams.clear()
        self._unasked.clear()
        self._unacknowledged.clear()
        self._readers.clear()

    def forget(self) -> None:
        """What was learned of the link."""
        self._transfers = TransferSpeed(self._block_tokens)
