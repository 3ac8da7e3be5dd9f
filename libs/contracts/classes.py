"""Classes of service that mean something to gateways and workers; a client may name others."""

from typing import Final

DEFAULT_CLASS: Final = "online"
BATCH_CLASS: Final = "batch"
"""Nobody waits in person: everybody else goes first."""
