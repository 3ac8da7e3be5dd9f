"""Trials in virtual time: the real gateway, workers, planner and metrics service, on a machine that is never late.

`run_trial` plants one situation, can follow the advice, and judges verdict and advice. `run_lasting` plays one load for
minutes.
"""

import asyncio
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from libs.bus.port import Record
from libs.bus.work import Handle, Produced
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Share
from libs.contracts.topics import BATCH_SHARES, Topic
from libs.policy.pressure import KV_FILL
from libs.policy.verdict.promises import LEAST_ANSWERS, p95
from libs.policy.verdict.state import in_hand_ns
from load.chaos.cluster import EPOCH_NS
from load.chaos.suite import ClientRequest, SuiteSpec, VirtualSuite, run_virtual
from load.verdict.situations import WORKERS, Device, DrawnSuite, Planted, Situations, arrivals, draw_suite
from services.gateway.batch.run import BatchPorts

WITHIN_S: Final = 3.0
# The time for which a trial continues after its cause appeared, because a later wrong verdict counts too.
AFTER_S: Final = 4.0
DISTRACTED_S: Final = 14.0
# A cause that has not appeared by then was badly planted. The trial reports this and counts as failed.
MOST_S: Final = 20.0
LOOK_S: Final = 0.05
CALM: Final = frozenset({"idle", "balanced", "unknown"})
# The seconds of waiting work per prefill worker that count as a queue.
QUEUED_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class FollowedFigure:
    """A promised range of a figure, and the figure's actual value."""

    figure: str
    least: float
    most: float
    came: float

    @property
    def kept(self) -> bool:
        return self.least <= self.came <= self.most


@dataclass(slots=True)
class Outcome:
    name: str
    seed: int
    wanted: Sequence[str]
    right: bool
    why: str
    """The reason why the verdict is wrong; empty if it is right."""
    cause_s: float | None
    """The seconds from the first request or fault until clients saw the cause; None if they never did."""
    named_s: float | None
    """The seconds from `cause_s` until the right code was first reported; negative if it was reported earlier."""
    sentence: str
    seen: list[tuple[float, str]] = field(default_factory=list)
    """(seconds, codes) of each change of the verdict."""
    alerts: list[str] = field(default_factory=list)
    predicted: float | None = None
    """The pressure after the advice as the advice predicts it; None without advice."""
    left: float | None = None
    """The pressure measured after the advice was followed; None without advice."""
    followed: list[FollowedFigure] = field(default_factory=list)
    """Further promises of the advice, with the values that clients and status observed."""

    @property
    def off(self) -> float | None:
        """The relative error of the prediction: measured over predicted, less 1; None without advice."""
        if self.predicted is None or self.left is None:
            return None
        return self.left / max(self.predicted, 1e-9) - 1


def is_there(device: Device, planted: Planted, requests: Iterable[ClientRequest]) -> bool:
    """Return whether clients see the cause: a queue of prompts, or more sequences than TPOT or KV allows."""
    live = [each for each in requests if not each.done]
    queued = [each for each in live if not each.first_s]
    decoding = [each for each in live if each.first_s]
    waits_s = sum(device.prompt_s(each.isl) for each in queued) / planted.prefill
    tokens = sum(each.isl + each.tokens for each in decoding)
    context = tokens / max(len(decoding), 1)
    batch = len(decoding) / (device.largest_batch(max(context, 1)) * planted.decode)
    kv = tokens / (device.kv_tokens * KV_FILL * planted.decode)
    short = {
        "decode_bound_tpot": batch >= 1,
        "decode_bound_kv": kv >= 1,
        "too_small": waits_s > QUEUED_S and max(batch, kv) >= 1,
    }
    return short.get(planted.name, waits_s > QUEUED_S)


