"""The port to the responses that are kept for their tenants, so that later ones can go on from them."""

from typing import Final, Protocol

MAX_RESPONSES: Final = 1_000
"""Kept for one tenant; the oldest make room."""
MAX_TENANT_BYTES: Final = 64 * 1024**2
"""Of all responses of one tenant; the oldest make room."""
MAX_RESPONSE_BYTES: Final = 1024**2
"""Of one, with the conversation that led to it; a larger one is not kept."""


class ResponsesDown(Exception):
    """The store does not answer in time."""


class ResponseStore(Protocol):
    """Values by tenant and id. Raises ResponsesDown."""

    async def keep(self, tenant: str, response_id: str, value: bytes, keep_s: int) -> bool:
        """Keep a value for that long, within the bounds above; False where it is too large."""
        ...

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """None: there is none of this tenant, or it is over."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
