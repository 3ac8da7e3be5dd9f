"""Chained block hashes: equal hashes mean equal tokens from the very start, on equal weights, for one tenant.

Both gateway and engine compute them, so the definition is a contract: `h[i] = blake2b-128(h[i-1] || tokens of block
i as little-endian uint32)`. The root is a hash of all else that makes KV differ.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16


def chain_root(*, model_revision: str, kv_layout: str, adapter: str = "", tenant_salt: str = "") -> bytes:
    """Return the start of a chain; `kv_layout` holds dtype and block size."""
    parts = (model_revision, kv_layout, adapter, tenant_salt)
    return blake2b("\0".join(parts).encode(), digest_size=HASH_BYTES).digest()


def block_hashes(root: bytes, token_ids: NDArray[np.int32] | Sequence[int], block_size_tokens: int) -> list[bytes]:
    """Return the hashes of the full blocks of `token_ids`; a partial last block has none."""
    packed = np.ascontiguousarray(token_ids, dtype="<u4").tobytes()
    width = 4 * block_size_tokens
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(packed) - width + 1, width):
        parent = blake2b(parent + packed[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
