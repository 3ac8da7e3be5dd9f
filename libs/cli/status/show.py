"""The output of `fulcrum status`: the verdict first, then the figures behind it; with `--links` the KV links."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.cli.status.answer import (
    CALM_CODES,
    STATUS_PATH,
    TOO_SMALL_CODE,
    UNKNOWN_CODE,
    ActionAnswer,
    CauseAnswer,
    EstimateAnswer,
    ModelStatusAnswer,
    SplitAnswer,
    Status,
    TrafficAnswer,
    VerdictAnswer,
    WorkerLifeAnswer,
    parse_status,
)
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain
from libs.policy.kv_links import SLOW_LINK

LINKS_PATH: Final = "/v1/links"


class ListedLink(msgspec.Struct, frozen=True):
    """One pair of workers in the metrics service's answer."""

    source: str
    target: str
    model: str
    way: str
    transfers: int
    bytes: int
    gb_per_s: float | None
    of_fastest: float | None
    is_floor: bool = False


def show_links(ready_file: Path | None, *, as_json: bool) -> None:
    """Print each pair, the slowest first. Raise StartupError if there is no suite."""
    answer = get_json(find_suite(ready_file).metrics, LINKS_PATH, exact=as_json)
    if as_json:
        print(json.dumps(answer))
        return
    links = msgspec.convert(answer, list[ListedLink])
    make_console().print(links_table(links) if links else "No KV has come from one worker to another yet.")


def links_table(links: Sequence[ListedLink]) -> Table:
    table = Table("from", "to", "way", "transfers", "GB", "GB/s", "of the fastest", box=None)
    for each in links:
        slow = each.of_fastest is not None and each.of_fastest < SLOW_LINK
        table.add_row(
            each.source,
            each.target,
            each.way.replace("_", " "),
            f"{each.transfers:,}",
            f"{each.bytes / 1e9:.2f}",
            "-" if each.gb_per_s is None else f"{'≥ ' if each.is_floor else ''}{each.gb_per_s:.2f}",
            "-" if each.of_fastest is None else f"{each.of_fastest:.0%}",
            style="bold red" if slow else "",
        )
    return table


# Above this pressure work accumulates in a queue.
FULL: Final = 1.0
TIGHT: Final = 0.85
SCALE: Final = 2.0
"""The pressure at which a bar is full."""
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
CALM, NEAR, OVER = "#3fae6b", "#d9a514", "bold #ff5c6c"


def verdict_style(code: str, models: Iterable[ModelStatusAnswer] = ()) -> str:
    """Return green if nothing is to be done, dim if nothing is known, otherwise a striking style.

    Pressure above `FULL` is not green, although a cause is named only once it lasts.
    """
    if code in CALM_CODES:
        pressed = any(max(each.prefill.pressure or 0.0, each.decode.pressure or 0.0) > FULL for each in models)
        return NEAR if pressed else CALM
    return "dim" if code == UNKNOWN_CODE else OVER


def pressure_style(pressure: float | None) -> str:
    """Return a style by how near a pressure is to `FULL`."""
    if pressure is None:
        return "dim"
    return OVER if pressure > FULL else NEAR if pressure > TIGHT else CALM


def pressure_text(pressure: float | None) -> Text:
    """Return a pressure as "0.42", or a question mark if it is unknown."""
    shown = "?" if pressure is None else f"{pressure:.2f}" if pressure < 10 else f"{pressure:.0f}"
    return Text(shown, pressure_style(pressure))


def pressure_bar(pressure: float | None, cells: int) -> Text:
    """Return a bar of `cells` from 0 to `SCALE` in eighths of a cell, with a line at `FULL`.

    Higher pressures end in an arrow.
    """
    if pressure is None:
        return Text("░" * cells, "dim")
    eighths = round(min(max(pressure, 0.0) / SCALE, 1.0) * cells * 8)
    whole, part = divmod(eighths, 8)
    bar = ("█" * whole + (EIGHTHS[part] if part else "")).ljust(cells)
    if pressure > SCALE:
        bar = bar[:-1] + "▶"
    at = round(cells * FULL / SCALE)
    text = Text(bar, pressure_style(pressure))
    if at >= whole + bool(part):
        text = Text.assemble((bar[:at], pressure_style(pressure)), ("│", "dim"), bar[at + 1 :])
    return text


