"""The commands of `fulcrum planner`: its decisions and their reasons, advice, regret, mode and limits."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.cli.find import find_one_suite, find_suite, get_json, local_user, put_json
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain
from libs.runtime.settings import CommonSettings, load_settings

POLL_S: Final = 0.25
# Decisions requested first, which are all that the planner keeps.
MOST: Final = 1_000
# Decisions requested at each poll while following; fewer are made between two polls.
AT_ONCE: Final = 50
# The kinds whose measured effect is published later.
MEASURED: Final = ("set_role", "set_budget")
PRESSES: Final = 1.0
STYLES: Final = {
    "set_role": "bold cyan",
    "set_budget": "cyan",
    "recommend": "yellow",
    "scale": "bold magenta",
    "role_moved": "green",
    "set_mode": "magenta",
    "set_limits": "magenta",
}


def planner_status(*, ready_file: Path | None, as_json: bool) -> None:
    """Print the planner's state. Raise StartupError if there is no suite."""
    base_url = find_suite(ready_file).planner
    found: dict[str, Any] = get_json(base_url, "/v1/planner", exact=as_json)
    if as_json:
        print(json.dumps(found))
        return
    console = make_console()
    leads = {"ours": "", "anothers": ", another planner leads", "unknown": ", nobody knows who leads"}[found["lead"]]
    moved = found["decisions"].get("set_role", 0)
    console.print(f"{found['planner_id']} is in mode {found['mode']}{leads}; {moved} decisions changed roles.")
    if found["not_live"]:
        console.print(found["not_live"], style="yellow")
    titles = ("model", "prefill", "pressure", "decode", "pressure", "prompts wait", "")
    table = plain_table(*titles, left=("model", ""), wraps=("",))
    for each in found["models"]:
        table.add_row(each["model"], *_stands(each))
    console.print(table if found["models"] else "No worker is registered.")
    for each in get_json(base_url, "/v1/decisions", limit=str(AT_ONCE)):
        if each["action"] != "keep" and not _seen_of_its_own(each):
            console.print(Text("Last: "), _line(each), soft_wrap=True)
            return


def planner_decisions(limit: int, *, follow: bool, keeps: bool, ready_file: Path | None, as_json: bool) -> None:
    """Print the last decisions, and with `follow` new ones until interrupted."""
    base_url, console = find_suite(ready_file).planner, make_console()
    first = _wanted(get_json(base_url, "/v1/decisions", exact=as_json, limit=str(MOST)), keeps=keeps)[:limit]
    shown = _PrintedDecisions(as_json=as_json)
    for each in reversed(first):
        _print(console, each, as_json=as_json)
        shown.is_news(each)
    if not first and not as_json and not follow:
        console.print("No decision changed a worker. --keeps shows why not.")
    while follow:
        time.sleep(POLL_S)
        try:
            reported = get_json(base_url, "/v1/decisions", exact=as_json, limit=str(AT_ONCE))
        except StartupError:  # the planner is restarting
            continue
        for each in reversed(_wanted(reported, keeps=keeps)):
            if shown.is_news(each):
                _print(console, each, as_json=as_json)


class _PrintedDecisions:
    """The decisions already printed: the newest one, and those whose measured effect is still to come."""

    def __init__(self, *, as_json: bool) -> None:
        self._newest = (0, 0)
        self._as_json = as_json
        self._unmeasured: set[str] = set()

    def is_news(self, decision: dict[str, Any]) -> bool:
        """Return whether a decision has not been printed yet, and mark it as printed."""
        place = decision["decided_unix_ns"], decision["sequence"]
        newer = place > self._newest
        measured = decision["measured"] is not None
        again = self._as_json and measured and decision["id"] in self._unmeasured
        self._newest = max(self._newest, place)
        if newer and not measured and decision["action"] in MEASURED:
            self._unmeasured.add(decision["id"])
        elif again:
            self._unmeasured.discard(decision["id"])
        return newer or again


def _print(console: Console, decision: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(decision), flush=True)
    else:
        console.print(_line(decision), soft_wrap=True)