@dataclass(slots=True)
class Reported:
    """The changes in the answers of `/v1/status`."""

    changes: list[tuple[float, str, frozenset[str], str]] = field(default_factory=list)
    pressures: list[tuple[float, float]] = field(default_factory=list)
    """(time, greatest pressure) of each answer."""
    waits_s: list[tuple[float, float]] = field(default_factory=list)
    """(time, seconds of work that wait for each prefill worker) of each answer."""

    def take(self, status: dict[str, Any], at_s: float) -> None:
        """Record the answer at a time."""
        verdict = status["verdict"]
        causes = frozenset(each["code"] for each in verdict["causes"])
        last = self.changes[-1] if self.changes else None
        if last is None or (last[1], last[2]) != (verdict["code"], causes):
            self.changes.append((at_s, verdict["code"], causes, verdict["sentence"]))
        for model in status["models"]:
            if model["known"]:
                decode = model["decode"]
                found = (model["prefill"]["pressure"], decode["batch_pressure"], decode["kv_pressure"])
                self.pressures.append((at_s, max(found)))
                self.waits_s.append((at_s, model["prefill"]["waiting_s"] or 0.0))


def judged(planted: Planted, seed: int, reported: Reported, began_s: float, cause_s: float | None) -> Outcome:
    """Return the outcome of a trial. `cause_s` is relative to `began_s`; None means that the cause never appeared.

    The outcome's times are relative to `began_s` too, except `named_s`.
    """
    changes = [(at_s - began_s, code, causes, sentence) for at_s, code, causes, sentence in reported.changes]
    outcome = Outcome(planted.name, seed, sorted(planted.wanted), False, "", cause_s, None, "")
    outcome.seen = [(round(at_s, 2), " ".join([code, *sorted(causes - {code})])) for at_s, code, causes, _ in changes]
    named = [each for each in changes if each[1] not in CALM]
    if not planted.wanted:
        outcome.right = not named
        outcome.why = "" if outcome.right else f"{named[0][1]} was named"
        outcome.sentence = (named or changes or [(0, "", frozenset(), "")])[0][3]
        return outcome
    if cause_s is None:
        outcome.why = "the cause never came"
        return outcome
    allowed = planted.wanted | planted.behind
    late = [each for each in named if each[0] >= cause_s or not each[2] <= planted.first]
    wrong = [each for each in late if each[1] not in planted.wanted or not each[2] <= allowed]
    first = next((each for each in named if each[1] in planted.wanted), None)
    whole = next((each for each in named if each[1] in planted.wanted and each[2] >= planted.behind), None)
    outcome.sentence = (first or (named or changes)[0])[3]
    outcome.named_s = None if first is None else round(first[0] - cause_s, 3)
    if wrong:
        outcome.why = f"{wrong[0][1]} was named ({', '.join(sorted(wrong[0][2]))})"
    elif outcome.named_s is None:
        outcome.why = "it was not named"
    elif outcome.named_s > WITHIN_S:
        outcome.why = f"named after {outcome.named_s:.1f} s"
    elif whole is None:
        outcome.why = "what stands behind it was not named"
    outcome.right = not outcome.why
    return outcome


POLL_S: Final = 0.1
BEFORE_S: Final = 5.0
# The length of a light load of both phases, from which workers learn their step times.
WARM_S: Final = 8.0
REST_S: Final = 40.0
PLAYED_S: Final = 60.0
# The span in seconds after advised moves in which the remaining pressure is measured. Sequences that were held back
# decode once their prompts are computed, which takes about a second.
MOVED_S: Final = (1.0, 2.5)
# The time limit for the backlog to end, the time in which later arrivals are sampled, and the time limit of their first
# tokens.
GONE_WITHIN_S: Final = 25.0
ARRIVE_S: Final = 8.0
ANSWER_S: Final = 4.0
# The prompt and output tokens of a batch line.
LINE: Final = (210, 40)
LASTS_S: Final = {"busy": 600.0, "too_small": 120.0}
OK, TOO_MANY = 200, 429
# A planted situation that is not named by then counts as never named.
NAMED_WITHIN_S: Final = 20.0
ENDPOINT = "/v1/completions"
SHARE_LINES = 256
LANES = 8
WINDOW_NS = 24 * 3600 * 1_000_000_000


