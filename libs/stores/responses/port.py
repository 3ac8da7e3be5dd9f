"""The port to stored responses, which later requests of the same tenant can continue."""

from typing import Final, Protocol

MAX_RESPONSES: Final = 1_000
"""The most responses of one tenant; the oldest make room."""
MAX_TENANT_BYTES: Final = 64 * 1024**2
"""The most bytes of one tenant's responses; the oldest make room."""
MAX_RESPONSE_BYTES: Final = 1024**2
"""The most bytes of a response with the conversation that led to it. Larger ones are not stored."""


class ResponsesDown(Exception):
    """The store does not respond in time."""


class ResponseStore(Protocol):
    """Response values by tenant and id. Methods raise ResponsesDown."""

    async def keep(self, tenant: str, response_id: str, value: bytes, keep_s: int) -> bool:
        """Store a value for `keep_s` within the bounds above, and return False if it is too large."""
        ...

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return the value, or None if this tenant has none with that id or it has expired."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value and return whether it existed."""
        ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...
