"""A port for what vLLM will listen on in a while."""

import errno
import random
import socket
from typing import Final

PORTS: Final = range(20_000, 32_000)
"""Below those that Linux gives to whoever asks for any: one of them could be somebody's by the time vLLM takes it."""


def free_port(host: str) -> int:
    """One that nobody listens on now. Raises OSError where none is free, or the host has not that address."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on {host}")
