"""The output of `fulcrum observe`: a line a second for each observed server."""

import asyncio
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httpx

from libs.contracts.errors import InvalidRequest
from libs.contracts.foreign_text import plain
from libs.observe.fleet import ObservedTarget, read_fleet
from libs.observe.pods import NO_EXTRA, PodQuery
from libs.observe.server import ObservedServer, ObservedShares
from libs.runtime.tasks import TaskOwner

if TYPE_CHECKING:
    from libs.observe.pod_watch import PodFollower

SCRAPES_A_SECOND: Final = 2
TIMEOUT_S: Final = 0.4
MAX_EXPOSITION_BYTES: Final = 8 * 1024 * 1024
MOST_SERVERS: Final = 256
LINE_S: Final = 1.0
DIGITS: Final = 4
GONE: Final = "gone (its pod ended or was deleted)"


def replay_file(file: Path, *, as_json: bool) -> None:
    """Print a line for each second of a recording. Raise InvalidRequest.

    A recording has one JSON object a line: `t` (Unix seconds) and `m` (lines of the exposition). An object without
    `m` stands for a scrape that failed.
    """
    server = ObservedServer()
    due_s: float | None = None
    for t_s, text in _recorded(file):
        if text:
            server.scraped(text, t_s)
        due_s = t_s + LINE_S if due_s is None else due_s
        if t_s >= due_s:
            _print(server.shares(t_s), "", as_json=as_json)
            # Seconds without a recording have no line, since nothing is known about them.
            due_s = max(due_s + LINE_S, t_s)


def _recorded(file: Path) -> Iterator[tuple[float, str]]:
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                    yield float(record["t"]), "\n".join(record.get("m", ()))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise InvalidRequest(f"{file}, line {number}: not a recorded scrape ({error})") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}") from None


def fleet_urls(file: Path | None) -> list[str]:
    """Return the addresses in a file of servers. Raise InvalidRequest."""
    return [] if file is None else [each.url for each in read_fleet(file)]


def watch_servers(urls: Sequence[str], lines: int | None, *, as_json: bool) -> None:
    """Scrape servers twice a second and print a line for each every second. Raise InvalidRequest."""
    if len(urls) > MOST_SERVERS:
        raise InvalidRequest(f"{len(urls)} servers: one process observes {MOST_SERVERS} at most")
    for url in urls:
        if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
            raise InvalidRequest(f"{url!r} is not the address of a server, such as http://host:port")
    targets = [ObservedTarget(url, name=url) for url in urls]
    asyncio.run(_watch(lambda: targets, lines, as_json=as_json))


def watch_pods(query: PodQuery, lines: int | None, *, as_json: bool) -> None:
    """Scrape the pods of a query as servers, and follow their list. Raise InvalidRequest."""
    try:
        from libs.observe.pod_watch import PodFollower  # noqa: PLC0415 (needs the extra)
    except ImportError:
        raise InvalidRequest(NO_EXTRA) from None
    asyncio.run(_watch_pods(PodFollower(query), lines, as_json=as_json))


async def _watch_pods(pods: "PodFollower", lines: int | None, *, as_json: bool) -> None:
    printed = ""

    def print_trouble() -> None:
        nonlocal printed
        if pods.trouble != printed:
            printed = pods.trouble
            print(plain(printed) or "the list of pods is followed again", file=sys.stderr, flush=True)

    tasks = TaskOwner()
    try:
        await pods.begin()
        print_trouble()
        following = tasks.spawn("observed pods", pods.follow(print_trouble))
        watching = tasks.spawn(
            "observed servers", _watch(lambda: pods.targets[:MOST_SERVERS], lines, as_json=as_json, are_pods=True)
        )
        ended, _ = await asyncio.wait((following, watching), return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        await tasks.close()
        await pods.close()


async def _watch(
    listed: Callable[[], Sequence[ObservedTarget]], lines: int | None, *, as_json: bool, are_pods: bool = False
) -> None:
    servers: dict[str, ObservedServer] = {}
    were_read = False
    next_s = time.monotonic()
    rounds = printed = 0
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        while lines is None or printed < lines:
            targets = listed()
            gone = servers.keys() - {each.name for each in targets}
            for name in sorted(gone):
                _print(ObservedShares(time.time(), None, None, None, None), name, as_json=as_json, trouble=GONE)
                del servers[name]
            for each in targets:
                servers.setdefault(each.name, ObservedServer())
            troubles = await asyncio.gather(*(_scrape(client, each.url, servers[each.name]) for each in targets))
            were_read = were_read or not all(troubles)
            rounds += 1
            if rounds > 1 and rounds % SCRAPES_A_SECOND == 1:
                printed += 1
                for each, trouble in zip(targets, troubles, strict=True):
                    pod = {"url": each.url, "role": each.role} if are_pods else {}
                    shares = servers[each.name].shares(time.time())
                    _print(shares, each.name, as_json=as_json, trouble=trouble, pod=pod)
            next_s += LINE_S / SCRAPES_A_SECOND
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s = max(next_s, time.monotonic())
    if not were_read:
        raise InvalidRequest("no server could be read: name vLLM's own address, whose /metrics shows vllm:")


async def _scrape(client: httpx.AsyncClient, url: str, server: ObservedServer) -> str:
    """Scrape a server and return what went wrong, or ""."""
    try:
        text = bytearray()
        async with client.stream("GET", f"{url.rstrip('/')}/metrics") as answer:
            if answer.status_code != httpx.codes.OK:
                return f"/metrics answers {answer.status_code}"
            async for part in answer.aiter_bytes():
                text += part
                if len(text) > MAX_EXPOSITION_BYTES:
                    return f"its exposition is over {MAX_EXPOSITION_BYTES} bytes"
        server.scraped(text.decode(errors="replace"), time.time())
    except httpx.HTTPError as error:
        return f"away ({type(error).__name__})"
    except InvalidRequest as error:
        return error.message
    return ""


def _print(
    shares: ObservedShares,
    name: str,
    *,
    as_json: bool,
    trouble: str = "",
    pod: Mapping[str, str] = MappingProxyType({}),
) -> None:
    if as_json:
        line: dict[str, Any] = {"server": name} if name else {}
        line |= pod
        line |= {name: round(value, DIGITS) if value is not None else None for name, value in asdict(shares).items()}
        if trouble:
            line["trouble"] = trouble
        print(json.dumps(line), flush=True)
        return
    at = time.strftime("%H:%M:%S", time.localtime(shares.t_s))
    parts = (at, name, pod.get("role", ""), plain(trouble) or _sentence(shares))
    print("  ".join(part for part in parts if part), flush=True)


def _sentence(shares: ObservedShares) -> str:
    if shares.busy is None:
        return "learning what its steps cost"
    if shares.prefill is None or shares.low is None or shares.high is None:
        return "idle"
    return (
        f"busy {shares.busy:4.0%}  prefill {shares.prefill:4.0%} of it"
        f" (estimated, {shares.low:.0%} to {shares.high:.0%})"
    )
