"""Lines of a file whose custom_id an earlier one has. Pure.

A first pass keeps a hash of each line's custom_id, 8 bytes a line. As hashes of different ids may meet, a second one
looks at the lines whose hashes did; it is needed only where some did, and keeps 128 bits of each of these custom_ids.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash


class _Named(msgspec.Struct):
    """As much of a line as tells it from others."""

    custom_id: str | None = None


_decoder = msgspec.json.Decoder(_Named)


def custom_id_of(line: bytes) -> str | None:
    """The line's custom_id; None where there is none, or the line is no JSON object."""
    try:
        return _decoder.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class IdHashes:
    """First pass."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, line: bytes) -> None:
        """The next line that is not blank."""
        custom_id = custom_id_of(line)
        # A line without one is unlike every other.
        text = f"{len(self._hashes)}\n" if custom_id is None else custom_id
        self._hashes.append(xxhash.xxh3_64_intdigest(text.encode()))

    def suspects(self) -> frozenset[int]:
        """Hashes that several lines have."""
        values = np.frombuffer(self._hashes, dtype=np.uint64).copy()
        values.sort()
        return frozenset(values[1:][values[1:] == values[:-1]].tolist())

    def finder(self) -> "Repeats":
        """What the second pass is made with."""
        return Repeats(self._hashes, self.suspects())


class Repeats:
    """Second pass."""

    def __init__(self, hashes: Sequence[int], suspects: frozenset[int]) -> None:
        self._hashes = hashes
        self._suspects = suspects
        self._seen: set[bytes] = set()
        self._place = 0
        self.places = array("Q")
        """Of the lines that were found, in order."""

    @property
    def needed(self) -> bool:
        """Whether there can be any."""
        return bool(self._suspects)

    def add(self, line: bytes) -> None:
        """The next line that is not blank."""
        if self._hashes[self._place] in self._suspects and (custom_id := custom_id_of(line)) is not None:
            digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
            if digest in self._seen:
                self.places.append(self._place)
            self._seen.add(digest)
        self._place += 1
