from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS: Final = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
EXPOSED: Final = ("x-request-id", "retry-after", "x-fulcrum-expected-wait-ms")
"""The response headers that pages may read in addition to those that CORS always exposes."""
MAX_AGE_S: Final = 600
"""The time for which a browser may cache a preflight's answer."""


def cross_origin(app: ASGIApp, origins: str) -> ASGIApp:
    """Open the app to pages of these comma-separated origins, or to all pages for `*`.

    A preflight carries no key and is answered before the key gate. The request that follows it needs its key.
    """
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",")],
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=MAX_AGE_S,
    )
