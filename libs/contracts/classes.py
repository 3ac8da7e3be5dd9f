"""Service classes with a meaning to gateways and workers; a client may name others."""

from typing import Final

DEFAULT_CLASS: Final = "online"
# No one waits for it in person, so it yields to every other class.
BATCH_CLASS: Final = "batch"