def span(ms: float) -> str:
    """Return a length of time as "0.4 s", "12 s", "3 min", "2 h" or "4 d", rounded down."""
    seconds = max(ms, 0) / 1000
    if seconds < 10:
        return f"{math.floor(seconds * 10) / 10:.1f} s"
    unit, size = next((each for each in UNITS if seconds >= each[1]), UNITS[-1])
    return f"{math.floor(seconds / size)} {unit}"


BAR_CELLS: Final = 16
INDENT: Final = 10
# The minimum gain in pressure for which another split is mentioned: less is within the error.
WORTH_SAYING: Final = 0.1
# Older data are marked.
OLD_MS: Final = 2_000
MAX_REASONS: Final = 3


def lines(status: Status) -> Iterator[Text]:
    """Yield lines for 80 columns; longer sentences wrap."""
    verdict, now_ms = status.verdict, status.as_of_unix_ms
    yield Text(verdict.sentence, f"bold {verdict_style(verdict.code, status.models)}" if status.live else "dim")
    if not status.live:
        yield Text(f"Not live: {status.not_live_because or 'the data are old'}.", "bold red")
    yield Text(f"{verdict.code.replace('_', ' ')} for {span(now_ms - verdict.since_unix_ms)}", "dim")
    for cause in other_causes(verdict):
        yield Text.assemble(("Also: ", "bold"), cause.sentence)
    for model in status.models:
        yield Text()
        yield from _model(model)
    yield Text()
    if away := [each for each in status.workers if each.life not in UNREMARKABLE]:
        yield workers_line(away, now_ms)
    yield from traffic_lines(status.traffic)
    if status.observed is not None:
        yield from observed_lines(status)
    if status.observed is None or status.planner.heard:
        yield from _planner(status)
    for instruction in instructions(verdict):
        yield Text.assemble(("Do: ", "bold"), (instruction, "bold cyan"))
    for command in commands(verdict):
        yield Text.assemble(("Do: ", "bold"), (command, "bold cyan"), ("   (fulcrum advice --apply)", "dim"))
    if status.alerts_firing:
        fire = "1 alert fires" if status.alerts_firing == 1 else f"{status.alerts_firing} alerts fire"
        yield Text(f"{fire}: fulcrum alerts", "yellow")
    yield age_line(status)


# States of workers that need no mention.
UNREMARKABLE: Final = frozenset(("running", "gone"))
MAX_AWAY: Final = 6


def workers_line(away: Sequence[WorkerLifeAnswer], now_ms: int) -> Text:
    """Return the workers that do not simply run as "gpu-3 silent for 4.2 s"."""
    named = [f"{each.id} {each.life} for {span(now_ms - each.life_since_unix_ms)}" for each in away[:MAX_AWAY]]
    more = len(away) - MAX_AWAY
    return Text(f"Workers: {', '.join(named)}" + (f" and {more} more" if more > 0 else ""), "yellow")


def other_causes(verdict: VerdictAnswer) -> list[CauseAnswer]:
    """Return the causes beside the one in the verdict."""
    return verdict.causes[1:]


def commands(verdict: VerdictAnswer) -> list[str]:
    """Return the advised commands without repetition, the verdict's own first."""
    return list(dict.fromkeys(action.command for action in _actions(verdict) if action.command))


def instructions(verdict: VerdictAnswer) -> list[str]:
    """Return the manual changes at observed servers, for which there are no commands."""
    return list(dict.fromkeys(action.instruction for action in _actions(verdict) if action.instruction))


def _actions(verdict: VerdictAnswer) -> list[ActionAnswer]:
    actions = (verdict.action, *(cause.action for cause in verdict.causes))
    return [action for action in actions if action is not None]


SERVER_STATES: Final = {
    "unknown": "not asked yet", "learning": "learning", "observed": "observed", "exact": "exact",
    "away": "away", "foreign": "not vLLM",
}  # fmt: skip