def planner_explain(decision: str, *, lab: bool, ready_file: Path | None, as_json: bool) -> None:
    """Print one decision, with `lab` beside its replay. Raise StartupError if the planner no longer has it."""
    path = f"/v1/decisions/{quote(decision, safe='')}"
    found: dict[str, Any] = get_json(find_suite(ready_file).planner, path, exact=as_json)
    replayed = None
    if lab:
        from libs.cli.planner.in_lab import replayed_in_lab  # noqa: PLC0415 (what only this option needs)

        replayed = replayed_in_lab(found, ready_file)
    if as_json:
        print(json.dumps(found if replayed is None else {**found, "lab": replayed}))
        return
    console = make_console()
    console.print(_line(found), soft_wrap=True)
    for each in found["changes"]:
        budget = f", {each['budget_tokens']} prompt tokens a step" if each["budget_tokens"] else ""
        console.print(f"  {each['worker']}: {each['role']}{budget}")
    if found["candidates"]:
        console.print(
            "\nAlternatives, the chosen one first:" if found["predicted"] else "\nAlternatives, the present one first:"
        )
        console.print(_candidates(found["candidates"]))
    if found["counterfactual"]:
        console.print(_counterfactual(found["counterfactual"]))
    if found["measured"]:
        console.print(
            f"\nSeen before, and {found['measured']['after_ms'] / 1000:.1f} s after (other things happened too):"
        )
        console.print(_seen(found["measured"]))
    if replayed is not None:
        console.print(_in_lab(replayed))


def _wanted(decisions: Iterable[dict[str, Any]], *, keeps: bool) -> list[dict[str, Any]]:
    return [each for each in decisions if keeps or not (each["action"] == "keep" or _seen_of_its_own(each))]


def _seen_of_its_own(decision: dict[str, Any]) -> bool:
    """Return whether the record only reports that a worker has carried out this planner's own decision."""
    return bool(decision["action"] == "role_moved" and decision["actor"] == decision["planner_id"])


def _line(decision: dict[str, Any]) -> Text:
    action = decision["action"]
    clock = decision["time"][11:23]
    named = ", ".join(decision["workers"][:4]) + ("…" if len(decision["workers"]) > 4 else "")
    return Text.assemble(
        (f"{decision['sequence']:>6} ", "dim"),
        (f"{clock}  ", "dim"),
        (f"{action:<10} ", STYLES.get(action, "dim")),
        (f"{named}: " if named else "", "bold"),
        decision["reason"],
    )


def _stands(model: dict[str, Any]) -> Iterator[Text | str]:
    now = model["now"]
    if now is None:
        yield from ("", "", "", "", "", Text(model["unknown"], style="yellow"))
        return
    yield str(now["prefill"])
    yield _pressure(now["prompt_pressure"])
    yield str(now["decode"])
    yield _pressure(now["decode_pressure"])
    yield f"{now['waiting_ms'] / 1000:.1f} s"
    pinned = f"; pinned: {', '.join(model['pinned'])}" if model["pinned"] else ""
    yield f"{model['code'].replace('_', ' ')}{pinned}"


def _candidates(candidates: list[dict[str, Any]]) -> Table:
    table = plain_table("prefill", "decode", "prefill pressure", "decode pressure", "TTFT", "TPOT", "served in time")
    for number, each in enumerate(candidates):
        table.add_row(
            str(each["prefill"]),
            str(each["decode"]),
            _pressure(each["prompt_pressure"]),
            _pressure(each["decode_pressure"]),
            f"{each['ttft_ms'] / 1000:.2f} s",
            f"{each['tpot_ms']:.0f} ms",
            f"{each['served']:.0%}",
            style="bold" if number == 0 else "",
        )
    return table


def _seen(measured: dict[str, Any]) -> Table:
    table = plain_table("", "prefill", "decode", "prefill pressure", "decode pressure", "prompts wait", "decodes")
    for name in ("before", "after"):
        each = measured[name]
        table.add_row(
            name,
            str(each["prefill"]),
            str(each["decode"]),
            _pressure(each["prompt_pressure"]),
            _pressure(each["decode_pressure"]),
            f"{each['waiting_ms'] / 1000:.1f} s",
            str(each["decodes"]),
        )
    return table


