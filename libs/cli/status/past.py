"""The output of `fulcrum status --at`: the verdict of a past moment and the figures around it."""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.cli.status.answer import TrafficAnswer
from libs.cli.status.events import unix_ms_of
from libs.cli.status.show import pressure_text, span, traffic_lines, verdict_style
from libs.contracts.errors import InvalidRequest

PATH: Final = "/v1/status/history"
# For each length of window, finest first: how far back the service keeps it, and how many are averaged for display.
REACHES: Final = ((3_600, "1s", 1_000, 10), (21_600, "10s", 10_000, 1), (172_800, "60s", 60_000, 1))


class PastVerdict(msgspec.Struct, frozen=True):
    """A verdict with the time from which it applied."""

    unix_ms: int
    code: str
    sentence: str
    command: str


class PastStatus(msgspec.Struct, frozen=True):
    """Windows of figures by name, null where unknown, and the verdicts that applied in them."""

    window_ms: int
    models: dict[str, dict[str, list[float | None]]]
    traffic: dict[str, list[float | None]]
    verdicts: list[PastVerdict]


def show_past(ready_file: Path | None, at: str, *, as_json: bool) -> None:
    """Print the status of a moment, the mean of the ten seconds or the minute before it.

    Raise InvalidRequest for an invalid moment, or one too long ago, and StartupError.
    """
    now_s = time.time()
    at_ms = unix_ms_of(at, now_s, option="--at")
    age_s = now_s - at_ms / 1e3
    reach = next((each for each in REACHES if age_s < each[0] - each[2] / 1e3 * each[3]), None)
    if reach is None:
        raise InvalidRequest(f"--at {at} is {span(age_s * 1e3)} ago: two days are kept")
    _, window, window_ms, count = reach
    query = {"window": window, "span": f"{window_ms * count // 1_000}s", "end_unix_ms": str(at_ms)}
    answer = get_json(find_suite(ready_file).metrics, PATH, exact=as_json, **query)
    if as_json:
        print(json.dumps(answer))
        return
    console = make_console()
    for line in past_lines(msgspec.convert(answer, PastStatus), at_ms):
        console.print(line, soft_wrap=True)


def past_lines(past: PastStatus, at_ms: int) -> Iterator[Text]:
    """Yield the lines of a past status, the verdict first."""
    shown = datetime.fromtimestamp(at_ms / 1e3).astimezone().isoformat(" ", "seconds")
    standing = [each for each in past.verdicts if each.unix_ms <= at_ms]
    if not standing or not past.traffic or all(_mean(values) is None for values in past.traffic.values()):
        yield Text(f"Nothing is known of {shown}: the metrics service has no live status from then.", "yellow")
        return
    verdict = standing[-1]
    yield Text(verdict.sentence, f"bold {verdict_style(verdict.code)}")
    yield Text(f"{verdict.code.replace('_', ' ')} for {span(at_ms - verdict.unix_ms)} at {shown}", "dim")
    for name, columns in past.models.items():
        yield _model(name, {figure: _mean(values) for figure, values in columns.items()})
    means: dict[str, Any] = {figure: _mean(values) for figure, values in past.traffic.items()}
    for figure in ("batch_waiting", "batch_at_workers"):
        means[figure] = None if means.get(figure) is None else round(means[figure])
    known = {name: value for name, value in means.items() if name in TrafficAnswer.__struct_fields__}
    yield from traffic_lines(TrafficAnswer(10_000, **known))
    if verdict.command:
        yield Text.assemble(("It advised: ", "bold"), (verdict.command, "cyan"))


def _model(name: str, means: dict[str, float | None]) -> Text:
    line = Text.assemble((f"{name}: ", "bold"), "prefill pressure ", pressure_text(means.get("prefill")))
    line.append(", decode pressure ").append_text(pressure_text(means.get("decode")))
    line.append(", of the best roles ").append_text(pressure_text(means.get("cluster")))
    for figure, words in (("waiting_tokens", "prompt tokens wait"), ("running", "sequences run")):
        value = means.get(figure)
        if value is not None:
            line.append(f"; {value:,.0f} {words}")
    return line


def _mean(values: list[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None
