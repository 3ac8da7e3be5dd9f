"""KV pools of other workers of this host, mapped read-only from their files."""

import mmap
import os
import weakref
from collections import OrderedDict
from pathlib import Path

from libs.contracts.errors import KvLost
from libs.engine.kv.pool_file import HEADER_BYTES, PoolFileError, file_name, is_owned, read_header

# Pools kept mapped; the least recently used is dropped first.
MAX_MAPS = 64


class PoolMap:
    """The pool of another process, readable while this object or a view of a block lives, even after its owner has
    ended.

    There is no `close`, since a transfer may still read when the cache of maps has dropped the pool.
    """

    def __init__(self, path: Path) -> None:
        """Map the pool at `path`. Raise PoolFileError if there is none."""
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
        """The nonce in the file, by which its owner recognises its own pool."""
        return self._header.nonce

    @property
    def owned(self) -> bool:
        return is_owned(self._fd)

    def block(self, number: int) -> memoryview:
        """Return a block's current bytes. Raise KvLost if the pool has no such block."""
        if not 0 <= number < self._header.blocks:
            raise KvLost(f"there is no block {number} in a pool of {self._header.blocks}")
        start = HEADER_BYTES + number * self._header.block_bytes
        return self._bytes[start : start + self._header.block_bytes]


class PoolMaps:
    """Pools by worker and incarnation, mapped at first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: OrderedDict[str, PoolMap | None] = OrderedDict()
        """Maps by file name; None for pools that are not on this host. An engine's file exists before its first
        handle, so a missing file is looked for only once between sweeps.
        """

    def __len__(self) -> int:
        return len(self._maps)

    def get(self, worker_id: str, incarnation: int) -> PoolMap | None:
        """Return the pool of a worker on this host, or None if its bytes can only be sent."""
        name = file_name(worker_id, incarnation)
        if name not in self._maps:
            self._maps[name] = self._open(name)
            if len(self._maps) > MAX_MAPS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(name)
        return self._maps[name]

    def drop_unowned(self) -> None:
        """Drop the pools of ended workers, whose memory would otherwise stay allocated."""
        for name in [name for name, pool in self._maps.items() if pool is None or not pool.owned]:
            del self._maps[name]

    def close(self) -> None:
        """Drop all maps. Their memory is unmapped once no view is left."""
        self._maps.clear()

    def _open(self, name: str) -> PoolMap | None:
        try:
            return PoolMap(self._folder / name)
        except PoolFileError:
            return None
