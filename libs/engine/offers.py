"""The KV offered to other workers, by handle: from a prompt's first step until the handle's lease ends. Pure."""

from collections.abc import Iterator

from libs.contracts.errors import InvalidRequest, KvLost
from libs.engine.kv_blocks import HANDLE_BYTES, BlockPool, HandleTable, Offer, RandomBytes
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EngineIdentity
from libs.engine.sequence import Sequence

# The lease of blocks whose receiver or gateway has left. A gateway notices a lost worker, and another decode worker
# comes for the blocks, in much less time.
RETRY_MS = 5_000
# The time for which a receiver may ask for a named handle before its prompt arrives, which comes on another stream.
MAX_UNKNOWN_MS = 5_000


class Offers:
    """The offers of one engine. Each has its own references to blocks, so that it can outlive its sequence."""

    def __init__(
        self,
        pool: BlockPool,
        identity: EngineIdentity,
        capabilities: Capabilities,
        *,
        lease_ns: int,
        random_bytes: RandomBytes,
    ) -> None:
        self._pool = pool
        self._identity = identity
        self._capabilities = capabilities
        self._handles = HandleTable(random_bytes=random_bytes, lease_ns=lease_ns, left_lease_ns=RETRY_MS * 1_000_000)
        self._to_sum: dict[bytes, Offer] = {}
        """The offers that may have ready blocks without a checksum, by handle."""
        self._expected: set[bytes] = set()
        """The names reserved for prompts that have not begun; at most one per sequence."""

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, opaque: bytes) -> bool:
        return opaque in self._handles

    @property
    def next_expiry_ns(self) -> int | None:
        """The time at which the first lease ends; None without leases."""
        return self._handles.next_expiry_ns

    def expect(self, name: bytes) -> None:
        """Reserve a name for the offer of a submitted prompt. Raise InvalidRequest if the name is in use."""
        if len(name) != HANDLE_BYTES or name in self._expected or name in self._handles:
            raise InvalidRequest(f"kv_name must be {HANDLE_BYTES} bytes that name no other prompt's blocks here")
        self._expected.add(name)

    def expects(self, name: bytes) -> bool:
        """Return whether the name is reserved for a prompt that has not begun."""
        return name in self._expected

    def stream(self, sequence: Sequence) -> KvHandle:
        """Offer the blocks of a prompt before it is computed. Cached blocks are ready at once."""
        sequence.streamed = self._new(sequence, sequence.length)
        self.progress(sequence)
        return self._handle(sequence.streamed, tokens=sequence.length, streamed=True)

    def progress(self, sequence: Sequence) -> None:
        """Mark the computed blocks of a streamed prompt as ready."""
        if sequence.streamed is not None:
            sequence.streamed.ready = sequence.computed // self._capabilities.block_size_tokens
            self._to_sum[sequence.streamed.opaque] = sequence.streamed

    def seal(self, sequence: Sequence, now_ns: int, token_ids: tuple[int, ...] = ()) -> KvHandle:
        """Offer all computed blocks of a sequence that ends here, and start their lease.

        The receiver of a named handle also gets `token_ids`.
        """
        offer = sequence.streamed or self._new(sequence, sequence.computed)
        offer.token_ids = token_ids if sequence.request.kv_name else ()
        sequence.streamed = None
        self._handles.seal(offer, now_ns)
        self._to_sum[offer.opaque] = offer
        return self._handle(offer, tokens=sequence.computed, streamed=False)

    def withdraw(self, sequence: Sequence) -> None:
        """End the offer of a sequence that ends without a hand-off. A sealed offer remains."""
        self._expected.discard(sequence.request.kv_name)
        if sequence.streamed is not None:
            self.end(sequence.streamed.opaque)

    def find(self, opaque: bytes, now_ns: int) -> Offer:
        """Return the offer behind a handle and renew its lease. Raise KvLost if it is unknown or expired."""
        offer = self._handles.use(opaque, now_ns)
        if offer is None:
            raise KvLost("no such KV handle here: it was released, or its lease has ended")
        return offer

    def pull(self, opaque: bytes, now_ns: int) -> Offer:
        """Return an offer and add a receiver to it, which must call `leave`. Raise KvLost like `find`."""
        offer = self.find(opaque, now_ns)
        offer.pulls += 1
        return offer

    def leave(self, offer: Offer, now_ns: int) -> None:
        """Record that a receiver has left, with or without the blocks."""
        self._handles.leave(offer, now_ns)

    def to_sum(self, most: int) -> tuple[Offer, int, int] | None:
        """Return (offer, first, end) of at most `most` ready blocks without checksums; None if there are none."""
        while self._to_sum:
            offer = next(iter(self._to_sum.values()))
            first = offer.unsummed()
            if first < offer.ready:
                return offer, first, min(first + most, offer.ready)
            del self._to_sum[offer.opaque]
        return None

    def end(self, opaque: bytes) -> None:
        """Free the blocks behind a handle. Unknown handles are ignored."""
        self._free(self._handles.drop(opaque))

    def leave_unread(self, opaque: bytes, now_ns: int) -> None:
        """Shorten the lease of a handle whose gateway is gone. A receiver that has the handle may still pull."""
        self._handles.leave_unread(opaque, now_ns)

    def end_sequence(self, sequence_id: int) -> None:
        """Free the blocks that a finished sequence still offers."""
        self._free(self._handles.drop_sequence(sequence_id))

    def forget_sequence(self, sequence_id: int) -> None:
        """Detach the handle of an earlier sequence from its id, which a new sequence takes. The handle stays valid."""
        self._handles.forget_sequence(sequence_id)

    def expire(self, now_ns: int) -> None:
        """Free the blocks of handles whose leases have ended."""
        for offer in self._handles.expire(now_ns):
            self._free(offer)

    def end_all(self) -> None:
        for offer in self._handles.drop_all():
            self._free(offer)

    def blocks(self) -> Iterator[int]:
        """Iterate over the blocks of all offers, one offer after the other."""
        return self._handles.blocks()

    def _new(self, sequence: Sequence, tokens: int) -> Offer:
        # A running sequence may have a further block, for the tokens that it samples next.
        blocks = self._pool.allocate(0, sequence.blocks[: -(-tokens // self._capabilities.block_size_tokens)])
        assert blocks is not None
        # Only the prompt's own offer takes the name. A decoding sequence that is handed over gets a random handle.
        name = sequence.request.kv_name if sequence.request.kv_name in self._expected else b""
        self._expected.discard(name)
        return self._handles.open(sequence.sequence_id, blocks, name)

    def _free(self, offer: Offer | None) -> None:
        if offer is not None:
            self._to_sum.pop(offer.opaque, None)
            self._pool.release(offer.blocks)

    def _handle(self, offer: Offer, *, tokens: int, streamed: bool) -> KvHandle:
        return KvHandle(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            address=self._identity.address,
            opaque=offer.opaque,
            tokens=tokens,
            blocks=len(offer.blocks),
            kv_layout=self._capabilities.kv_layout,
            streamed=streamed,
        )
