"""The decoding of image files, which must be the same in gateways and engines. Needs Pillow."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from PIL import Image, ImageOps

from libs.contracts.errors import one_line
from libs.contracts.hashing import image_hash
from libs.model.vision import FORMATS

TRIAL_PIXELS: Final = 32
"""The side of a blank picture that an engine processes at its start, to check its processor against the model."""
MAX_SCANS: Final = 64
"""The maximum number of passes in a progressive JPEG. Encoders write about ten."""
MAX_ASPECT: Final = 50
"""The maximum ratio of a picture's sides. Processors scale the shorter side to some hundred pixels, and the longer one
in proportion.
"""
_SCAN, _END = b"\xda", b"\xd9"
_ALONE: Final = frozenset({b"\x01", b"\xd8"})
"""Markers without a segment."""
# A scan's data also contains stuffed bytes, fill bytes and restart markers, which are not matched.
_MARKER: Final = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)


class BrokenImage(Exception):
    """An image that cannot be decoded or encoded. Sequences that contain it fail."""


class UnservedPicture(Exception):
    """A picture that would take too much work or memory. The message gives an alternative."""


def read_picture(data: bytes, max_pixels: int | None = None) -> Image.Image:
    """Decode a file as transformers' `load_image` does: the first picture in RGB, rotated according to its EXIF data.

    Raise UnservedPicture before decoding. Pillow raises errors of many types for broken files.
    """
    if has_many_scans(data):
        raise UnservedPicture(f"is a JPEG of over {MAX_SCANS} scans: save it with fewer, or as a baseline JPEG")
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        shorter, longer = sorted(image.size)
        if max_pixels is not None and shorter * longer > max_pixels:
            raise UnservedPicture(f"is over {max_pixels} pixels: send a smaller one")
        if longer > MAX_ASPECT * shorter:
            raise UnservedPicture(f"is over {MAX_ASPECT} times as long as wide: send a part of it")
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def breaks_on_errors(what: str) -> Iterator[None]:
    """Raise BrokenImage for any error in the context. `what` names the failed operation."""
    try:
        yield
    except BrokenImage:
        raise
    except Exception as error:  # Pillow raises SyntaxError, struct.error and others in addition to OSError
        raise BrokenImage(f"an image cannot be {what}: {one_line(error, 200)}") from error


def read_sent_picture(data: bytes, digest: bytes) -> Image.Image:
    """Decode a file that the gateway has checked. Raise BrokenImage if its hash is not `digest`."""
    if image_hash(data) != digest:
        raise BrokenImage("an image does not match its hash: it was damaged on its way")
    return read_picture(data)


def has_many_scans(data: bytes) -> bool:
    """Return whether a file is a JPEG with more than `MAX_SCANS` scans.

    Markers inside segments and after the end of the image are not counted.
    """
    scans, at = 0, 2 if data.startswith(b"\xff\xd8") else len(data)
    while scans <= MAX_SCANS and (found := _MARKER.search(data, at)):
        marker, at = found[1], found.end()
        if marker == _END:
            break
        scans += marker == _SCAN
        if marker not in _ALONE:
            at += max(int.from_bytes(data[at : at + 2], "big"), 2)
    return scans > MAX_SCANS
