"""The commands `fulcrum alerts silence`, `ack` and `unsilence`, which print what holds afterwards."""

import json
import re
import time
from pathlib import Path
from typing import Any, Final

from libs.cli.console import make_console
from libs.cli.find import ask_json, find_one_suite, get_json, local_user
from libs.cli.status.alerts import about, silence_line
from libs.contracts.errors import InvalidRequest, StartupError, quoted
from libs.launch.ready import Ready
from libs.runtime.settings import CommonSettings, load_settings

_LENGTH: Final = re.compile(r"(\d{1,6}(?:\.\d+)?)([smhd])", re.ASCII)
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
# Every alert's name begins with this; it may be left out.
PREFIX: Final = "Fulcrum"


def make_silence(
    ready_file: Path | None, name: str, labels: list[str], length: str, *, reason: str, as_json: bool
) -> None:
    """Silence alerts. Raises InvalidRequest and StartupError that say what is allowed."""
    body = {"alert_name": _full(name), "labels": dict(map(_label, labels)), "for_s": seconds_of(length)}
    _print(
        [_ask(find_one_suite(ready_file), "POST", "/v1/alerts/silences", body, reason, exact=as_json)], as_json=as_json
    )


def acknowledge(ready_file: Path | None, alert: str, *, reason: str, as_json: bool) -> None:
    """Acknowledge all alerts of a name, or the one with an id. Raises StartupError if no such alert fires."""
    suite = find_one_suite(ready_file)
    firing = get_json(suite.metrics, "/v1/alerts", exact=True, limit="0")["firing"]
    found = [each["id"] for each in firing if alert in (each["id"], each["name"]) or _full(alert) == each["name"]]
    if not found:
        names = ", ".join(sorted({each["id"] for each in firing})) or "none"
        raise StartupError(f"no alert {quoted(alert)} fires, but: {names}")
    path = "/v1/alerts/acks"
    made = [_ask(suite, "POST", path, {"alert_id": each}, reason, exact=as_json) for each in found]
    _print(made, as_json=as_json)


def end_silence(ready_file: Path | None, silence_id: str, *, as_json: bool) -> None:
    """End a silence. Raises StartupError if none has this id."""
    if re.fullmatch(r"[0-9a-f]{1,32}", silence_id) is None:
        raise InvalidRequest(f"{quoted(silence_id)} is no silence's id: `fulcrum alerts` names those that hold")
    suite = find_one_suite(ready_file)
    found = ask_json(
        suite.metrics, "DELETE", f"/v1/alerts/silences/{silence_id}", None, token=_token(suite), exact=as_json
    )
    if as_json:
        print(json.dumps(found))
    else:
        print(f"{about(found)} is silent no more." if not found["alert_id"] else f"{about(found)} is open again.")


def seconds_of(length: str) -> float:
    """Return the seconds of a time such as "90m". Raises InvalidRequest."""
    found = _LENGTH.fullmatch(length.strip())
    if found is None:
        raise InvalidRequest(f"--for is {quoted(length)}: it has to be a number and s, m, h or d, such as 2h")
    return float(found[1]) * _UNITS_S[found[2]]


def _full(name: str) -> str:
    return name if not name or name.startswith(PREFIX) else PREFIX + name


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidRequest(f"--label is {quoted(text)}: it has to be NAME=VALUE, such as worker=gpu-3")
    return name, value


def _ask(suite: Ready, method: str, path: str, body: dict[str, Any], reason: str, *, exact: bool) -> dict[str, Any]:
    asked = body | {"actor": local_user(), "reason": reason}
    answer: dict[str, Any] = ask_json(suite.metrics, method, path, asked, token=_token(suite), exact=exact)
    return answer


def _token(suite: Ready) -> str:
    return suite.token or load_settings(CommonSettings).token.get_secret_value()


def _print(found: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found if len(found) > 1 else found[0]))
        return
    console, now_ms = make_console(), time.time_ns() // 1_000_000
    for each in found:
        count = len(each["alerts"])
        firing = "" if each["alert_id"] else f"; {count} such {'fires' if count == 1 else 'fire'} now"
        console.print(f"{about(each)}: {silence_line(each, now_ms)}{firing}", soft_wrap=True)