class WaitingJob:
    """A batch job without end.

    It replaces the parts of a gateway's work bus and file store that the batch runner uses.
    """

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._numbers = count()
        self.begin = asyncio.Event()
        """Set once lines may be read."""

    async def send(self, topic: Topic, value: Message) -> None: ...

    async def committed(self, topic: Topic, group: str) -> list[int]:
        return []

    async def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        await asyncio.Event().wait()
        yield Record(topic, "", Share(), 0, 0)

    async def work(self, topic: Topic, group: str, handle: Handle) -> None:
        """Pass endless lanes of shares to `handle`. Other topics than shares have no lanes."""
        await self.begin.wait()
        async with asyncio.TaskGroup() as lanes:
            for number in range(LANES if topic is BATCH_SHARES else 0):
                lanes.create_task(handle(_Lane(self, number)))
            await asyncio.Event().wait()

    def share(self) -> Share:
        """Return another share, which has its own file."""
        number = next(self._numbers)
        return Share(
            share_id=f"share-{number}", job_id="batch_endless", number=number, input_file_id=f"file-{number}",
            endpoint=ENDPOINT, first_line=1, lines=SHARE_LINES, expires_unix_ns=EPOCH_NS + WINDOW_NS,
            first_place=number * SHARE_LINES,
        )  # fmt: skip

    async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Yield the lines of a share. No two prompts are equal."""
        for place in range(SHARE_LINES):
            prompt = f"{file_id} {place} ".ljust(self._prompt_tokens, "y")
            body = {"model": "sim", "prompt": prompt, "max_tokens": self._output_tokens, "ignore_eos": True}
            line = {"custom_id": f"{file_id}-{place}", "method": "POST", "url": ENDPOINT, "body": body}
            yield json.dumps(line).encode() + b"\n"


class _Lane:
    note = ""
    end = 0
    replayed = True

    def __init__(self, job: WaitingJob, partition: int) -> None:
        self._job = job
        self.partition = partition

    async def batches(self) -> AsyncIterator[list[Record]]:
        for offset in count():
            yield [Record(BATCH_SHARES, "", self._job.share(), self.partition, offset)]

    async def commit(self, produced: Sequence[Produced], *, next_offset: int, note: str = "") -> None: ...


def suite_of(
    drawn: DrawnSuite, planted: Planted, *, mode: str = "advisory", job: Any = None, **worker: Any
) -> SuiteSpec:
    """Return the suite of a situation. `job` is a batch job of its gateway, and `worker` has further settings."""
    return SuiteSpec(
        roles=["prefill"] * planted.prefill + ["decode"] * planted.decode,
        worker=drawn.worker() | worker,
        gateway=drawn.targets(),
        planner=drawn.planner() | {"mode": mode},
        metrics=drawn.targets(),
        batch=BatchPorts(job, job) if job is not None else None,
    )


def run_trial(drawn: DrawnSuite, planted: Planted, seed: int, *, apply: bool = True) -> Outcome:
    """Run one trial from a cluster at rest. With `apply`, follow the advice at its end, if there is any."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Path(folder) / "faults.json"
        faults.write_text("{}")
        job = WaitingJob(*LINE)
        spec = suite_of(drawn, planted, job=job if planted.batch_lines else None, sim_faults=str(faults))

        async def play(suite: VirtualSuite) -> Outcome:
            return await _Trial(suite, drawn, planted, faults, job).run(seed, apply=apply)

        return run_virtual(spec, seed, play)


