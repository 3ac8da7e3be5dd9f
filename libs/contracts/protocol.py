"""Which releases of gateways and workers understand each other. Pure.

Each side says which protocol it speaks, and the oldest that it still understands. A release that changes what a frame
means counts PROTOCOL up; one that gives up an older meaning counts OLDEST up. Who says nothing is of a release before
the handshake, which is protocol 1.
"""

from typing import Final

from libs.contracts.errors import VersionMismatch

PROTOCOL: Final = 2
OLDEST: Final = 1


def check_protocol(peer: str, protocol: int, oldest: int) -> None:
    """Raises VersionMismatch where `peer`, which said these, and this process do not understand each other."""
    protocol, oldest = protocol or 1, oldest or 1
    if protocol < OLDEST:
        raise VersionMismatch(
            f"{peer} speaks protocol {protocol}, and this release understands {OLDEST} to {PROTOCOL}: upgrade it first"
        )
    if oldest > PROTOCOL:
        raise VersionMismatch(
            f"{peer} understands protocols from {oldest} on, and this release speaks {PROTOCOL}: upgrade this first"
        )
