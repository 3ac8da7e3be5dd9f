"""The commands `fulcrum models list`, `add`, `remove`, `pin`, `reserve` and `forecast`, which call the planner."""

import json
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
from rich.table import Table
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import TIMEOUT_S, error_text, find_one_suite, find_suite, get_json, key_headers, no_suite
from libs.contracts.errors import InvalidRequest, StartupError, quoted
from libs.contracts.foreign_text import plain, plain_values
from libs.runtime.settings import CommonSettings, load_settings

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB|B)?", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BUILTIN: Final = "builtin:sim"


def size_of(text: str) -> int:
    """Return the bytes of `16GB`, `141 GB`, `500MB`. Raise InvalidRequest."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise InvalidRequest(f"--size is {quoted(text)}: it must be a number of bytes such as 16GB")
    return round(float(found[1]) * _UNITS[(found[2] or "").upper()])


def show_list(ready_file: Path | None, *, as_json: bool) -> None:
    found = _catalogue(ready_file, exact=as_json)
    if as_json:
        print(json.dumps(found["models"]))
        return
    console, shown = make_console(), _table(
        "model", "state", "workers", "load", "wake", "last use", "next use", "running", "waits", "kept"
    )  # fmt: skip
    for each in found["models"]:
        measured = "" if each["load_measured"] else "~"
        name = f"{each['name']} (of {each['parent']})" if each["parent"] else each["name"]
        shown.add_row(
            name, each["state"], ", ".join(each["workers"]) or "–", f"{measured}{each['load_s']:.1f} s",
            f"{each['wake_s']:.1f} s", (each["last_use"] or "–")[11:19] or "–", _ahead(each["next_use_s"]),
            str(each["in_flight"]), str(each["waiting"]), _kept(each),
        )  # fmt: skip
    console.print(shown)
    for each in found["models"]:
        if each["error"]:
            console.print(Text.assemble((f"{each['name']} cannot be loaded", "red"), f": {each['error']}"))
    adapters = sum(bool(each["parent"]) for each in found["models"])
    beside = f" and {adapters} adapters" if adapters else ""
    count = f"{len(found['models']) - adapters} models{beside}"
    console.print(f"\n{count} on {found['gpus']} GPUs; ~: load time as stated, not measured yet")


def show_forecast(ready_file: Path | None, *, as_json: bool) -> None:
    """Print the numbers of present and expected active models, and the next evictions."""
    found = _catalogue(ready_file, exact=as_json)
    models = found.pop("models")
    found["next_uses"] = {each["name"]: each["next_use_s"] for each in models}
    if as_json:
        print(json.dumps(found))
        return
    console = make_console()
    count = sum(not each["parent"] for each in models)
    console.print(
        f"{found['active_now']} of {count} models are active; {found['needed_gpus']} of {found['gpus']} GPUs have"
        f" work, {found['kept_gpus']} are kept by floors, pins and reservations"
    )
    shown = _table("models", "expected", "p50", "p90", "p99")
    _add(shown, f"at once, in the {found['window_s']:g} s that run", found["at_once"])
    for seconds, spread in found["asked_within"].items():
        _add(shown, f"asked within {int(seconds) // 60} min", spread)
    if any(each["parent"] for each in models):
        for seconds, spread in found["adapters_asked_within"].items():
            _add(shown, f"adapters asked within {int(seconds) // 60} min", spread)
    console.print(shown)
    if found["reserve_gpus"] is None:
        console.print("There is no advice on reservations before a window has passed.")
    else:
        console.print(
            f"GPUs to reserve (99 % of windows): {found['reserve_gpus']}, after {found['windows']} windows seen"
        )
    if found["next_evicted"]:
        console.print("\nNext to lose its worker:")
        for each in found["next_evicted"][:8]:
            console.print(Text.assemble(f"  {each['model']} on {each['worker']}: ", (each["why"], "dim")))


def add(
    name: str, *, source: str | None, size: str | None, ready_file: Path | None, as_json: bool, **fields: Any
) -> None:
    """Add a model, or change the given fields of one that exists."""
    body = {key: value for key, value in fields.items() if value is not None}
    if source is not None:
        is_sim = source == BUILTIN
        body["source"] = source if is_sim else str(Path(source).expanduser().resolve())
    if size is not None:
        body["size_bytes"] = size_of(size)
    _show_model(_send("PUT", f"/v1/models/{quote(name)}", body, ready_file), as_json=as_json)


def remove(name: str, *, ready_file: Path | None, as_json: bool) -> None:
    found = _send("DELETE", f"/v1/models/{quote(name)}", None, ready_file)
    print(json.dumps(found) if as_json else f"{plain(name)} is removed: what runs ends, who waits is answered 404")


def reserve(name: str, gpus: int, *, start: str, end: str, ready_file: Path | None, as_json: bool) -> None:
    """Reserve GPUs at a time of the day. 0 GPUs end the model's reservations."""
    body = {"gpus": gpus, "from_time": start, "to_time": end}
    _show_model(_send("PUT", f"/v1/models/{quote(name)}/reservations", body, ready_file), as_json=as_json)


def _catalogue(ready_file: Path | None, *, exact: bool) -> dict[str, Any]:
    found: dict[str, Any] = get_json(find_suite(ready_file).planner, "/v1/models", exact=exact)
    return found


def _send(method: str, path: str, body: dict[str, Any] | None, ready_file: Path | None) -> dict[str, Any]:
    suite = find_one_suite(ready_file)
    token = suite.token or load_settings(CommonSettings).token.get_secret_value()
    headers = {"authorization": f"Bearer {token}"} if token else key_headers(suite.planner)
    try:
        answer = httpx.request(
            method, f"{suite.planner}{path}", json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False
        )
    except httpx.TransportError:
        raise no_suite(suite.planner) from None
    if not answer.is_success:
        raise StartupError(error_text(answer))
    found: dict[str, Any] = answer.json()
    return found


def _show_model(model: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(model))
        return
    model = plain_values(model)
    kept = _kept(model)
    print(
        f"{model['name']}: {model['size_bytes'] / 1e9:.1f} GB, {model['state']}, about {model['load_s']:.1f} s to load"
        f"{'; kept: ' + kept if kept != '–' else ''}"
    )


def _kept(model: dict[str, Any]) -> str:
    parts = [f"floor {model['floor']}"] if model["floor"] else []
    parts += ["pinned"] if model["pinned"] else []
    parts += [f"{each['gpus']} from {each['from_time']} to {each['to_time']}" for each in model["reservations"]]
    return ", ".join(parts) or "–"


def _ahead(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 90:
        return f"in {seconds:.0f} s"
    return f"in {seconds / 60:.0f} min" if seconds < 5_400 else f"in {seconds / 3_600:.0f} h"


def _table(*titles: str) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        shown.add_column(title, no_wrap=True)
    return shown


def _add(shown: Table, title: str, spread: dict[str, Any] | None) -> None:
    if spread is None:
        shown.add_row(title, *["–"] * 4)
        return
    shown.add_row(title, f"{spread['expected']:.1f}", *(str(spread[name]) for name in ("p50", "p90", "p99")))
