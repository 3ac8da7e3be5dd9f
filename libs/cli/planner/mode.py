"""What `fulcrum planner mode` does."""

import json
from pathlib import Path
from typing import Any

from libs.cli.find import find_one_suite, find_suite, get_json, put_json
from libs.runtime.settings import CommonSettings, load_settings

ACTOR = "fulcrum planner"


def planner_mode(mode: str | None, *, ready_file: Path | None, as_json: bool) -> None:
    """Print the mode, after setting it where one is named. Raises StartupError that says what to do."""
    if mode is None:
        found: dict[str, Any] = get_json(find_suite(ready_file).planner, "/v1/mode")
    else:
        suite = find_one_suite(ready_file)
        token = suite.token or load_settings(CommonSettings).token.get_secret_value()
        found = put_json(suite.planner, "/v1/mode", {"mode": mode, "actor": ACTOR}, token=token)
    if as_json:
        print(json.dumps(found))
        return
    forgotten = "" if found["kept"] else " (Redis is away: a restart of the planner forgets it)"
    print(f"The planner is {found['mode']}{forgotten}.")