def _counterfactual(found: dict[str, Any]) -> str:
    without, with_it = found["without"], found["with_it"]
    return (
        f"\nThe demand of the {found['over_ms'] / 1000:.1f} s after it, without it and with it (closed form, not"
        f" simulated): TTFT {without['ttft_ms'] / 1000:.2f} and {with_it['ttft_ms'] / 1000:.2f} s, served in time"
        f" {without['served']:.0%} and {with_it['served']:.0%}"
    )


def _in_lab(found: dict[str, Any]) -> Table:
    table = plain_table("in the lab", "requests", "in time", "TTFT mean", "p90", "TPOT mean", left=("in the lab",))
    for name, lived in (("without it", found["without"]), ("with it", found["with_it"])):
        ttft_ms, tpot_ms = lived["ttft_ms"], lived["tpot_ms"]
        table.add_row(
            name,
            str(lived["requests"]),
            f"{lived['good']:.0%}",
            f"{ttft_ms.get('mean', 0) / 1000:.2f} s",
            f"{ttft_ms.get('p90', 0) / 1000:.2f} s",
            f"{tpot_ms.get('mean', 0):.0f} ms",
        )
    return table


def _pressure(value: float) -> Text:
    return Text(f"{value:.2f}", style="bold red" if value > PRESSES else "")


# The number of decisions requested: as many as the planner keeps.

CAUSES: Final = {
    "late": "roles followed the work",
    "held": "workers rested, were pinned, or it was quiet",
    "limits": "limits",
    "advisory": "the planner might not act",
    "best": "the present split was taken for as good",
    "too_small": "no split of the workers had room",
}


EXPIRED: Final = "expired"
"""The outcome of advice that was not followed before it was no longer needed."""


def planner_advice(*, ready_file: Path | None, as_json: bool) -> None:
    """Print advice that is open or was followed, newest first. Raise StartupError if there is no suite."""
    found: list[dict[str, Any]] = get_json(
        find_suite(ready_file).planner, "/v1/decisions", exact=as_json, limit=str(MOST)
    )
    advised = [each for each in found if each["advice"] is not None]
    if as_json:
        print(json.dumps(advised))
        return
    console = make_console()
    standing = [each for each in advised if each["advice"]["outcome"] != EXPIRED]
    if not standing:
        console.print("Nothing is advised.")
    if len(standing) < len(advised):
        console.print("Advice that has expired is left out; --json has it.")
    for each in standing:
        advice = each["advice"]
        console.print(f"{each['time'][11:19]}  {each['model']}: {each['reason']}", soft_wrap=True)
        expected = f"{advice['figure']} by {advice['low']:.3g} to {advice['high']:.3g}"
        came = f"; it came to {advice['came']:.3g}" if advice["outcome"] == "applied" else ""
        console.print(f"          expected: {expected}; {advice['outcome']}{came}")
        console.print(f"          {advice['command']}", style="cyan")


def planner_regret(window: str, *, ready_file: Path | None, as_json: bool) -> None:
    """Print the regret by cause. Raise StartupError if there is no suite."""
    found: dict[str, Any] = get_json(find_suite(ready_file).planner, "/v1/regret", exact=as_json, window=window)
    if as_json:
        print(json.dumps(found))
        return
    console = make_console()
    console.print(
        f"{found['lost_gpu_hours']:.2f} of {found['gpu_hours']:.2f} GPU-hours would have served more in another split"
        f" of roles (estimated, {found['method'].replace('_', ' ')}):"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    for cause, hours in sorted(found["by_cause"].items(), key=lambda each: -each[1]):
        table.add_row(f"{hours:.2f}", cause, CAUSES.get(cause, ""))
    console.print(table)


OF_MODELS: Final = {
    "prefill_min": int, "prefill_max": int, "decode_min": int, "decode_max": int, "workers_min": int,
    "workers_max": int, "gpu_hours_day": float, "tpot_ms": float,
}  # fmt: skip
# The value of `none`, if it is not null.
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
    """Set the limits that are named, and print all of them. Raise StartupError, which says what to do."""
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
    """Apply one NAME=VALUE, to one model or to all. Raise StartupError, which names the fault."""
    if model and setting.lower() == "none":  # the model's own limits go, and those of every model apply again
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
        raise StartupError(f"{name!r} is not a limit{' of a model' if model else ''}: use one of {known}")


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
    """Set the mode if one is given, and print it. Raise StartupError, which says what to do."""
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
