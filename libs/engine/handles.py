"""KV handles under a lease: blocks of prefilled sequences that wait for their receiver. Pure; time is passed in."""

import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(slots=True)
class Held:
    """The blocks behind one handle."""

    opaque: bytes
    key: int
    blocks: list[int]
    ready: int
    """So many of them hold all their KV."""
    expires_ns: int | None = None
    """None: the prompt is still being computed."""

    @property
    def whole(self) -> bool:
        """Whether the prompt is computed."""
        return self.expires_ns is not None


class HandleTable:
    """Handles by their opaque bytes, opened when a prompt begins and sealed under a lease when it is computed.

    All leases are equally long, so they expire in the order of their last use.
    """

    def __init__(self, *, incarnation: int, lease_ns: int) -> None:
        self._incarnation = incarnation
        self._lease_ns = lease_ns
        self._open: dict[bytes, Held] = {}
        self._held: OrderedDict[bytes, Held] = OrderedDict()
        self._by_key: dict[int, bytes] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._held)

    @property
    def next_expiry_ns(self) -> int | None:
        """When the first lease ends; None without any."""
        first = next(iter(self._held.values()), None)
        return first.expires_ns if first else None

    def open(self, key: int, blocks: list[int]) -> Held:
        """A new handle without a lease, for blocks that are being filled; no other incarnation makes the same."""
        self._made += 1
        opaque = struct.pack("<QQ", self._incarnation, self._made)
        held = self._open[opaque] = Held(opaque, key, blocks, ready=0)
        self._by_key[key] = opaque
        return held

    def seal(self, held: Held, now_ns: int) -> None:
        """All blocks of an open handle are there: its lease begins."""
        held.ready = len(held.blocks)
        held.expires_ns = now_ns + self._lease_ns
        self._held[held.opaque] = self._open.pop(held.opaque)

    def use(self, opaque: bytes, now_ns: int) -> Held | None:
        """A live handle, its lease renewed: it ends so long after the last block was read."""
        held = self._open.get(opaque)
        if held is not None:
            return held
        held = self._held.get(opaque)
        if held is None or held.expires_ns is None or held.expires_ns <= now_ns:
            return None
        held.expires_ns = now_ns + self._lease_ns
        self._held.move_to_end(opaque)
        return held

    def drop(self, opaque: bytes) -> Held | None:
        """End a lease; None when there is none."""
        held = self._open.pop(opaque, None) or self._held.pop(opaque, None)
        if held is not None and self._by_key.get(held.key) == opaque:
            del self._by_key[held.key]
        return held

    def drop_key(self, key: int) -> Held | None:
        """End the lease of the sequence that had `key`."""
        opaque = self._by_key.get(key)
        return self.drop(opaque) if opaque is not None else None

    def forget_key(self, key: int) -> None:
        """`key` means another sequence from now on; its old handle lives on."""
        self._by_key.pop(key, None)

    def blocks(self) -> Iterator[int]:
        """The blocks behind all handles, one handle after the other."""
        for held in chain(self._open.values(), self._held.values()):
            yield from held.blocks

    def expire(self, now_ns: int) -> list[Held]:
        """End the leases that are over."""
        over: list[Held] = []
        while self._held:
            first = next(iter(self._held.values()))
            if first.expires_ns is None or first.expires_ns > now_ns:
                break
            self.drop(first.opaque)
            over.append(first)
        return over

    def drop_all(self) -> list[Held]:
        """End every lease."""
        held = [*self._open.values(), *self._held.values()]
        self._open.clear()
        self._held.clear()
        self._by_key.clear()
        return held
