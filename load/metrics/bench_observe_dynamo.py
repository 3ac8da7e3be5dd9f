"""Compare the GPU time that `fulcrum observe --page --dynamo` shows of Dynamo's mockers with their own step log.

Two mockers prefill and two decode, at the speed of real engines. Four loads run one after the other. The page's shares
are compared with the steps that Dynamo's own recorder wrote in the same time, over the whole load and in its worst
second. Both read the same records. Decode's share is therefore also compared with the mockers' debug log, which has a
line at the end of each step by the mocker's own clock. The log's prefill lines do not distinguish a step from a pause.
The bench needs `make peer-dynamo`. It prints a table, then one JSON line, and exits with 1 if it misses its aim.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import httpx

from libs.testing.engines.real_model import real_model_folder
from libs.testing.suites.observe import observe_page
from load.gateway.http_load import running_clients
from load.measure import show, titled_table
from load.peers.dynamo_suite import LOOPBACK, RunningDynamo, running_dynamo

WORKERS: Final = 4
MOST_POINTS: Final = 3.0
SECOND_NS: Final = 1_000_000_000
SETTLE_S: Final = 3.0
"""The time after a load until its last windows are complete."""
MODEL: Final = "tiny"
WORDS: Final = ("tide", "lamp", "stone", "river", "cloud", "field", "horse", "bread", "glass", "night")


ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
STEP_ENDS: Final = re.compile(r"^(\S+Z) .*published mocker load metrics .*active_decode_blocks=(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Shape:
    """A load of clients, each of which sends its next request as soon as it has its answer."""

    name: str
    clients: int
    prompt_words: int
    answer_tokens: int


SHAPES: Final = (
    Shape("light", 1, 300, 32),
    Shape("long prompts", 6, 3_000, 4),
    Shape("long answers", 24, 50, 200),
    Shape("both", 16, 1_500, 100),
)


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of the workers' time in percent."""

    prefill: float
    decode: float

    def points_off(self, other: "Shares") -> float:
        return max(abs(self.prefill - other.prefill), abs(self.decode - other.decode))


@dataclass(frozen=True, slots=True)
class Compared:
    load: str
    steps: int
    page: Shares
    log: Shares
    decode_by_debug_log: float
    points_off: float
    """The largest difference of the shares over the whole load."""
    worst_second: float
    coverage: float


