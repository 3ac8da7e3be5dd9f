"""The common parts of all reports: a folder, a self-contained HTML page, and plots in it."""

import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, Final

from libs.contracts.errors import InvalidRequest

# matplotlib draws black on white, so the page has no dark theme.
STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#1c2430;background:#fff}
h1{font-size:1.5em;margin:0 0 .2em}h2{font-size:1.1em;margin:2em 0 .4em}p{margin:.3em 0}.dim{color:#667}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35em .6em;text-align:right;border-bottom:1px solid #e3e7ee;white-space:nowrap}
th:first-child,td:first-child{text-align:left}tr.best td{font-weight:600;background:#f0f7f1}
.scroll{overflow-x:auto}svg{max-width:100%;height:auto}svg>text{font-size:12px;fill:currentColor}
@media(prefers-color-scheme:dark){body{background:#12161c;color:#e4e9f0}th,td{border-color:#2a323d}.dim{color:#99a}
tr.best td{background:#16291b}.plot svg{background:#fff;border-radius:6px}}
"""


def make_folder(folder: Path) -> None:
    """Make the report's folder. Raise InvalidRequest if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot write a report to {folder}: {error.strerror}") from None


def html_page(title: str, body: str) -> str:
    """Return a whole page. `title` is text, `body` is HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
{body}
</body></html>
"""


def check_plots(option: str = "--report") -> None:
    """Raise InvalidRequest if matplotlib is missing, before minutes of computation rather than after."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 (only where a report is asked for)
    except ImportError:
        raise InvalidRequest(f"{option} needs matplotlib: pip install 'fulcrum-serving[plots]'") from None
    mpl.use("Agg")


def draw_svg(draw: Callable[[Any], None]) -> str:
    """Return an HTML element with the output of `draw` on matplotlib's axes. Raise InvalidRequest without
    matplotlib.
    """
    check_plots()
    from matplotlib import pyplot  # noqa: PLC0415 (only where a report is asked for)

    figure, axes = pyplot.subplots(figsize=(10, 3.6), layout="constrained")
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return f'<div class="plot">{re.sub(r"^.*?<svg", "<svg", drawn.getvalue(), flags=re.DOTALL)}</div>'
