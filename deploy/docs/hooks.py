"""MkDocs hooks for pages that the metrics service (/runbook) and the repository show too."""

import re
import shutil
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Search in a page opened from disk needs this script, which the theme would load from the network.
SHIM_URL = re.compile(r'https://[^"]+/iframe-worker/shim')
SHIM = Path(__file__).with_name("iframe-worker.js")
# A long comment after a command would otherwise extend beyond the edge of the page.
STYLE = "<style>.language-sh pre>code{white-space:pre-wrap}</style></head>"
# [text](target), unless the target is a URL or an anchor on the same page.
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite a page's links, and exclude pages outside the navigation from search, except runbooks.

    Links to runbooks get the name of their file. Links to files outside the site become plain text.
    """
    if page.file.inclusion.is_not_in_nav() and not page.file.src_path.startswith("runbook/"):
        page.meta["search"] = {"exclude": True}
    folder = (DOCS / page.file.src_path).parent

    def rewritten(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if (folder / f"{target}.md").is_file():
            return f"[{text}]({target}.md{anchor})"
        inside = (folder / target).resolve().is_relative_to(DOCS)
        return found[0] if inside else text

    return LINK.sub(rewritten, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the search script from the site itself, and wrap long commands."""
    up = "../" * page.url.count("/")
    return SHIM_URL.sub(f"{up}assets/{SHIM.name}", output).replace("</head>", STYLE, 1)


def on_post_template(output_content: str, **_: Any) -> str:
    """Load the search script from the site's root in the 404 page, which may be served at any depth."""
    return SHIM_URL.sub(f"/assets/{SHIM.name}", output_content)


def on_post_build(config: Any, **_: Any) -> None:
    """Copy the search script and its licence into the site."""
    for file in (SHIM, SHIM.with_suffix(".LICENSE")):
        shutil.copy(file, Path(config.site_dir) / "assets")
