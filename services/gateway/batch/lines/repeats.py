"""Count the lines of a job's file, and find lines that repeat an earlier custom_id.

A first pass keeps a hash of each line's custom_id, 8 bytes a line. Different ids may have the same hash, so where
hashes repeat, a second pass compares those lines by 128 bits of each custom_id.
"""

import asyncio
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from libs.filestore.port import FileStore
from services.gateway.batch.lines.shares import Cutter


class _Named(msgspec.Struct):
    """The one field of a line that identifies it."""

    custom_id: str | None = None


_decoder = msgspec.json.Decoder(_Named)


def custom_id_of(line: bytes) -> str | None:
    """The line's custom_id; None where it has none, or is not a JSON object."""
    try:
        return _decoder.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class IdHashes:
    """The first pass, which stores one hash per line."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, line: bytes) -> None:
        """Add the next line that is not blank."""
        custom_id = custom_id_of(line)
        # A line without one is unlike every other.
        text = f"{len(self._hashes)}\n" if custom_id is None else custom_id
        self._hashes.append(xxhash.xxh3_64_intdigest(text.encode()))

    def suspects(self) -> frozenset[int]:
        """Return the hashes that several lines share."""
        values = np.frombuffer(self._hashes, dtype=np.uint64).copy()
        values.sort()
        return frozenset(values[1:][values[1:] == values[:-1]].tolist())

    def finder(self) -> "Repeats":
        """Return the second pass over the same lines."""
        return Repeats(self._hashes, self.suspects())


class Repeats:
    """The second pass, which compares the lines whose hashes repeat."""

    def __init__(self, hashes: Sequence[int], suspects: frozenset[int]) -> None:
        self._hashes = hashes
        self._suspects = suspects
        self._seen: set[bytes] = set()
        self._place = 0
        self.places = array("Q")
        """The indices of the repeating lines, in order."""

    @property
    def needed(self) -> bool:
        return bool(self._suspects)

    def add(self, line: bytes) -> None:
        """Add the next line that is not blank."""
        if self._hashes[self._place] in self._suspects and (custom_id := custom_id_of(line)) is not None:
            digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
            if digest in self._seen:
                self.places.append(self._place)
            self._seen.add(digest)
        self._place += 1


@dataclass(frozen=True, slots=True)
class Counted:
    """The result of reading a whole file."""

    lines: int
    repeats: "array[int]"
    """Places of lines that repeat an earlier custom_id, in order."""


async def count(files: FileStore, file_id: str) -> Counted:
    """Read the file once, or twice where hashes repeat; raises FileNotFound."""
    hashes = IdHashes()
    cutter = Cutter(on_line=hashes.add)
    await _read(files, file_id, cutter)
    finder = await asyncio.to_thread(hashes.finder)
    if finder.needed:
        await _read(files, file_id, Cutter(on_line=finder.add))
    return Counted(cutter.lines, finder.places)


async def _read(files: FileStore, file_id: str, cutter: Cutter) -> None:
    async for part in files.read(file_id):
        await asyncio.to_thread(cutter.push, part)
    cutter.flush()