def observed_lines(status: Status) -> Iterator[Text]:
    """Yield the bounds of estimated times, the number of servers in each state, and their faults."""
    if status.observed is None:
        return
    servers = status.observed.servers
    exact, estimated = status.observed.exact, status.observed.estimated
    whose = f"GPU time of {estimated} servers" if exact else "All GPU time"
    if estimated or not exact:
        yield Text(f"{whose} is estimated from the servers' own metrics{estimate_text(status.estimate)}.")
    if exact:
        yield Text(f"GPU time of {exact} servers is measured: they report their steps.")
    counts = {state: sum(each.state == state for each in servers) for state in SERVER_STATES}
    yield Text("Servers: " + ", ".join(f"{count} {SERVER_STATES[state]}" for state, count in counts.items() if count))
    wrong = [each for each in servers if each.state in ("away", "foreign")]
    for each in wrong[:MAX_AWAY]:
        lasting = span(status.as_of_unix_ms - each.since_unix_ms)
        yield Text(f"  {each.name} ({each.url}) for {lasting}: {each.trouble}", "yellow")
    if len(wrong) > MAX_AWAY:
        yield Text(f"  and {len(wrong) - MAX_AWAY} more", "yellow")
    if status.observed.trouble:
        yield Text(f"Observed servers: {status.observed.trouble}", "yellow")


def estimate_text(estimate: EstimateAnswer | None) -> str:
    """Return ": prefill 62% of busy time, 58% to 66%"; empty if nothing ran."""
    if estimate is None or estimate.prefill is None or estimate.low is None or estimate.high is None:
        return ""
    return f": prefill {estimate.prefill:.0%} of busy time, {estimate.low:.0%} to {estimate.high:.0%}"


def age_line(status: Status) -> Text:
    if status.age_ms is None:
        return Text("No worker has reported.", "yellow")
    old = status.age_ms > OLD_MS
    return Text(f"Data are {span(status.age_ms)} {'behind' if old else 'old'}.", "bold red" if old else "dim")


def _model(model: ModelStatusAnswer) -> Iterator[Text]:
    """Yield two lines for each pool: its pressure, and the figures behind it."""
    yield Text(model.model, "bold")
    if not model.known:
        yield Text(f"  {model.unknown_because or 'too little is known'}", "yellow")
        return
    for phase, pool, facts in (
        ("prefill", model.prefill, prefill_facts(model)),
        ("decode", model.decode, decode_facts(model)),
    ):
        yield Text.assemble(
            f"  {phase:<8}{pool.workers:>4} worker{'s' if pool.workers != 1 else ' '}  ",
            pressure_text(pool.pressure),
            " ",
            pressure_bar(pool.pressure, BAR_CELLS),
            # A share of time, not of space: a decode worker with one sequence is busy nearly always.
            f"  busy {percent(pool.busy)} of the time",
            f", encode {percent(pool.encode)}" if pool.encode else "",
        )
        yield Text(f"{'':>{INDENT}}{'; '.join(facts)}", "dim")
    if best := _best(model):
        yield Text(f"  {best}", "dim")


def prefill_facts(model: ModelStatusAnswer) -> list[str]:
    """Return the figures behind the pressure of prompts, in words."""
    pool = model.prefill
    facts = []
    if pool.waiting_prompt_tokens is not None:
        requests = "" if not pool.waiting_requests else f"{pool.waiting_requests:,} requests wait, "
        work = "" if not pool.waiting_s else f", {pool.waiting_s:.1f} s of work"
        waits = pool.waiting_requests or pool.waiting_prompt_tokens
        facts.append(
            f"{requests}{pool.waiting_prompt_tokens:,} prompt tokens to do{work}" if waits else "nothing waits"
        )
    if model.mixed.workers:
        count = model.mixed.workers
        facts.append(f"{count} decode worker{'s' * (count != 1)} may compute prompts too")
    return facts


def decode_facts(model: ModelStatusAnswer) -> list[str]:
    """Return the figures behind the pressure of decode: sequences, KV, and TPOT against its target."""
    pool = model.decode
    facts = []
    if pool.running is not None and pool.largest_batch is not None:
        slots = "" if pool.slots is None else f" ({pool.slots:,} slots)"
        held = pool.running + (pool.held or 0)
        noun = "sequence" if held == 1 else "sequences"
        facts.append(f"{held:,} {noun}, room for {pool.largest_batch:,.0f} within TPOT{slots}")
    if pool.kv_used is not None:
        facts.append(f"KV {percent(pool.kv_used)}")
    if pool.tpot_ms is not None:
        target = "" if pool.tpot_target_ms is None else f" of {pool.tpot_target_ms:g}"
        facts.append(f"TPOT {pool.tpot_ms:.1f}{target} ms")
    return facts


