"""A KV pool's memory as a file that other workers of the host can map: layout, ownership, sweeping.

A file belongs to the process that has its lock (flock). The kernel releases the lock however the process ends. The next
sweep by any worker on the host removes files without an owner. Unlinking a file right after its creation would make the
sweep unnecessary. Its only path would then be in the owner's /proc, which containers that share the folder cannot see.
"""

import fcntl
import mmap
import os
import re
import secrets
import struct
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from libs.contracts.errors import KvLost
from libs.policy.newest import put_newest

PREFIX = "fulcrum-kv-"
# The header fills a page, so that the blocks begin on a page boundary.
HEADER_BYTES = mmap.PAGESIZE
_HEADER = struct.Struct("<8s16s36sQQ")
_MAGIC = b"FULKV\0\0\1"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux only
# A sweep may remove a new file just before its creator has locked it. The creator then makes another.
MAX_TRIES = 3


class PoolFileError(Exception):
    """A pool file that cannot be used. The message gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """The header of a pool file, which fills its first page."""

    nonce: bytes
    """16 random bytes. Only a process that maps this file can read them."""
    blocks: int
    block_bytes: int

    @property
    def size(self) -> int:
        """The size of the whole file in bytes, including the header."""
        return HEADER_BYTES + self.blocks * self.block_bytes


def file_name(worker_id: str, incarnation: int) -> str:
    """Return the file name of a worker's pool. Peers derive it from a KV handle."""
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '_', worker_id)[:64]}-{incarnation:x}"


def read_header(memory: mmap.mmap) -> PoolHeader:
    """Read the header of a mapped pool file.

    Raise PoolFileError if the file is no pool, or if another host or an earlier boot of this host wrote it.
    """
    if len(memory) < HEADER_BYTES:
        raise PoolFileError("too short for a KV pool")
    magic, nonce, boot_id, blocks, block_bytes = _HEADER.unpack_from(memory)
    if magic != _MAGIC:
        raise PoolFileError("not a KV pool")
    if boot_id != _read_boot_id():
        raise PoolFileError("of another host, or from before its last start")
    header = PoolHeader(nonce, blocks, block_bytes)
    if header.size != len(memory):
        raise PoolFileError(f"{len(memory)} bytes, not the {header.size} that it names")
    return header


class PoolFile:
    """The memory of a pool in a file, owned by this process until `close`."""

    def __init__(self, folder: Path, name: str, *, blocks: int, block_bytes: int) -> None:
        """Create the file and allocate all its memory, so that no later write can fail.

        Raise PoolFileError if there is no room.
        """
        self.header = PoolHeader(secrets.token_bytes(16), blocks, block_bytes)
        self._path = folder / name
        try:
            boot_id = _read_boot_id()
            self._fd = _create(self._path)
        except OSError as error:
            raise PoolFileError(f"{error.strerror}: {error.filename}") from None
        try:
            os.posix_fallocate(self._fd, 0, self.header.size)
            # Without MAP_POPULATE, the first write to each page would be a page fault during a hand-off.
            self.memory = mmap.mmap(self._fd, self.header.size, flags=mmap.MAP_SHARED | _POPULATE)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            raise PoolFileError(f"{folder} has no room for {self.header.size >> 20} MB: {error.strerror}") from None
        _HEADER.pack_into(self.memory, 0, _MAGIC, self.header.nonce, boot_id, blocks, block_bytes)

    def close(self) -> None:
        """Release the file. The kernel frees its memory once no process maps it. Idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # the map has a duplicate of the descriptor, which would keep the lock
            os.close(self._fd)
            self._fd = -1


def is_owned(fd: int) -> bool:
    """Return whether the process that created an open pool file is alive."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def sweep(folder: Path) -> list[str]:
    """Remove pool files whose owners have died, and return their names. Skip files of other users."""
    removed = []
    for path in folder.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            # The unlink comes before the unlock, so a creator that gets the lock next sees that its file has no name.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except OSError:
            continue
        finally:
            os.close(fd)
    return removed


def _create(path: Path) -> int:
    """Create a locked, empty file that only this user can open, and return its descriptor."""
    for _ in range(MAX_TRIES):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
        os.close(fd)
        path.unlink(missing_ok=True)
    raise BlockingIOError(None, "swept away again and again", str(path))


def _read_boot_id() -> bytes:
    return _BOOT_ID.read_bytes().strip()[:36]


# The upper bound of mapped pools; the least recently used is dropped first.
MAX_MAPS = 64


class PoolMap:
    """A read-only map of another process's pool, even after that process has ended.

    There is no `close`, because a transfer may still read a view after the cache has dropped the map. The memory is
    unmapped once no view is left.
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
        """The nonce in the file, which identifies the owner's pool."""
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
    """A cache of other workers' pools, mapped at first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: OrderedDict[str, PoolMap | None] = OrderedDict()
        """The maps by file name; None for pools that are not on this host. A worker's file exists before its first
        handle. One search between two sweeps is therefore enough.
        """

    def __len__(self) -> int:
        return len(self._maps)

    def get(self, worker_id: str, incarnation: int) -> PoolMap | None:
        """Return the pool of a worker on this host; None if its bytes can only be sent."""
        name = file_name(worker_id, incarnation)
        found = self._maps[name] if name in self._maps else self._open(name)
        put_newest(self._maps, name, found, MAX_MAPS)
        return found

    def drop_unowned(self) -> None:
        """Drop the pools of ended workers, whose memory the kernel cannot free while it is mapped."""
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
