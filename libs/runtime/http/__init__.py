"""HTTP serving inside a service's own event loop: uvicorn, with the socket bound first so that errors are plain, and
with bounds on what a client may send, hold open and leave unfinished.
"""

from libs.runtime.http.serve import bind, serve_http
from libs.runtime.http.settings import ConnectionGuard, HttpBounds

__all__ = ["ConnectionGuard", "HttpBounds", "bind", "serve_http"]
