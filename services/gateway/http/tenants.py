"""Administration of whole tenants: `fulcrum keys delete-tenant` over REST."""

from typing import Any, Final

from fastapi import APIRouter

from libs.keys.port import KeyStore
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock

_REFUSED: Final[dict[int | str, dict[str, Any]]] = {
    400: {"description": "No tenant can have this name."},
    503: {"description": "Keys cannot be written now: ask again later."},
}


def make_tenant_router(store: KeyStore, table: KeyTable, clock: Clock) -> APIRouter:
    """Return the routes, which the key gate opens to admins alone."""
    router = APIRouter()

    @router.delete(
        "/v1/tenants/{tenant}", tags=["tenants"], summary="Delete a tenant with all that it has.", responses=_REFUSED
    )
    async def delete_tenant(tenant: str) -> dict[str, Any]:
        """Revoke its keys and remove its limits; what it has is nobody's at once, and is deleted within a minute."""
        now_ns = clock.now_ns()
        book = await store.change(lambda before: before.without_tenant(tenant, now_ns))
        table.replace(book, now_ns / 1e9)
        return {"id": tenant, "object": "tenant", "deleted": True}

    return router