async def put_under(shape: Shape, port: int, seconds: float) -> None:
    """Send the load for `seconds`. Answers that are incomplete at the end are cut off."""

    async def client(http: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        while True:
            # Random words, so that no part of the prompt is cached.
            words = " ".join(chance.choices(WORDS, k=shape.prompt_words))
            body = {
                "model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": shape.answer_tokens,
                "ignore_eos": True,
            }  # fmt: skip
            (await http.post("/v1/chat/completions", json=body)).raise_for_status()

    async with running_clients(shape.clients, client, base_url=f"http://{LOOPBACK}:{port}"):
        await asyncio.sleep(seconds)


def logged(files: list[Path]) -> list[tuple[int, int, bool]]:
    """Return (start, end, whether it prefilled) of each step in the recorders' files."""
    found = []
    for file in files:
        prefills = file.stem == "prefill"
        for line in file.read_text().splitlines():
            with_time = json.loads(line)
            length_ns = round(with_time["metrics"]["wall_time"] * SECOND_NS)
            if length_ns:
                found.append((with_time["received_at_ns"] - length_ns, with_time["received_at_ns"], prefills))
    return found


def log_shares(steps: list[tuple[int, int, bool]], low_ns: int, high_ns: int) -> Shares:
    """Return the shares of the workers' time that the steps take."""
    spent = {True: 0, False: 0}
    for start_ns, end_ns, prefills in steps:
        spent[prefills] += max(min(end_ns, high_ns) - max(start_ns, low_ns), 0)
    whole = WORKERS * (high_ns - low_ns) / 100
    return Shares(spent[True] / whole, spent[False] / whole)


def debug_log_share(files: list[Path], low_ns: int, high_ns: int) -> float:
    """Return decode's share by the mockers' debug log.

    A mocker writes a line when work ends a rest and at the end of each step, with the number of KV blocks in use.
    """
    spent = 0
    for file in files:
        start_ns = before_ns = 0
        for moment, blocks in STEP_ENDS.findall(ANSI.sub("", file.read_text())):
            at_ns = round(datetime.fromisoformat(moment).timestamp() * SECOND_NS)
            if not start_ns:
                start_ns = before_ns if int(blocks) else at_ns  # a step that followed without a rest
            elif blocks == "0":
                spent += max(min(at_ns, high_ns) - max(start_ns, low_ns), 0)
                start_ns = 0
            before_ns = at_ns
        if start_ns:
            spent += max(min(before_ns, high_ns) - max(start_ns, low_ns), 0)
    return spent / (WORKERS * (high_ns - low_ns) / 100)


def page_shares(history: dict[str, Any], low: int, high: int) -> Shares:
    """Return the shares in the page's windows from `low` to `high`."""
    spent = {name: sum(history["gpu_ns"][name][low:high]) for name in ("covered", "prefill", "decode")}
    whole = max(spent["covered"], 1) / 100
    return Shares(spent["prefill"] / whole, spent["decode"] / whole)


def compared(shape: Shape, page: str, dynamo: RunningDynamo, from_s: int, to_s: int) -> Compared:
    """Compare the page with the log over whole seconds."""
    where = f"/v1/occupancy/history?window=1s&span={to_s - from_s}s&end_unix_ms={to_s * 1000}"
    with urlopen(page + where, timeout=30) as answered:
        history = json.load(answered)
    steps = logged(dynamo.step_logs)
    low_ns, high_ns = from_s * SECOND_NS, to_s * SECOND_NS
    shown, log = page_shares(history, 0, to_s - from_s), log_shares(steps, low_ns, high_ns)
    seconds = [
        page_shares(history, second, second + 1).points_off(
            log_shares(steps, low_ns + second * SECOND_NS, low_ns + (second + 1) * SECOND_NS)
        )
        for second in range(to_s - from_s)
    ]
    covered = sum(history["gpu_ns"]["covered"]) / (WORKERS * (high_ns - low_ns))
    count = sum(low_ns <= end_ns < high_ns for _, end_ns, _ in steps)
    debug = debug_log_share(dynamo.decode_logs, low_ns, high_ns)
    off = max(shown.points_off(log), abs(shown.decode - debug))
    return Compared(shape.name, count, shown, log, debug, off, max(seconds), covered)


async def measure(dynamo: RunningDynamo, seconds: int) -> list[Compared]:
    """Run each load on the fleet, and compare both measurements."""
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        observe_page(Path(folder), "--dynamo", str(dynamo.discovery)) as shown,
    ):
        page = shown.answer["page"]
        await put_under(SHAPES[0], dynamo.port, SETTLE_S)
        for shape in SHAPES:
            from_s = int(time.time()) + 2  # the load has started by then
            await put_under(shape, dynamo.port, from_s + seconds - time.time())
            await asyncio.sleep(SETTLE_S)
            found.append(compared(shape, page, dynamo, from_s, from_s + seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=20, help="of each load")
    seconds = parser.parse_args().seconds
    with running_dynamo(
        real_model_folder(), MODEL, prefill=2, decode=2, mocker=("--speedup-ratio", "1"), record=True
    ) as dynamo:
        found = asyncio.run(measure(dynamo, seconds))
    table = titled_table(
        "Percent of four workers' time", "load", "steps", "prefill, page", "log", "decode, page", "log", "debug log",
        "points off", "worst second", "covered", left=["load"],
    )  # fmt: skip
    for each in found:
        shares = (each.page.prefill, each.log.prefill, each.page.decode, each.log.decode)
        figures = (*shares, each.decode_by_debug_log, each.points_off, each.worst_second)
        table.add_row(each.load, str(each.steps), *(f"{value:.2f}" for value in figures), f"{each.coverage:.3f}")
    show(table)
    worst = max(each.points_off for each in found)
    print(json.dumps({"worst_points_off": worst, "aim": MOST_POINTS, "loads": [asdict(each) for each in found]}))
    if worst > MOST_POINTS:
        sys.exit(1)


if __name__ == "__main__":
    main()
