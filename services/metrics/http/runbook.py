from html import escape
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException
from fastapi.responses import HTMLResponse
from markdown_it import MarkdownIt

from services.metrics.http.static import HEADERS

FOLDER: Final = Path(__file__).resolve().parents[3] / "docs" / "runbook"
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
        known = sorted(path.stem for path in FOLDER.glob("*.md"))
        if name not in known:
            raise HTTPException(404, f"there is no runbook page {name[:80]!r}; known: {', '.join(known)}")
        return HTMLResponse(page(name), headers=HEADERS)

    return router


def page(name: str) -> str:
    """Render one page as HTML. Raise FileNotFoundError if the documentation is not installed."""
    text = (FOLDER / f"{name}.md").read_text()
    return FRAME.format(title=escape(name), body=MarkdownIt("commonmark").enable("table").render(text))