async def see_latencies(
    suite: VirtualSuite,
    device: Device,
    action: dict[str, Any],
    waits_s: Sequence[tuple[float, float]],
    moved_s: float,
) -> list[FollowedFigure]:
    """Wait until the backlog is gone, then measure TTFT p95 of the requests that are sent next.

    In the meantime the caller appends to `waits_s` pairs of a time and the seconds of work that wait for each prefill
    worker. A promise is left out if its range exceeds the observed time and the backlog remains.
    """
    found, in_hand_s = [], in_hand_ns(device.engine, 1) / 1e9

    def gone_s() -> float | None:
        return next((at_s for at_s, each_s in waits_s if at_s > moved_s and each_s <= in_hand_s), None)

    while (at_s := gone_s()) is None and suite.now_s < moved_s + GONE_WITHIN_S:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    least, most = action["backlog_least_s"], action["backlog_most_s"]
    if most is not None and (at_s is not None or most <= GONE_WITHIN_S):
        found.append(FollowedFigure("backlog", least, most, (at_s or suite.now_s) - moved_s))
    if at_s is None or action["ttft_p95_most_ms"] is None:
        return found
    await asyncio.sleep(max(at_s + ARRIVE_S - suite.now_s, 0.0))
    sampled = [each for each in suite.requests if at_s <= each.sent_s <= at_s + ARRIVE_S]
    await asyncio.sleep(ANSWER_S)
    ttfts = [(each.first_s or suite.now_s) - each.sent_s for each in sampled if not each.broken]
    if len(ttfts) >= LEAST_ANSWERS:
        came_ms = p95(ttfts) * 1e3
        found.append(FollowedFigure("ttft", action["ttft_p95_least_ms"], action["ttft_p95_most_ms"], came_ms))
    return found


async def warm(suite: VirtualSuite, device: Device, isl: int) -> None:
    """Send spaced prompts from which workers learn their step times, then wait until nothing runs."""
    every_s = 2 * device.prompt_s(isl)
    await suite.play([(number * every_s, isl, 24) for number in range(int(WARM_S / every_s))])
    end_s = suite.now_s + REST_S
    while suite.now_s < end_s and suite.status()["verdict"]["code"] != "idle":  # noqa: ASYNC110
        await asyncio.sleep(0.2)


