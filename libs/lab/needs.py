"""The fewest GPUs with which each policy keeps the SLO on a trace, and whether disaggregation saves any."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, Final, Literal

from libs.lab.experiment import Experiment, LabReport
from libs.lab.policies import Design, design_of, has_hindsight
from libs.lab.search import WANTED, Measure, fewest_workers, first_guess, fluid_rate, passes, prompts_share
from libs.lab.study import Note, run_named, side_by_side, without_split

MARGIN: Final = 1.25
"""The number of workers tried first, as a multiple of the fluid bound."""

FEWEST_ANSWERS: Final = 4
"""The minimum length of a trace whose load levels off, in mean answers at the pace of the SLO."""


@dataclass(frozen=True, slots=True)
class Need:
    """The search for the fewest workers under one policy."""

    policy: str
    design: Design
    workers: int | None
    """The fewest workers; None if even the largest number tried misses the SLO."""
    report: LabReport
    """The run at that number of workers, or else the one at the largest number tried."""
    tried: dict[int, float]
    """The good share by number of workers; 0 if a class of requests was starved."""

    @property
    def split(self) -> tuple[int, int]:
        """The workers for prefill alone and the others, at the start of the run."""
        prefill, others = map(int, self.report.roles.split(":"))
        return prefill, others


@dataclass(frozen=True, slots=True)
class DesignAnswer:
    """The outcome for a trace: the design that needs the fewest GPUs, and the two policies that decide it."""

    verdict: Literal["disaggregate", "aggregate", "neither", "unknown"]
    sentence: str
    winner: Need | None
    loser: Need | None


def find_need(experiment: Experiment, name: str, note: Note, *, most: int, measure: Measure) -> Need:
    """Search for one policy's fewest workers, up to `most`. Splits are chosen again at each size."""
    policy, design = without_split(name), design_of(without_split(name))
    reports: dict[int, LabReport] = {}

    def attempt(workers: int) -> LabReport:
        sized = replace(experiment, workers=workers)
        guess = 0
        if has_hindsight(policy) and reports:
            near = reports[min(reports, key=lambda each: abs(each - workers))]
            prefill, others = map(int, near.roles.split(":"))
            guess = min(max(round(workers * prefill / (prefill + others)), 1), workers - 1)
        # One split that meets the SLO is enough to show that this number of workers suffices.
        reports[workers] = run_named(
            sized,
            policy,
            lambda line: note(f"{workers} workers: {line}"),
            guess=guess,
            enough=lambda report: passes([report], measure) >= WANTED,
        )
        return reports[workers]

    rate = fluid_rate(experiment, measure)
    fluid = ceil(experiment.workers * MARGIN / rate) if rate else 1
    least = 1 if design == "aggregated" else 2
    found = fewest_workers(attempt, least, most, guess=min(fluid, most), measure=measure)
    tried = {workers: passes([report], measure) for workers, report in sorted(reports.items())}
    workers, report = found or (None, reports[max(reports)])
    return Need(policy, design, workers, report, tried)


def find_needs(
    experiment: Experiment, names: Sequence[str], jobs: int, note: Note, *, most: int, measure: Measure
) -> Iterator[tuple[str, Need]]:
    """Yield (policy, need) as results arrive."""
    yield from side_by_side(partial(find_need, most=most, measure=measure), experiment, names, jobs, note)


def decide(needs: Sequence[Need], gpus: int, most: int) -> DesignAnswer:
    """Compare the best policies of the two designs. With equal numbers, aggregating wins, since it has fewer parts.

    `gpus` are those of one worker.
    """
    split, whole, hybrid = (best_of(needs, each) for each in ("disaggregated", "aggregated", "hybrid"))
    unmet = f"more than {most * gpus}"
    if split is None or whole is None:
        one = split or whole
        said = f"{one.policy} needs {_gpus(one, gpus) or unmet}" if one else "no policy was searched to its end"
        missing = "aggregated" if split else "disaggregated"
        sentence = f"Unknown: {said}, and no {missing} policy was compared" if one else f"Unknown: {said}"
        return DesignAnswer("unknown", sentence, one, None)
    if split.workers is None and whole.workers is None:
        sentence = f"Neither: no policy keeps the SLO with up to {most * gpus} GPUs"
        return DesignAnswer("neither", sentence, None, None)
    if whole.workers is None or (split.workers is not None and split.workers < whole.workers):
        winner, loser = split, whole
        sentence = (
            f"Disaggregate: {_gpus(split, gpus)} as {split_words(split, gpus)} by {split.policy}; "
            f"aggregated needs {_gpus(whole, gpus) or unmet} ({whole.policy})"
        )
    else:
        winner, loser = whole, split
        same = "as many" if split.workers == whole.workers else ""
        sentence = (
            f"Aggregate: {_gpus(whole, gpus)} by {whole.policy}; "
            f"disaggregated needs {same or _gpus(split, gpus) or unmet} ({split.policy})"
        )
    if hybrid and hybrid.workers and winner.workers and hybrid.workers < winner.workers:
        sentence += f". {hybrid.policy}, which is in between, needs {_gpus(hybrid, gpus)}"
    return DesignAnswer("disaggregate" if winner is split else "aggregate", sentence, winner, loser)


