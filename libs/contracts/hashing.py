"""Chained block hashes: equal hashes mean equal tokens from the very start, on equal weights, for one tenant.

Both gateway and engine compute them, so the definition is a contract: `h[i] = blake2b-128(h[i-1] || tokens of block i
as little-endian uint32 || images)`. The root is a hash of all other inputs of KV. `images` is empty for text. For each
image with tokens in the block it holds the image's hash and its first position.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16
IMAGE_HASH_BYTES = 32


class ImageSpan(NamedTuple):
    """The tokens [first, first + tokens) of a prompt, which represent one image."""

    first: int
    tokens: int
    digest: bytes
    """The hash of the image's file by `image_hash`."""


def image_hash(data: bytes) -> bytes:
    """Return the hash that identifies an image's KV and embeddings."""
    return blake2b(data, digest_size=IMAGE_HASH_BYTES).digest()


def chain_root(*, model_revision: str, kv_layout: str, adapter: str = "", tenant_salt: str = "") -> bytes:
    """Return the start of a chain; `kv_layout` holds dtype and block size."""
    parts = (model_revision, kv_layout, adapter, tenant_salt)
    return blake2b("\0".join(parts).encode(), digest_size=HASH_BYTES).digest()


def block_hashes(
    root: bytes,
    token_ids: NDArray[np.int32] | Sequence[int],
    block_size_tokens: int,
    images: Sequence[ImageSpan] = (),
    *,
    first: int = 0,
) -> list[bytes]:
    """Return the hashes of the full blocks of `token_ids`; a partial last block has none.

    `first` is the position of the first of them, in whose prompt `images` lie in order.
    """
    packed = np.ascontiguousarray(token_ids, dtype="<u4").tobytes()
    width = 4 * block_size_tokens
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(packed) - width + 1, width):
        content = packed[start : start + width]
        if images:
            at = first + start // 4
            content += _images_in(images, at, at + block_size_tokens)
        parent = blake2b(parent + content, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def _images_in(images: Sequence[ImageSpan], first: int, end: int) -> bytes:
    return b"".join(
        image.digest + image.first.to_bytes(8, "little")
        for image in images
        if image.first < end and first < image.first + image.tokens
    )
