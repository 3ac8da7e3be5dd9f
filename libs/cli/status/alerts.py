"""The commands `fulcrum alerts`, with its silences, and `fulcrum advice`."""

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import typer
from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.cli.find import ask_json, find_one_suite, find_suite, get_json, local_user
from libs.cli.status.answer import STATUS_PATH, ActionAnswer, CauseAnswer, Status, VerdictAnswer, parse_status
from libs.cli.status.show import commands, instructions, span
from libs.contracts.errors import InvalidRequest, StartupError, quoted
from libs.launch.ready import Ready
from libs.runtime.settings import CommonSettings, load_settings

# Changes that `--all` shows.
RECENT: Final = 50
STYLES: Final = {"critical": "bold red", "warning": "yellow"}


def show_alerts(ready_file: Path | None, *, over: bool, as_json: bool) -> None:
    """Print the alerts, the worst first. Raise StartupError if there is no suite."""
    found: dict[str, Any] = get_json(
        find_suite(ready_file).metrics, "/v1/alerts", exact=as_json, limit=str(RECENT if over else 0)
    )
    if as_json:
        print(json.dumps(found))
        return
    console, now_ms = make_console(), time.time_ns() // 1_000_000
    if not found["firing"]:
        console.print("No alert fires.", style="green")
    silences: list[dict[str, Any]] = found.get("silences", [])  # an older service has none
    silent = {alert: each for each in silences if not each["alert_id"] for alert in each["alerts"]}
    seen = {each["alert_id"]: each for each in silences if each["alert_id"]}
    for alert in sorted(found["firing"], key=lambda each: (each["id"] in silent, each["severity"] != "critical")):
        console.print(alert_line(alert, now_ms, silent=alert["id"] in silent), soft_wrap=True)
        if alert.get("command"):  # an older service reports none
            console.print(Text.assemble("    run: ", (alert["command"], "bold")), soft_wrap=True)
        for each in (silent.get(alert["id"]), seen.get(alert["id"])):
            if each is not None:
                console.print(Text(f"    {silence_line(each, now_ms)}", "cyan"), soft_wrap=True)
        console.print(Text(f"    what to do: {alert['runbook_url']}", "dim"), soft_wrap=True)
    for each in silences:
        if not each["alerts"] and not each["alert_id"]:
            console.print(Text(f"{about(each)} {silence_line(each, now_ms)}", "dim"), soft_wrap=True)
    for name in found["held_back"]:
        console.print(Text(f"{name} is not judged now: the telemetry that it stands on is old.", "yellow"))
    for alert in found["recent"]:
        if alert["state"] != "firing":
            console.print(alert_line(alert, now_ms), soft_wrap=True)


def about(silence: dict[str, Any]) -> str:
    """Describe the alerts that a silence covers, such as "FulcrumWorkerStuck worker=gpu-3"."""
    labels = " ".join(f"{name}={value}" for name, value in silence["labels"].items())
    return " ".join(filter(None, (silence["alert_name"], labels))) or silence["alert_id"]


def silence_line(silence: dict[str, Any], now_ms: int) -> str:
    """Return a silence's remaining time, author, reason and id."""
    why = f": {silence['reason']}" if silence["reason"] else ""
    if silence["alert_id"]:
        return f"acknowledged by {silence['actor']} for {span(now_ms - silence['made_unix_ms'])}{why} ({silence['id']})"
    left = span(silence["until_unix_ms"] - now_ms)
    return f"silent for {left} more, by {silence['actor']}{why} ({silence['id']})"


def _reason(alert: dict[str, Any]) -> str:
    """Return the present reason of an alert, and say so if its condition is gone but the alert is not yet over."""
    now = str(alert.get("now") or alert["reason"])  # an older service reports neither
    return f"clearing: {now}; when it fired: {alert['reason']}" if alert.get("clearing") else now


def alert_line(alert: dict[str, Any], now_ms: int, *, silent: bool = False) -> Text:
    """Return an alert's name, labels, age and reason."""
    over = alert["ended_unix_ms"] is not None
    style = "dim" if over or silent else STYLES.get(alert["severity"], "")
    subject = " ".join(alert["labels"].values())
    when = (
        f"ended {span(now_ms - alert['ended_unix_ms'])} ago"
        if over
        else f"for {span(now_ms - alert['started_unix_ms'])}"
    )
    return Text.assemble(
        ("✓ " if over else "△ " if silent else "▲ ", style),
        (alert["name"], style),
        f" {subject} " if subject else " ",
        (f"({when}): ", "dim"),
        alert["ended_because"] or _reason(alert),
    )


_LENGTH: Final = re.compile(r"(\d{1,6}(?:\.\d+)?)([smhd])", re.ASCII)
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
# The prefix of every alert's name, which may be left out.
PREFIX: Final = "Fulcrum"


