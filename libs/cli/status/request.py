"""The command `fulcrum request`: the use of one finished request's time, and the slowest requests."""

import json
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
from rich.console import Group
from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.cli.find import find_suite, get_json
from libs.cli.status.show import span
from libs.contracts.errors import StartupError

MAX_LISTED: Final = 1_000
WINDOW: Final = "10m"
BAR_CELLS: Final = 20
STAGES: Final = {
    "queue": ("queue", "waiting at the gateway"),
    "prefill": ("prefill", "waiting and computing the prompt"),
    "hand_off": ("hand-off", "transferring KV and beginning to decode"),
    "decode": ("decode", "decoding"),
}
"""The displayed name of each stage, and the activity in it."""
OUTCOMES: Final = {"ok": "finished", "client_gone": "ended when its client left", "rejected": "refused"}


class ListedStage(msgspec.Struct, frozen=True):
    name: str
    at: str
    start_ns: int
    duration_ns: int


class ListedRequest(msgspec.Struct, frozen=True):
    """A finished request as shown in lists. Times are null if unknown, for example without a token."""

    id: str
    model: str
    outcome: str
    end_unix_ns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ns: int
    prefill_worker: str = ""
    decode_worker: str = ""
    ttft_ns: int | None = None
    ttft_target_ns: int | None = None
    ttft_missed: bool | None = None
    tpot_ns: int | None = None
    tpot_target_ns: int | None = None
    tpot_missed: bool | None = None


class RequestAnswer(ListedRequest, frozen=True, kw_only=True):
    """The metrics service's answer to `GET /v1/requests/ID`. Fields that a newer service adds are ignored."""

    arrival_unix_ns: int
    stages: list[ListedStage]
    tenant: str = ""
    service_class: str = ""
    gateway: str = ""
    finish_reason: str = ""
    error_code: str = ""
    max_output_tokens: int | None = None
    predicted_ttft_ns: int | None = None
    reroutes: int = 0
    moves: int = 0
    recomputes: int = 0


def show_request(ready_file: Path | None, request_id: str, *, metrics: str | None, as_json: bool) -> None:
    """Print one request. Raise StartupError if there is no suite or no such request."""
    url = metrics or find_suite(ready_file).metrics
    found = get_json(url, f"/v1/requests/{quote(request_id, safe='')}", exact=as_json)
    if as_json:
        print(json.dumps(found))
        return
    try:
        make_console().print(page(msgspec.convert(found, RequestAnswer)), soft_wrap=True)
    except msgspec.ValidationError as error:
        raise _other_shape(url, error) from None


def show_slowest(ready_file: Path | None, count: int, *, metrics: str | None, as_json: bool) -> None:
    """Print the requests with the longest TTFT. Raise StartupError if there is no suite."""
    url = metrics or find_suite(ready_file).metrics
    found = get_json(url, "/v1/requests", exact=as_json, slowest=str(count), window=WINDOW)
    if as_json:
        print(json.dumps(found))
        return
    try:
        listed = msgspec.convert(found, list[ListedRequest])
    except msgspec.ValidationError as error:
        raise _other_shape(url, error) from None
    console = make_console()
    if not listed:
        console.print("No request that ended in the last ten minutes has had a token.")
        return
    table = plain_table(
        "request", "ended", "TTFT", "of", "queue", "prompt", "output", "prefill", "decode", "outcome",
        left=("request", "prefill", "decode", "outcome"),
    )  # fmt: skip
    now_ns = time.time_ns()
    for each in listed:
        table.add_row(
            each.id,
            f"{span(max(now_ns - each.end_unix_ns, 0) / 1e6)} ago",
            Text(length(each.ttft_ns), style="bold red" if each.ttft_missed else ""),
            length(each.ttft_target_ns),
            length(each.queue_ns),
            f"{each.prompt_tokens:,}",
            f"{each.output_tokens:,}",
            each.prefill_worker or "–",
            each.decode_worker or "–",
            each.outcome,
        )
    console.print(table)


