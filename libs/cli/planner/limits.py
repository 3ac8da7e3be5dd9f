"""The commands `fulcrum planner limits` and `fulcrum planner mode`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from libs.cli.find import find_one_suite, find_suite, get_json, local_user, put_json
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain
from libs.runtime.settings import CommonSettings, load_settings

OF_MODELS: Final = {
    "prefill_min": int, "prefill_max": int, "decode_min": int, "decode_max": int, "workers_min": int,
    "workers_max": int, "gpu_hours_day": float, "tpot_ms": float,
}  # fmt: skip
# The value that `none` stands for, if it is not null.
WITHOUT: Final = {"prefill_min": 1, "decode_min": 1, "workers_min": 0}


def planner_limits(
    settings: Sequence[str],
    *,
    model: str,
    pin: Sequence[str],
    unpin: Sequence[str],
    ready_file: Path | None,
    as_json: bool,
) -> None:
    """Set the limits that are named, and print all of them. Raises StartupError that says what to do."""
    changes = bool(settings or pin or unpin)
    suite = find_one_suite(ready_file) if changes else find_suite(ready_file)
    found: dict[str, Any] = get_json(suite.planner, "/v1/limits", exact=True)
    if changes:
        wanted = found["limits"]
        for setting in settings:
            set_limit(wanted, setting, model)
        wanted["pinned"] = sorted((set(wanted["pinned"]) | set(pin)) - set(unpin))
        token = suite.token or load_settings(CommonSettings).token.get_secret_value()
        found = put_json(suite.planner, f"/v1/limits?actor={quote(local_user())}", wanted, token=token, exact=True)
    if as_json:
        print(json.dumps(found))
        return
    for line in _lines(found["limits"]):
        print(plain(line))
    if not found["kept"]:
        print("Redis is away: a restart of the planner forgets them.")


def set_limit(limits: dict[str, Any], setting: str, model: str) -> None:
    """Apply one NAME=VALUE, to one model or to all. Raises StartupError that says what is wrong with it."""
    if model and setting.lower() == "none":  # its own limits go, those of every model hold again
        limits["models"].pop(model, None)
        return
    name, equals, text = setting.partition("=")
    none = text.lower() == "none"
    if not equals or not text:
        raise StartupError(f"{setting!r} is not NAME=VALUE, such as prefill_min=2")
    if name == "quiet_hours" and not model:
        limits["quiet_hours"] = [] if none else text.split(",")
    elif name == "moves_per_s" and not model:
        limits["moves_per_s"] = _number(name, text, int)
    elif name in OF_MODELS:
        of = limits["models"].setdefault(model, dict(limits["every"])) if model else limits["every"]
        of[name] = WITHOUT.get(name) if none else _number(name, text, OF_MODELS[name])
    else:
        known = ", ".join((*OF_MODELS, *(() if model else ("moves_per_s", "quiet_hours"))))
        raise StartupError(f"{name!r} is no limit{' of a model' if model else ''}: there are {known}")


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        whole = "a whole number" if kind is int else "a number"
        raise StartupError(f"{name} is {whole}, not {text!r}") from None


def _lines(limits: dict[str, Any]) -> list[str]:
    lines = [f"Moves a second: {limits['moves_per_s']}"]
    if limits["quiet_hours"]:
        lines.append(f"Roles stand still (UTC): {', '.join(limits['quiet_hours'])}")
    if limits["pinned"]:
        lines.append(f"Pinned: {', '.join(limits['pinned'])}")
    lines.append(f"Every model: {_of_model(limits['every'])}")
    lines += [f"{name}: {_of_model(each)}" for name, each in sorted(limits["models"].items())]
    return lines


def _of_model(each: dict[str, Any]) -> str:
    def to(role: str) -> str:
        most = each[f"{role}_max"]
        return (
            f"{each[f'{role}_min']} to {most} {role}" if most is not None else f"{each[f'{role}_min']} {role} or more"
        )

    target = "" if each["tpot_ms"] is None else f", TPOT {each['tpot_ms']:g} ms"
    most, hours = each.get("workers_max"), each.get("gpu_hours_day")
    workers = f", {each.get('workers_min') or 0} to {'any number of' if most is None else most} workers"
    named = workers if most is not None or each.get("workers_min") else ""
    started = "" if hours is None else f", {hours:g} GPU-hours a day of started ones"
    return f"{to('prefill')}, {to('decode')}{named}{started}{target}"


def planner_mode(mode: str | None, *, ready_file: Path | None, as_json: bool) -> None:
    """Set the mode if one is given, and print it. Raises StartupError that says what to do."""
    if mode is None:
        found: dict[str, Any] = get_json(find_suite(ready_file).planner, "/v1/mode", exact=as_json)
    else:
        suite = find_one_suite(ready_file)
        token = suite.token or load_settings(CommonSettings).token.get_secret_value()
        found = put_json(suite.planner, "/v1/mode", {"mode": mode, "actor": local_user()}, token=token, exact=as_json)
    if as_json:
        print(json.dumps(found))
        return
    forgotten = "" if found["kept"] else " (Redis is away: a restart of the planner forgets it)"
    print(f"The planner is {found['mode']}{forgotten}.")
