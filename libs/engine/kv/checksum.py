"""The checksum of one KV block on its way: XXH3, which a core computes faster than it copies.

It finds damage, and blocks overwritten while they were copied. It is no defence against a peer that means harm: workers
trust one another.
"""

import xxhash


def block_checksum(data: memoryview) -> int:
    """64 bits over a block's bytes. Other threads run meanwhile."""
    checksum = xxhash.xxh3_64()
    checksum.update(data)  # the one-shot function keeps the interpreter's lock
    return checksum.intdigest()
