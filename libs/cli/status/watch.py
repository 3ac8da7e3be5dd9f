"""The command `fulcrum status`, once or once a second until Ctrl-C."""

import json
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Group
from rich.live import Live
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.cli.status.answer import STATUS_PATH, parse_status
from libs.cli.status.show import lines
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain

PERIOD_S: Final = 1.0


def show_status(ready_file: Path | None, *, watch: bool, as_json: bool) -> None:
    """Print the status. Raises StartupError if there is no suite."""
    url, console = find_suite(ready_file).metrics, make_console()
    if not watch or as_json:
        while True:
            answer = get_json(url, STATUS_PATH, exact=as_json)
            if as_json:
                print(json.dumps(answer), flush=True)
            else:
                console.print(_page(answer))
            if not watch:
                return
            time.sleep(PERIOD_S)
    page = _page(get_json(url, STATUS_PATH))
    with Live(page, console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(PERIOD_S)
            try:
                page = _page(get_json(url, STATUS_PATH))
            except StartupError as error:
                page = Group(page, Text.assemble((plain(error.message), "bold red"), "; the figures above are old"))
            live.update(page, refresh=True)


def _page(answer: Any) -> Group:
    return Group(*lines(parse_status(answer)))
