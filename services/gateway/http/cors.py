"""Web pages of other origins that may read answers."""

from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS: Final = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
EXPOSED: Final = ("x-request-id", "retry-after", "x-fulcrum-expected-wait-ms")
"""Headers of answers that pages may read, beside those that every page may."""
MAX_AGE_S: Final = 600
"""How long a browser remembers what it may ask."""


def cross_origin(app: ASGIApp, origins: str) -> ASGIApp:
    """The app, open to pages of these comma-separated origins, or of all for `*`. A preflight has no key, and is
    answered before anything asks for one; what follows it needs its key as ever."""
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",")],
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=MAX_AGE_S,
    )