def make_silence(
    ready_file: Path | None, name: str, labels: list[str], length: str, *, reason: str, as_json: bool
) -> None:
    """Silence alerts. Raise InvalidRequest or StartupError, which says what is allowed."""
    body = {"alert_name": _full(name), "labels": dict(map(_label, labels)), "for_s": seconds_of(length)}
    _print(
        [_ask(find_one_suite(ready_file), "POST", "/v1/alerts/silences", body, reason, exact=as_json)], as_json=as_json
    )


def acknowledge(ready_file: Path | None, alert: str, *, reason: str, as_json: bool) -> None:
    """Acknowledge all alerts of a name, or the one with an id. Raise StartupError if no such alert fires."""
    suite = find_one_suite(ready_file)
    firing = get_json(suite.metrics, "/v1/alerts", exact=True, limit="0")["firing"]
    found = [each["id"] for each in firing if alert in (each["id"], each["name"]) or _full(alert) == each["name"]]
    if not found:
        names = ", ".join(sorted({each["id"] for each in firing})) or "none"
        raise StartupError(f"no alert {quoted(alert)} fires; these do: {names}")
    path = "/v1/alerts/acks"
    made = [_ask(suite, "POST", path, {"alert_id": each}, reason, exact=as_json) for each in found]
    _print(made, as_json=as_json)


def end_silence(ready_file: Path | None, silence_id: str, *, as_json: bool) -> None:
    """End a silence. Raise StartupError if none has this id."""
    if re.fullmatch(r"[0-9a-f]{1,32}", silence_id) is None:
        raise InvalidRequest(f"{quoted(silence_id)} is not the id of a silence: `fulcrum alerts` lists those in force")
    suite = find_one_suite(ready_file)
    found = ask_json(
        suite.metrics, "DELETE", f"/v1/alerts/silences/{silence_id}", None, token=_token(suite), exact=as_json
    )
    if as_json:
        print(json.dumps(found))
    else:
        print(f"{about(found)} is no longer silenced." if not found["alert_id"] else f"{about(found)} is open again.")


def seconds_of(length: str) -> float:
    """Return the seconds of a time such as "90m". Raise InvalidRequest."""
    found = _LENGTH.fullmatch(length.strip())
    if found is None:
        raise InvalidRequest(f"--for is {quoted(length)}: it must be a number and s, m, h or d, such as 2h")
    return float(found[1]) * _UNITS_S[found[2]]


def _full(name: str) -> str:
    return name if not name or name.startswith(PREFIX) else PREFIX + name


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidRequest(f"--label is {quoted(text)}: it must be NAME=VALUE, such as worker=gpu-3")
    return name, value


def _ask(suite: Ready, method: str, path: str, body: dict[str, Any], reason: str, *, exact: bool) -> dict[str, Any]:
    signed = body | {"actor": local_user(), "reason": reason}
    answer: dict[str, Any] = ask_json(suite.metrics, method, path, signed, token=_token(suite), exact=exact)
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


MIXED = "mixed"


def show_advice(ready_file: Path | None, *, apply: bool, yes: bool, as_json: bool) -> None:
    """Print the advice. Raise StartupError if there is no suite or the data are too old to act on."""
    suite = find_one_suite(ready_file) if apply else find_suite(ready_file)
    status = parse_status(get_json(suite.metrics, STATUS_PATH))
    verdict, advised = status.verdict, commands(status.verdict)
    if as_json:
        said = {"verdict": verdict.code, "sentence": verdict.sentence, "commands": advised}
        promised = {} if verdict.action is None else {name: getattr(verdict.action, name) for name in PROMISED}
        print(json.dumps(said | {"promised": promised}))
    elif advised:
        print("\n".join(advised))
        if verdict.action is not None and (promise := promise_line(verdict.action)):
            # Standard output contains only commands, to be piped to a shell.
            print(promise, file=sys.stderr)
    elif by_hand := instructions(verdict):
        print("\n".join(by_hand), file=sys.stderr)  # standard output contains only commands
    else:
        print(f"Nothing to run: {verdict.sentence}", file=sys.stderr)
    # The verdict may have no command, such as a lack of CPU, while a later cause has one.
    found: tuple[VerdictAnswer | CauseAnswer, ...] = (verdict, *verdict.causes)
    cause = next((each for each in found if each.action is not None and each.action.command), None)
    if apply and cause is not None:
        _apply(status, cause, ready_file, yes=yes, as_json=as_json)


PROMISED: Final = (
    "pressure_least", "pressure_most", "backlog_least_s", "backlog_most_s", "ttft_p95_least_ms", "ttft_p95_most_ms",
    "tpot_p95_least_ms", "tpot_p95_most_ms",
)  # fmt: skip


