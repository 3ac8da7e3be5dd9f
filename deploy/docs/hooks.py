"""What MkDocs does to pages that are read elsewhere too: on the metrics service's /runbook, and in the repository."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
# [text](target), as far as target is no address and no anchor of the same page.
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name runbooks by file, and show links to what lies outside the site as text."""
    folder = (DOCS / page.file.src_path).parent

    def rewritten(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if (folder / f"{target}.md").is_file():
            return f"[{text}]({target}.md{anchor})"
        inside = (folder / target).resolve().is_relative_to(DOCS)
        return found[0] if inside else text

    return LINK.sub(rewritten, markdown)
