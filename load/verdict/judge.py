"""The judgement of a trial: whether its cause was present, what `/v1/status` reported, and whether that was right."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from libs.policy.pressure import KV_FILL
from load.verdict.situations import Device, Planted

WITHIN_S: Final = 3.0
# A trial goes on for so long after its cause appeared: a wrong verdict later counts too.
AFTER_S: Final = 4.0
DISTRACTED_S: Final = 14.0
# A cause that is not present by then was not planted well: the trial reports it and counts as failed.
MOST_S: Final = 20.0
LOOK_S: Final = 0.05
CALM: Final = frozenset({"idle", "balanced", "unknown"})
# A prefill worker's worth of waiting prompts that counts as a queue.
QUEUED_S: Final = 0.5


class Request(Protocol):
    """One request as its client sees it."""

    isl: int
    tokens: int
    first_s: float
    done: bool


@dataclass(slots=True)
class Outcome:
    name: str
    seed: int
    wanted: Sequence[str]
    right: bool
    why: str
    """The reason why it is wrong; empty where it is right."""
    cause_s: float | None
    """Seconds from the first request or fault until clients saw the cause; None if they never did."""
    named_s: float | None
    """Seconds from then until the right code was first reported; negative if it was earlier."""
    sentence: str
    seen: list[tuple[float, str]] = field(default_factory=list)
    """Each change of the verdict: seconds, and the codes."""
    pressures: list[tuple[float, ...]] = field(default_factory=list)
    """(s, prefill, batch, KV, cluster; of decode workers: KV wait, starved, busy)"""
    alerts: list[str] = field(default_factory=list)
    behind_s: float | None = None
    """Seconds until all planted causes stood in the verdict; None if they never did."""
    predicted: float | None = None
    """The pressure that following the advice leaves, as the advice predicts it. None if there was no advice."""
    left: float | None = None
    """The pressure measured after the advice was followed."""

    @property
    def off(self) -> float | None:
        """Return the relative error of the prediction: measured over predicted, less 1."""
        if self.predicted is None or self.left is None:
            return None
        return self.left / max(self.predicted, 1e-9) - 1


def is_there(device: Device, planted: Planted, asked: Iterable[Request]) -> bool:
    """Return whether clients see the cause: a queue of prompts, or more sequences than TPOT or KV allows."""
    live = [each for each in asked if not each.done]
    queued = [each for each in live if not each.first_s]
    decoding = [each for each in live if each.first_s]
    waits_s = sum(device.prompt_s(each.isl) for each in queued) / planted.prefill
    tokens = sum(each.isl + each.tokens for each in decoding)
    context = tokens / max(len(decoding), 1)
    batch = len(decoding) / (device.largest_batch(max(context, 1)) * planted.decode)
    kv = tokens / (device.kv_tokens * KV_FILL * planted.decode)
    short = {
        "prefill_bound": waits_s > QUEUED_S,
        "two: prefill and worker": waits_s > QUEUED_S,
        "decode_bound_tpot": batch >= 1,
        "decode_bound_kv": kv >= 1,
        "too_small": waits_s > QUEUED_S and max(batch, kv) >= 1,
    }
    return short[planted.name]


async def until_caused(
    device: Device,
    planted: Planted,
    asked: Callable[[], Iterable[Request]],
    now_s: Callable[[], float],
    began_s: float,
) -> float | None:
    """Wait until the cause has been present long enough; return when it appeared in seconds from `began_s`, or None."""
    if not planted.wanted:
        await asyncio.sleep(DISTRACTED_S)
        return 0.0
    if planted.name in ("slow_link", "slow_worker"):
        await asyncio.sleep(WITHIN_S + AFTER_S)
        return 0.0
    while now_s() < began_s + MOST_S:
        if is_there(device, planted, asked()):
            cause_s = now_s() - began_s
            await asyncio.sleep(WITHIN_S + AFTER_S)
            return cause_s
        await asyncio.sleep(LOOK_S)
    return None


@dataclass(slots=True)
class Reported:
    """What `/v1/status` reported, change by change."""

    changes: list[tuple[float, str, frozenset[str], str]] = field(default_factory=list)
    pressures: list[tuple[float, ...]] = field(default_factory=list)

    def take(self, status: dict[str, Any], at_s: float) -> None:
        """Record one answer as of a moment."""
        verdict = status["verdict"]
        causes = frozenset(each["code"] for each in verdict["causes"])
        last = self.changes[-1] if self.changes else None
        if last is None or (last[1], last[2]) != (verdict["code"], causes):
            self.changes.append((at_s, verdict["code"], causes, verdict["sentence"]))
        for model in status["models"]:
            if model["known"]:
                decode = model["decode"]
                found = (model["prefill"]["pressure"], decode["batch_pressure"], decode["kv_pressure"])
                shares = (decode["kv_wait"] or 0.0, decode["starved"] or 0.0, decode["busy"] or 0.0)
                self.pressures.append((at_s, *found, model["cluster_pressure"], *shares))


def judged(planted: Planted, seed: int, reported: Reported, began_s: float, cause_s: float | None) -> Outcome:
    """Judge a trial. Reported times are relative to `began_s`, as `cause_s` is; None means that the cause never
    appeared.
    """
    changes = [(at_s - began_s, code, causes, sentence) for at_s, code, causes, sentence in reported.changes]
    outcome = Outcome(planted.name, seed, sorted(planted.wanted), False, "", cause_s, None, "")
    outcome.seen = [(round(at_s, 2), " ".join([code, *sorted(causes - {code})])) for at_s, code, causes, _ in changes]
    outcome.pressures = [
        (round(at_s - began_s, 2), *(round(each, 2) for each in found)) for at_s, *found in reported.pressures
    ]
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
    wrong = [each for each in named if each[1] not in planted.wanted or not each[2] <= allowed]
    first = next((each for each in named if each[1] in planted.wanted), None)
    whole = next((each for each in named if each[1] in planted.wanted and each[2] >= planted.behind), None)
    outcome.sentence = (first or (named or changes)[0])[3]
    outcome.named_s = None if first is None else round(first[0] - cause_s, 3)
    outcome.behind_s = None if whole is None else whole[0] - cause_s
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