def promise_line(action: ActionAnswer) -> str:
    """Describe a command's promises other than pressure; empty if there are none."""
    ranges = (
        ("waiting prompts gone in", figures(action.backlog_least_s, action.backlog_most_s), "s"),
        ("TTFT p95 then", figures(action.ttft_p95_least_ms, action.ttft_p95_most_ms), "ms"),
        ("TPOT p95", figures(action.tpot_p95_least_ms, action.tpot_p95_most_ms), "ms"),
    )
    said = ", ".join(f"{name} {ends} {unit}" for name, ends, unit in ranges if ends)
    return f"Promised: {said}." if said else ""


def figures(least: float | None, most: float | None) -> str:
    """Format a range as "6 to 9", with one decimal below 10; empty if it is unknown."""
    if least is None or most is None:
        return ""
    low, high = (f"{each:.0f}" if each >= 10 else f"{each:.1f}" for each in (least, most))
    return low if low == high else f"{low} to {high}"


ADVICE_PATH: Final = "/v1/advice"


class PromiseAnswer(msgspec.Struct, frozen=True):
    """A followed command, with the promised and the measured pressure."""

    code: str
    command: str
    pressure_least: float
    pressure_most: float
    came: float
    kept: bool


class FigureAnswer(msgspec.Struct, frozen=True):
    """The number of kept promises of one figure."""

    figure: str
    kept: int
    of: int


class OutcomeAnswer(msgspec.Struct, frozen=True):
    """One figure of a followed command, promised and measured."""

    figure: str
    code: str
    command: str
    least: float
    most: float
    came: float
    kept: bool


class ScoreAnswer(msgspec.Struct, frozen=True):
    kept: int
    of: int
    promises: list[PromiseAnswer] = []
    by_figure: list[FigureAnswer] = []  # an older service has neither
    outcomes: list[OutcomeAnswer] = []


# The displayed name and unit of each figure other than pressure.
FIGURES: Final = {"backlog": ("backlog gone", "s"), "ttft": ("TTFT p95", "ms"), "tpot": ("TPOT p95", "ms")}
# The kinds of promises that have a line of their own, by their names in the answer.
NAMES: Final = {"pressure": "pressure", "backlog": "backlog", "ttft": "TTFT", "tpot": "TPOT"}


def show_score(ready_file: Path | None, *, as_json: bool) -> None:
    """Print how many followed commands kept their promises, and each of them."""
    answer = get_json(find_suite(ready_file).metrics, ADVICE_PATH)
    if as_json:
        print(json.dumps(answer))
        return
    try:
        score = msgspec.convert(answer, ScoreAnswer)
    except msgspec.ValidationError as error:
        raise StartupError(f"the metrics service answered {ADVICE_PATH} in an unknown form: {error}") from None
    if not score.of:
        print("No advised command has been followed since the metrics service started.", file=sys.stderr)
        return
    print(f"{score.kept} of {score.of} followed commands left the pressure that they promised.")
    if score.by_figure:
        kept = ", ".join(f"{NAMES.get(each.figure, each.figure)} {each.kept} of {each.of}" for each in score.by_figure)
        print(f"Advice kept: {kept}.")
    table = plain_table("", "cause", "promised", "came", "command", left=("", "cause", "command"), wraps=("command",))
    for each in score.promises:
        table.add_row(
            Text("kept", "green") if each.kept else Text("missed", "yellow"),
            Text(each.code),
            f"{each.pressure_least:.2f} to {each.pressure_most:.2f}",
            f"{each.came:.2f}",
            Text(each.command),
        )
    for other in score.outcomes:
        if other.figure not in FIGURES:
            continue
        name, unit = FIGURES[other.figure]
        table.add_row(
            Text("kept", "green") if other.kept else Text("missed", "yellow"),
            Text(other.code),
            f"{name} {figures(other.least, other.most)} {unit}",
            f"{figures(other.came, other.came)} {unit}",
            Text(other.command),
        )
    make_console().print(table)


def _apply(
    status: Status, cause: VerdictAnswer | CauseAnswer, ready_file: Path | None, *, yes: bool, as_json: bool
) -> None:
    action = cause.action
    assert action is not None
    if not status.live:
        raise StartupError(f"the data are old ({status.not_live_because}): check again before you act on them")
    if not yes and not typer.confirm(f"{cause.sentence}\nRun `{action.command}`?", err=True):
        raise typer.Exit(1)
    from libs.cli.suite.role import RoleGroup, change_roles  # noqa: PLC0415 (gRPC, which the others do without)

    asyncio.run(
        change_roles(
            [RoleGroup(action.workers, role_text(action))],
            epoch=None,
            reason=f"advice: {cause.code}",
            force=False,
            first_step_s=0,
            ready_file=ready_file,
            as_json=as_json,
        )
    )


def role_text(action: ActionAnswer) -> str:
    """Return the role in the form that `fulcrum role` accepts."""
    return f"{MIXED}:{action.budget_tokens}" if action.role == MIXED and action.budget_tokens else action.role