class _Trial:
    def __init__(self, suite: VirtualSuite, drawn: DrawnSuite, planted: Planted, faults: Path, job: WaitingJob) -> None:
        self._suite = suite
        self._drawn = drawn
        self._planted = planted
        self._faults = faults
        self._job = job
        self._first = 0
        """The number of requests made before the trial."""

    async def run(self, seed: int, *, apply: bool) -> Outcome:
        suite, planted = self._suite, self._planted
        await warm(suite, self._drawn.device, planted.load.isl)
        fired, reported = suite.alerts(), Reported()
        polling = suite.cluster.loop.spawn(suite.client, self._poll(reported))
        self._first = len(suite.requests)
        if planted.before is not None:
            suite.play(list(arrivals(planted.before, seed, PLAYED_S)))
            await asyncio.sleep(BEFORE_S)
        began_s = suite.now_s
        self._faults.write_text(json.dumps(self._planted_faults()))
        if planted.before is None:
            suite.play(list(arrivals(planted.load, seed, PLAYED_S)))
        self._job.begin.set()
        cause_s = await self._until_caused(began_s)
        outcome = judged(planted, seed, reported, began_s, cause_s)
        outcome.alerts = sorted(suite.alerts() - fired)
        if apply:
            await self._apply(outcome, reported)
        polling.cancel()
        return outcome

    async def _until_caused(self, began_s: float) -> float | None:
        """Wait until the cause has been present for some seconds. Return the seconds from `began_s` to it, or None."""
        suite, planted = self._suite, self._planted
        if not planted.wanted:
            await asyncio.sleep(DISTRACTED_S)
            return 0.0
        if planted.name in ("slow_link", "slow_worker"):
            await asyncio.sleep(WITHIN_S + AFTER_S)
            return 0.0
        while suite.now_s < began_s + MOST_S:
            if is_there(self._drawn.device, planted, suite.requests[self._first :]):
                cause_s = suite.now_s - began_s
                await asyncio.sleep(WITHIN_S + AFTER_S)
                return cause_s
            await asyncio.sleep(LOOK_S)
        return None

    async def _apply(self, outcome: Outcome, reported: Reported) -> None:
        """Follow the advice, and record the predicted and the measured pressure after it."""
        action = self._suite.status()["verdict"]["action"]
        if action is None:
            return
        role = action["role"]
        await self._suite.set_roles(action["workers"], f"mixed:{action['budget_tokens']}" if role == "mixed" else role)
        moved_s = self._suite.now_s
        await asyncio.sleep(MOVED_S[1])
        seen = [most for at_s, most in reported.pressures if at_s >= moved_s + MOVED_S[0]]
        outcome.predicted = action["pressure_then"]
        outcome.left = statistics.median(seen) if seen else None
        if action["backlog_most_s"] is not None or action["ttft_p95_most_ms"] is not None:
            outcome.followed = await see_latencies(self._suite, self._drawn.device, action, reported.waits_s, moved_s)

    async def _poll(self, reported: Reported) -> None:
        while True:
            reported.take(self._suite.status(), self._suite.now_s)
            await asyncio.sleep(POLL_S)

    def _planted_faults(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        names = [f"w{number}" for number in range(WORKERS)]
        workers = {"prefill": names[: self._planted.prefill], "decode": names[self._planted.prefill :]}
        for whose, fault in self._planted.faults.items():
            role = whose.removeprefix("every ")
            own = {name: value for name, value in fault.items() if name != "link_s"}
            if "link_s" in fault:
                own["link_gbps"] = self._drawn.link_gbps(self._planted.load.isl, fault["link_s"])
            for worker in workers[role] if whose != role else workers[role][:1]:
                found[worker] = own
        return found


@dataclass(slots=True)
class LastingResult:
    """The verdicts during one long load."""

    name: str
    seed: int
    split: str
    said_s: dict[str, float] = field(default_factory=dict)
    """The seconds of each verdict, from the start in balance, else from the first planted verdict or `NAMED_WITHIN_S`.
    """
    changes: list[tuple[float, str]] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    answered: int = 0
    refused: int = 0
    sentence: str = ""
    """The first sentence of a wrong verdict."""

    @property
    def right_s(self) -> float:
        """The seconds for which the verdict was right."""
        right = CALM if self.name == "busy" else frozenset({self.name})
        return sum(long_s for code, long_s in self.said_s.items() if code in right)


def run_lasting(name: str, seed: int, *, lasts_s: float = 0.0) -> LastingResult:
    """Play one load on a device drawn by the seed. `lasts_s` replaces the usual length if it is not 0."""
    drawn = draw_suite(seed, little_kv=False)
    planted = Situations(drawn.device, seed * 1_000).of(name)

    async def play(suite: VirtualSuite) -> LastingResult:
        return await _play_lasting(suite, planted, seed, lasts_s or LASTS_S[name])

    return run_virtual(suite_of(drawn, planted), seed, play)


async def _play_lasting(suite: VirtualSuite, planted: Planted, seed: int, lasts_s: float) -> LastingResult:
    found = LastingResult(planted.name, seed, f"{planted.prefill}P+{WORKERS - planted.prefill}D")
    right = CALM if planted.name == "busy" else planted.wanted
    suite.play(list(arrivals(planted.load, seed, lasts_s)))
    fired, began_s, named = suite.alerts(), suite.now_s, planted.name == "busy"
    said_s, alerts = defaultdict[str, float](float), set[str]()
    while suite.now_s < began_s + lasts_s:
        await asyncio.sleep(POLL_S)
        verdict = suite.status()["verdict"]
        code, at_s = str(verdict["code"]), suite.now_s - began_s
        named = named or code in right or at_s > NAMED_WITHIN_S
        if not named:
            continue
        if not found.changes or found.changes[-1][1] != code:
            found.changes.append((round(at_s, 1), code))
        if code not in right and not found.sentence:
            found.sentence = verdict["sentence"]
        said_s[code] += POLL_S
        alerts |= suite.alerts() - fired
    found.said_s = {code: round(long_s, 1) for code, long_s in said_s.items()}
    found.alerts = sorted(alerts)
    found.answered = sum(each.status == OK and each.done for each in suite.requests)
    found.refused = sum(each.status == TOO_MANY for each in suite.requests)
    return found
