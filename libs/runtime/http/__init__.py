"""HTTP serving by uvicorn inside a service's own event loop.

The socket is bound first, so that errors are clear. Bounds limit what a client may send, hold open and leave
unfinished.
"""

from libs.runtime.http.serve import bind, serve_http
from libs.runtime.http.settings import ConnectionGuard, HttpBounds

__all__ = ["ConnectionGuard", "HttpBounds", "bind", "serve_http"]
