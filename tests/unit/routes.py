"""The routes of an app, for tests that hold something against every one of them."""

from collections.abc import Sequence

from starlette.routing import BaseRoute, Mount


def routes(within: Sequence[BaseRoute]) -> set[tuple[str, str]]:
    """Method and path of each, included routers' too; MOUNT for what is mounted."""
    found: set[tuple[str, str]] = set()
    for route in within:
        included = getattr(route, "original_router", None)
        if included is not None:  # FastAPI's, of a router
            found |= routes(included.routes)
            continue
        methods = {"MOUNT"} if isinstance(route, Mount) else getattr(route, "methods", None) or {"?"}
        found |= {(method, getattr(route, "path", "?")) for method in methods - {"HEAD"}}
    return found