def best_of(needs: Sequence[Need], design: Design) -> Need | None:
    """Return the policy of this design with the fewest workers; of equals, the one with the most good requests."""
    there = [each for each in needs if each.design == design]
    return min(there, key=rank, default=None)


def rank(need: Need) -> tuple[float, float]:
    """Return a sort key, smaller being better."""
    return need.workers or float("inf"), -need.report.score.slo_attainment


def split_words(need: Need, gpus: int) -> str:
    """Return a split in words, in GPUs: "2 prefill + 4 decode"."""
    prefill, others = (each * gpus for each in need.split)
    if need.design == "hybrid":
        return f"{prefill} for prefill + {others} for both" if prefill else f"{others} for both"
    if not prefill:
        return f"{others} for both"
    start = " at the start" if need.report.role_moves else ""
    return f"{prefill} prefill + {others} decode{start}"


def _gpus(need: Need, gpus: int) -> str:
    if need.workers is None:
        return ""
    count = need.workers * gpus
    return f"{count} GPU{'s' if count > 1 else ''}"


def reasons(experiment: Experiment, answer: DesignAnswer, versus: LabReport | None) -> list[str]:
    """Return sentences that explain the answer. `versus` is the loser's run with the winner's number of workers."""
    share = prompts_share(experiment)
    found = [f"Prompts are {share:.0%} of the GPU time that the trace asks for, answers the rest."]
    if short := _short(experiment):
        found.append(short)
    if answer.winner and answer.loser and answer.winner.workers == 1:
        found.append("One worker is enough, and a split takes at least two.")
    if answer.winner is None or answer.loser is None or answer.winner.workers is None or versus is None:
        return found
    gpus = experiment.hardware.profile.gpus
    found += [
        f"With {_gpus(answer.winner, gpus)}, {_figures(answer.winner.policy, answer.winner.report)}.",
        f"With as many, {_figures(answer.loser.policy, versus)}.",
    ]
    if answer.winner.workers == answer.loser.workers:
        found.append("Both designs need the same number, so splitting them would add transfers and save nothing.")
    return found


def _short(experiment: Experiment) -> str:
    """Return a warning about a trace that ends while most of its answers still decode, or an empty text."""
    requests = experiment.trace.requests
    tokens = sum(each.output_tokens for each in requests) / len(requests)
    answer_s, trace_s = tokens * experiment.slo.tpot_ns / 1e9, experiment.trace.duration_ns / 1e9
    if answer_s * FEWEST_ANSWERS <= trace_s:
        return ""
    return (
        f"The trace lasts {trace_s:,.0f} s and a mean answer up to {answer_s:,.0f} s: its load never levels off, so "
        "a longer trace may need more GPUs."
    )


def _figures(policy: str, report: LabReport) -> str:
    score = report.score
    return (
        f"{policy} serves {score.slo_attainment:.1%} in time "
        f"(TTFT p90 {score.ttft_s.get('p90', 0.0):.2f} s, TPOT p90 {score.tpot_s.get('p90', 0.0) * 1e3:.1f} ms)"
    )


def compare_at_winner(experiment: Experiment, answer: DesignAnswer, note: Note) -> LabReport | None:
    """Run the loser with the winner's number of workers. Return None if there is no such pair or it cannot run."""
    if answer.winner is None or answer.loser is None or answer.winner.workers is None:
        return None
    if answer.loser.workers == answer.winner.workers:
        return answer.loser.report
    if answer.winner.workers < 2 and answer.loser.design != "aggregated":
        return None
    sized = replace(experiment, workers=answer.winner.workers)
    return run_named(sized, answer.loser.policy, note, guess=min(first_guess(sized), sized.workers - 1))


def as_record(need: Need, gpus: int) -> dict[str, Any]:
    """Return a JSON record of one policy's need."""
    score = need.report.score
    prefill, others = need.split
    return {
        "policy": need.policy,
        "design": need.design,
        "gpus_needed": need.workers * gpus if need.workers else None,
        "prefill_gpus": prefill * gpus,
        "other_gpus": others * gpus,
        "role_moves": need.report.role_moves,
        "slo_attainment": score.slo_attainment,
        "work_attainment": score.work_attainment,
        "ttft_s": score.ttft_s,
        "tpot_s": score.tpot_s,
        "tried": {str(workers * gpus): good for workers, good in need.tried.items()},
    }