def page(found: RequestAnswer) -> Group:
    """Return the summary, the stages, and other known facts about the request."""
    parts: list[Any] = [Text(f"{found.id}: {summary(found)}", style="bold")]
    if found.stages:
        whole_ns = max(sum(each.duration_ns for each in found.stages), 1)
        table = plain_table("stage", "at", "begins after", "takes", "share", "", left=("stage", "at", ""))
        for each in found.stages:
            share = each.duration_ns / whole_ns
            bar = Text("█" * round(share * BAR_CELLS), style="cyan")
            name, _ = STAGES.get(each.name, (each.name, ""))
            table.add_row(name, each.at or "–", length(each.start_ns), length(each.duration_ns), f"{share:.0%}", bar)
        parts.append(table)
    return Group(*parts, *map(Text, facts(found)))


def summary(found: RequestAnswer) -> str:
    """Describe in one sentence the end of the request and the largest part of its time."""
    ended, why = OUTCOMES.get(found.outcome, found.outcome), found.finish_reason or found.error_code
    how = f"{ended} ({why})" if why else ended
    if not found.stages:
        return f"{how} before it was bound to a worker; how long it waited is not recorded."
    if found.ttft_ns is None:
        worker = found.prefill_worker or found.decode_worker or "its worker"
        waited = length(found.queue_ns)
        return f"{how} without a token after {waited} at the gateway; its time at {worker} is not recorded."
    whole_ns = sum(each.duration_ns for each in found.stages)
    longest = max(found.stages, key=lambda each: each.duration_ns)
    _, doing = STAGES.get(longest.name, ("", longest.name))
    share = longest.duration_ns / max(whole_ns, 1)
    at = f" ({longest.at})" if longest.at else ""
    return f"{how} after {length(whole_ns)}, of which {share:.0%}, {length(longest.duration_ns)}, went to {doing}{at}."


def facts(found: RequestAnswer) -> list[str]:
    """Return lines about targets, tokens, tenant and reroutes."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.arrival_unix_ns / 1e9))
    predicted = "" if found.predicted_ttft_ns is None else f", predicted {length(found.predicted_ttft_ns)}"
    most = "" if found.max_output_tokens is None else f" of at most {found.max_output_tokens:,}"
    origin = ", ".join(
        f"{name} {value}"
        for name, value in (("tenant", found.tenant), ("class", found.service_class), ("gateway", found.gateway))
        if value
    )
    detours = [
        f"{what} {'once' if count == 1 else f'{count} times'}"
        for count, what in (
            (found.reroutes, "sent to another worker"),
            (found.moves, "moved with its KV"),
            (found.recomputes, "prompt computed again"),
        )
        if count
    ]
    return [
        f"TTFT {_against(found.ttft_ns, found.ttft_target_ns, missed=found.ttft_missed)}{predicted}",
        f"TPOT {_against(found.tpot_ns, found.tpot_target_ns, missed=found.tpot_missed)}",
        f"{found.prompt_tokens:,} prompt tokens, {found.cached_tokens:,} of them cached; "
        f"{found.output_tokens:,}{most} output tokens",
        f"model {found.model}, arrived {clock}" + (f", {origin}" if origin else ""),
        *([", ".join(detours)] if detours else []),
    ]


def _against(value_ns: int | None, target_ns: int | None, *, missed: bool | None) -> str:
    if target_ns is None:
        return f"{length(value_ns)}, without a target"
    verdict = "" if missed is None else ": missed" if missed else ": met"
    return f"{length(value_ns)} of {length(target_ns)}{verdict}"


def length(time_ns: int | None) -> str:
    """Return a duration in words, such as 5.2 ms, 312 ms or 1.53 s."""
    if time_ns is None:
        return "–"
    if time_ns >= 1e9:
        return f"{time_ns / 1e9:.2f} s"
    return f"{time_ns / 1e6:.1f} ms" if time_ns < 1e7 else f"{time_ns / 1e6:.0f} ms"


def _other_shape(url: str, error: msgspec.ValidationError) -> StartupError:
    return StartupError(f"the metrics service at {url} answers in an unknown form ({error}): update it")
