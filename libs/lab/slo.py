"""The SLO of clients in its written form, `ttft=max(2s,3x),tpot=50ms`, and the score of answers against it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.books import LabAnswer, LabOutcome
from libs.lab.cluster.time import PS_PER_NS
from libs.policy.ratios import LEVELS
from libs.policy.speed import Speed
from libs.policy.step_time import MATRIX_ROWS
from libs.policy.worker.pace import largest_batch

EXAMPLE: Final = "ttft=max(2s,3x),tpot=50ms"
_UNITS_NS: Final = {"us": 1e3, "ms": 1e6, "s": 1e9}
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|x)")


@dataclass(frozen=True, slots=True)
class _Amount:
    value: float
    times_isolated: bool

    def ns(self, isolated_ns: float) -> float:
        return self.value * isolated_ns if self.times_isolated else self.value


@dataclass(frozen=True, slots=True)
class SloSpec:
    """A TTFT limit as the max or min of several amounts, and a TPOT limit."""

    text: str
    ttft: tuple[_Amount, ...]
    largest: bool
    """True if the largest of the amounts counts, False if the smallest does."""
    tpot_ns: int

    def ttft_limit_ns(self, isolated_ns: float) -> int:
        """Return the TTFT limit of a request whose prompt takes `isolated_ns` on an idle worker."""
        return round((max if self.largest else min)(each.ns(isolated_ns) for each in self.ttft))


def parse_slo(text: str) -> SloSpec:
    """Parse an SLO; raise InvalidRequest, which shows the expected form."""
    parts = dict(_part(part, text) for part in re.split(r",(?![^(]*\))", text.replace(" ", "")))
    if set(parts) != {"ttft", "tpot"}:
        raise _unreadable(text, "it needs ttft and tpot, each once")
    tpot = _amount(parts["tpot"], text)
    if tpot.times_isolated:
        raise _unreadable(text, "tpot is a time, not a multiple")
    ttft, largest = parts["ttft"], True
    if found := re.fullmatch(r"(max|min)\((.+)\)", ttft):
        largest, ttft = found[1] == "max", found[2]
    amounts = tuple(_amount(each, text) for each in ttft.split(","))
    return SloSpec(text, amounts, largest, round(tpot.value))


def _part(part: str, text: str) -> tuple[str, str]:
    name, is_given, value = part.partition("=")
    if not is_given:
        raise _unreadable(text, f"{part!r} has no value")
    return name, value


def _amount(text: str, whole: str) -> _Amount:
    found = _AMOUNT.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise _unreadable(whole, f"{text!r} is not a time above zero such as 50ms, or a multiple such as 3x")
    unit = found[2]
    return _Amount(float(found[1]) * _UNITS_NS.get(unit, 1.0), unit == "x")


def _unreadable(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"SLO {text!r}: {why}; write it like {EXAMPLE} (3x is three times the prompt's own prefill)")


MAX_LATE_SHARE: Final = 0.01
"""The share of tokens of a good answer that may come after t_first + TPOT·k + 200 ms."""
QUANTILES: Final = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
NEAR: Final = (0.8, 1.25)
"""The range of predicted over actual TTFT in which a prediction counts as close."""


def is_good(answer: LabAnswer) -> bool:
    """Return whether the first token was in time and the TPOT was met, both on average and by nearly all tokens."""
    if answer.outcome is not LabOutcome.COMPLETED or answer.ttft_ns > answer.ttft_limit_ns:
        return False
    return answer.tpot_ns <= answer.tpot_limit_ns and answer.late <= MAX_LATE_SHARE * answer.tokens


def is_lost(answer: LabAnswer, now_ps: int) -> bool:
    """Return whether an answer can no longer be good, although it may still continue."""
    if answer.outcome is not LabOutcome.UNFINISHED:
        return not is_good(answer)
    if answer.tokens:
        return answer.ttft_ns > answer.ttft_limit_ns
    return now_ps - answer.arrival_ps > answer.ttft_limit_ns * PS_PER_NS


class IdealWork:
    """The GPU time of requests in a cluster without friction.

    It is that of the prompt, plus a share of decode steps over the largest batch that meets the TPOT.
    """

    def __init__(self, speed: Speed, tpot_ns: int, max_sequences: int) -> None:
        self._speed = speed
        self._tpot_ns = tpot_ns
        self._max_sequences = max_sequences
        self._batches: dict[int, int] = {}

    def prompt_ns(self, tokens: int) -> float:
        """Return the time to compute a prompt alone on an idle worker without cached blocks."""
        return self._speed.prompt_ns(tokens, tokens * tokens)

    def ns(self, input_tokens: int, output_tokens: int) -> float:
        """Return the ideal time of the whole request."""
        model = self._speed.step_time
        context = input_tokens + output_tokens / 2
        batch = self._batch(int(context))
        each = (model.reading_ns(MATRIX_ROWS) + model.sequences_ns(batch)) / batch + model.decode_kv_token_ns * context
        return self.prompt_ns(input_tokens) + max(output_tokens - 1, 0) * each

    def _batch(self, context: int) -> int:
        rough = max(1 << context.bit_length(), 256)
        if rough not in self._batches:
            found = largest_batch(self._speed.step_time, self._tpot_ns, rough, self._max_sequences)
            self._batches[rough] = max(found, 1)
        return self._batches[rough]


@dataclass(frozen=True, slots=True)
class Score:
    """The totals over the requests that count: all of them, or those after the warm-up."""

    requests: int
    completed: int
    aborted: int
    rejected: int
    unfinished: int
    good: int
    slo_attainment: float
    """The share of requests that were good."""
    work_attainment: float
    """The share of ideal GPU time that went into good requests."""
    by_class: dict[str, float]
    """The share of good requests in each service class."""
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    ttft_prediction: dict[str, float]
    """TTFT predicted at binding over the actual one: quantiles, and `within`, the share between 0.8 and 1.25.

    `covered_p50` and its siblings are the shares of TTFTs below the bound predicted for that chance. Empty without
    predictions.
    """


def score(answers: Sequence[LabAnswer], work: IdealWork) -> Score:
    good = [is_good(answer) for answer in answers]
    ideal = [work.ns(answer.request.input_tokens, answer.request.output_tokens) for answer in answers]
    outcomes = [answer.outcome for answer in answers]
    classes: dict[str, list[bool]] = {}
    for answer, is_one in zip(answers, good, strict=True):
        classes.setdefault(answer.request.service_class, []).append(is_one)
    return Score(
        requests=len(answers),
        completed=outcomes.count(LabOutcome.COMPLETED),
        aborted=outcomes.count(LabOutcome.ABORTED),
        rejected=outcomes.count(LabOutcome.REJECTED),
        unfinished=outcomes.count(LabOutcome.UNFINISHED),
        good=sum(good),
        slo_attainment=sum(good) / len(answers) if answers else 0.0,
        work_attainment=sum(ns for ns, is_one in zip(ideal, good, strict=True) if is_one) / max(sum(ideal), 1.0),
        by_class={name: sum(each) / len(each) for name, each in sorted(classes.items()) if name},
        ttft_s=quantiles(answer.ttft_ns / 1e9 for answer in answers if answer.tokens),
        tpot_s=quantiles(answer.tpot_ns / 1e9 for answer in answers if answer.tokens > 1),
        ttft_prediction=_prediction(answers),
    )


def _prediction(answers: Sequence[LabAnswer]) -> dict[str, float]:
    ratios = sorted(each.predicted_ttft_ns / each.ttft_ns for each in answers if each.predicted_ttft_ns and each.tokens)
    if not ratios:
        return {}
    low, high = NEAR
    found = {f"p{round(share * 100)}": ratios[int(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9)}
    found["within"] = sum(low <= each <= high for each in ratios) / len(ratios)
    reported = [each for each in answers if each.likely_ttft_ns and each.tokens]
    for place, level in enumerate(LEVELS if reported else ()):
        covered = sum(each.ttft_ns <= each.likely_ttft_ns[place] for each in reported) / len(reported)
        found[f"covered_p{round(level * 100)}"] = covered
    return found


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Return mean and quantiles; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    found: dict[str, Any] = {"mean": sum(ordered) / len(ordered)}
    for share, name in QUANTILES:
        found[name] = ordered[min(int(share * len(ordered)), len(ordered) - 1)]
    return found
