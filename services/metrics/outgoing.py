"""The HTTP client port for webhooks, traces and the planner."""

from typing import Protocol

import httpx


class MakeClient(Protocol):
    """The constructor `httpx.AsyncClient`, or one for another network."""

    def __call__(
        self, *, timeout: float, headers: dict[str, str] | None = None, trust_env: bool = True
    ) -> httpx.AsyncClient:
        """Return a new client, to be used as a context."""
        ...
