"""The page's static files and the runbook, served without a build step, foreign resources or inline scripts."""

from html import escape
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, HTTPException
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from markdown_it import MarkdownIt
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


RUNBOOK: Final = Path(__file__).resolve().parents[3] / "docs" / "runbook"
FRAME: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="../icon.svg"><link rel="stylesheet" href="../style.css"></head>
<body><header><h1><a href="../">Fulcrum</a></h1><span>runbook</span></header>
<main class="prose"><article class="panel">{body}</article></main></body></html>
"""


def runbook_router() -> APIRouter:
    router = APIRouter()

    @router.get("/runbook/{name}", response_class=HTMLResponse, include_in_schema=False)
    async def runbook(name: str) -> HTMLResponse:
        """Return the runbook page of an alert as HTML."""
        known = sorted(path.stem for path in RUNBOOK.glob("*.md"))
        if name not in known:
            raise HTTPException(404, f"there is no runbook page {name[:80]!r}; known: {', '.join(known)}")
        return HTMLResponse(page(name), headers=HEADERS)

    return router


def page(name: str) -> str:
    """Render one page as HTML. Raise FileNotFoundError if the documentation is not installed."""
    text = (RUNBOOK / f"{name}.md").read_text()
    return FRAME.format(title=escape(name), body=MarkdownIt("commonmark").enable("table").render(text))
