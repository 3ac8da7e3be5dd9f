"""The page's static files, served as they are, without a build step, foreign resources or inline scripts."""

from pathlib import Path
from typing import Any, Final

from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

FOLDER: Final = Path(__file__).parents[1] / "page"
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page(StaticFiles):
    """The folder's files with security headers; `/` is index.html."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER, html=True)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response
