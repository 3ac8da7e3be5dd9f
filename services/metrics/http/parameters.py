"""Query parameters that several routes of the metrics service share."""

from typing import Annotated, Any

from fastapi import Query

from services.metrics.accounting.series import ALLOWED_WINDOWS
from services.metrics.state import MS_NS

MAX_UNIX_MS = 2**53 - 1
End = Annotated[int | None, Query(ge=0, le=MAX_UNIX_MS, description="End of the window in Unix ms; now by default.")]
Window = Annotated[str, Query(description=f"How far to look back: {ALLOWED_WINDOWS}.")]
BAD_QUERY: dict[int | str, dict[str, Any]] = {400: {"description": "the error names the allowed values"}}
BAD_WINDOW: dict[int | str, dict[str, Any]] = {
    400: {"description": "the window is invalid; the error names the allowed values"}
}


def requested_end_ns(end_unix_ms: int | None, newest_ns: int) -> int:
    """Return the requested end, limited to the newest data; return the newest data's end if none is requested."""
    return newest_ns if end_unix_ms is None else min(end_unix_ms * MS_NS, newest_ns)
