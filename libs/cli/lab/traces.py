"""The command `fulcrum lab traces`: what a trace holds, and which kinds there are."""

import json
from pathlib import Path

from rich.table import Table
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.lab.asked import trace_of
from libs.cli.lab.runs import rounded
from libs.lab.traces.describe import describe
from libs.lab.traces.generate import KINDS
from libs.lab.traces.read import KNOWN_FORMATS
from libs.lab.traces.recording import write_trace


def show_traces(
    text: str | None, *, start_s: float, seconds: float, seed: int, write: Path | None, as_json: bool
) -> None:
    """Describe one trace, or list formats and kinds. Raises InvalidRequest."""
    if text is None:
        _list(as_json=as_json)
        return
    trace = trace_of(text, start_s, seconds, seed)
    found = rounded(describe(trace))
    if write is not None:
        write_trace(trace, write)
    if as_json:
        print(json.dumps(found))
        return
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column()
    for name, value in found.items():
        if value:
            shown.add_row(name.replace("_", " "), _words(value))
    make_console().print(shown)


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name or 'none'}: {each:,}" for name, each in value.items() if each is not None)
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _list(*, as_json: bool) -> None:
    if as_json:
        kinds = {
            name: {each.name: {"default": each.default, "meaning": each.says} for each in parameters}
            for name, parameters in KINDS.items()
        }
        print(json.dumps({"formats": {name: list(each) for name, each in KNOWN_FORMATS.items()}, "kinds": kinds}))
        return
    console = make_console()
    console.print(Text.assemble(("Files", "bold"), ", known by their columns or keys:"))
    for name, columns in KNOWN_FORMATS.items():
        console.print(Text.assemble(f"  {name}: ", (", ".join(columns), "dim")))
    console.print(Text.assemble("\n", ("Made", "bold"), ", e.g. poisson:rate=5,isl=1000,osl=200,seconds=600:"))
    for name, parameters in KINDS.items():
        named = ", ".join(f"{each.name}={each.default:g}" for each in parameters)
        console.print(Text.assemble(f"  {name}: ", (named, "dim")))
