"""Maps that drop the least recently set entries beyond a bound."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def put_newest(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Set a value as the newest one, and drop the oldest beyond `most`."""
    # Not a plain dict: finding its first key takes longer the more keys were deleted before it.
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