def _best(model: ModelStatusAnswer) -> str:
    """Describe the effect of the best split of the workers if it is not the present one."""
    split, least = model.best_split, model.cluster_pressure
    now = max(model.prefill.pressure or 0.0, model.decode.pressure or 0.0)
    # If this pressure is too high, the verdict names it, with the reason why these roles are not advised.
    if split is None or least is None or now - least < WORTH_SAYING or model.verdict == TOO_SMALL_CODE:
        return ""
    return f"{split_words(split)} would leave a pressure of {least:.2f}"


def split_words(split: SplitAnswer) -> str:
    """Return a split as "3 prefill + 5 decode" or "8 workers that do both"."""
    if split.prefill:
        return f"{split.prefill} prefill + {split.decode} decode"
    return f"{split.decode} workers that do both" if split.decode > 1 else "a worker that does both"


def traffic_lines(traffic: TrafficAnswer) -> Iterator[Text]:
    """Yield rates, errors and latencies, as far as they are known."""
    window = f"last {span(traffic.window_ms)}"
    if traffic.batch_waiting or traffic.batch_at_workers:
        yield Text(
            f"Batch jobs: {traffic.batch_waiting or 0:,} lines wait, {traffic.batch_at_workers or 0:,} at workers, "
            f"{traffic.batch_lines_per_s or 0:.1f} end a second"
        )
    if not traffic.requests_per_s:
        yield Text(f"No request has ended in the {window}.", "dim")
    else:
        rates = [f"{traffic.requests_per_s:.1f} requests/s"]
        for name, value in (("prompt", traffic.prompt_tokens_per_s), ("output", traffic.output_tokens_per_s)):
            if value is not None:
                rates.append(f"{value:,.0f} {name} tokens/s")
        if traffic.cache_hit is not None:
            rates.append(f"cache hits {percent(traffic.cache_hit)}")
        yield Text.assemble(f"{', '.join(rates)} ", (f"({window})", "dim"))
    wrong = {"errors": traffic.errors_per_s, "429": traffic.too_many_per_s, "otherwise refused": traffic.rejected_per_s}
    said = [f"{name} {value:.1f}/s" for name, value in wrong.items() if value]
    if said:
        reasons = ", ".join(f"{each.status} {each.code} {each.per_s:.1f}/s" for each in traffic.refused[:MAX_REASONS])
        yield Text(", ".join(said) + (f" ({reasons})" if reasons else ""), "yellow")
    latencies = [
        f"{name} {_ms(middle)} p50, {_ms(tail)} p95"
        for name, middle, tail in (
            ("TTFT", traffic.ttft_p50_ms, traffic.ttft_p95_ms),
            ("TPOT", traffic.tpot_p50_ms, traffic.tpot_p95_ms),
        )
        if middle is not None and tail is not None
    ]
    if latencies:
        waiting = f" ({traffic.awaited:,} without a first token count by their wait so far)" if traffic.awaited else ""
        yield Text("; ".join(latencies) + waiting)


def _planner(status: Status) -> Iterator[Text]:
    planner, now_ms = status.planner, status.as_of_unix_ms
    if not planner.heard:
        yield Text("The planner does not report, so roles stay as they are.", "yellow")
    mode = planner.mode or "in an unknown mode"
    acts = "moves workers by itself" if planner.acts else "moves nothing by itself"
    if planner.idle_because:
        acts += f", as {planner.idle_because}"
    when = "" if planner.decided_unix_ms is None else f" {span(now_ms - planner.decided_unix_ms)} ago"
    # The planner weighs moves over another time than the verdict. Two commands with different figures would confuse.
    why = f"; decided{when}: {planner.reason}" if planner.reason and planner.acts else ""
    yield Text.assemble(("Planner ", "bold"), f"{mode}, {acts}{why}")
    if (move := planner.last_move) is not None:
        ago = span(now_ms - move.at_unix_ms)
        yield Text(f"Last move: {move.worker} {move.from_role} → {move.to_role}, {ago} ago, by {move.actor}", "dim")


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


PERIOD_S: Final = 1.0


def show_status(ready_file: Path | None, *, watch: bool, as_json: bool) -> None:
    """Print the status. Raise StartupError if there is no suite."""
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
