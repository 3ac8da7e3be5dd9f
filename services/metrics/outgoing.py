"""What the metrics service posts with: to webhooks, and to a collector of traces."""

from typing import Protocol

import httpx


class MakeClient(Protocol):
    """`httpx.AsyncClient` itself, or what makes one over another network."""

    def __call__(
        self, *, timeout: float, headers: dict[str, str] | None = None, trust_env: bool = True
    ) -> httpx.AsyncClient:
        """A client of its own, to be used as a context."""
        ...
