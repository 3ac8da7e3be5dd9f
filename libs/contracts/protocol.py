"""Compatibility between releases of gateways and workers. Pure.

Each side states the protocol it speaks and the oldest that it still understands. A release that changes the meaning
of a frame increments PROTOCOL; one that drops an older meaning increments OLDEST. A peer that states nothing
predates the handshake, which is protocol 1.
"""

from typing import Final

from libs.contracts.errors import VersionMismatch

PROTOCOL: Final = 2
OLDEST: Final = 1


def check_protocol(peer: str, protocol: int, oldest: int) -> None:
    """Raise VersionMismatch if `peer`, which stated these versions, and this process do not understand each other."""
    protocol, oldest = protocol or 1, oldest or 1
    if protocol < OLDEST:
        raise VersionMismatch(
            f"{peer} speaks protocol {protocol}, and this release understands {OLDEST} to {PROTOCOL}: upgrade it first"
        )
    if oldest > PROTOCOL:
        raise VersionMismatch(
            f"{peer} understands protocols from {oldest} on, and this release speaks {PROTOCOL}: upgrade this first"
        )
