"""Other workers' KV pools, mapped read-only where they are files on this host."""

import mmap
import os
import weakref
from collections import OrderedDict
from pathlib import Path

from libs.contracts.errors import KvLost
from libs.engine.kv.pool_file import HEADER_BYTES, PoolFileError, file_name, is_owned, read_header

MAX_MAPS = 64
"""Pools kept mapped; the least recently used goes first."""


class PoolMap:
    """One pool of another process, readable while this or a view of a block is held, whatever becomes of the owner.

    Nothing closes it, since a transfer may still read when the cache of maps has dropped it.
    """

    def __init__(self, path: Path) -> None:
        """Raises PoolFileError when there is no such pool here."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise PoolFileError(f"{error.strerror}: {path}") from None
        try:
            memory = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
            self._header = read_header(memory)
        except (OSError, ValueError, PoolFileError) as error:  # ValueError: the file is empty
            os.close(self._fd)
            raise PoolFileError(f"{path} cannot be mapped: {error}") from None
        self._bytes = memoryview(memory)
        weakref.finalize(self, os.close, self._fd)

    @property
    def nonce(self) -> bytes:
        """Read from the file; its owner knows by it that this is its pool."""
        return self._header.nonce

    @property
    def owned(self) -> bool:
        """Whether the owner lives."""
        return is_owned(self._fd)

    def block(self, number: int) -> memoryview:
        """One block's bytes as they are now; raises KvLost where the pool has no such block."""
        if not 0 <= number < self._header.blocks:
            raise KvLost(f"there is no block {number} in a pool of {self._header.blocks}")
        start = HEADER_BYTES + number * self._header.block_bytes
        return self._bytes[start : start + self._header.block_bytes]


class PoolMaps:
    """Pools by worker and incarnation, mapped when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: OrderedDict[str, PoolMap | None] = OrderedDict()
        """None: not here. An engine's file is there before its first handle is, so that is asked once a sweep."""

    def __len__(self) -> int:
        return len(self._maps)

    def get(self, worker_id: str, incarnation: int) -> PoolMap | None:
        """The pool of a worker on this host; None where its bytes can only be sent."""
        name = file_name(worker_id, incarnation)
        if name not in self._maps:
            self._maps[name] = self._open(name)
            if len(self._maps) > MAX_MAPS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(name)
        return self._maps[name]

    def drop_unowned(self) -> None:
        """Let go of the pools of workers that have ended, whose memory would stay taken otherwise."""
        for name in [name for name, pool in self._maps.items() if pool is None or not pool.owned]:
            del self._maps[name]

    def close(self) -> None:
        """Let go of all."""
        self._maps.clear()

    def _open(self, name: str) -> PoolMap | None:
        try:
            return PoolMap(self._folder / name)
        except PoolFileError:
            return None
