"""Series of experiments: policies by name over one trace on several cores, optionally with the best split in
hindsight.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import cache
from multiprocessing import active_children, get_context
from multiprocessing.queues import SimpleQueue
from typing import Final, TypeVar

import structlog

from libs.lab.experiment import Experiment, LabReport, run
from libs.lab.offline import Schedule, best_offline
from libs.lab.policies import OFFLINE, bare_name, has_hindsight, policy_named, with_split
from libs.lab.search import WANTED, Measure, SearchResult, best_split, first_guess, highest_rate, passes
from libs.lab.traces.scaling import ScaleMethod, scale_rate

Result = TypeVar("Result")
Note = Callable[[str], None]
"""A callback that receives a line of progress."""


def run_named(
    experiment: Experiment,
    name: str,
    note: Note = lambda line: None,
    *,
    guess: int = 0,
    enough: Callable[[LabReport], bool] = lambda report: False,
) -> LabReport:
    """Run one policy. `fulcrum` and `static` without a split use the best one in hindsight.

    The search for it starts at `guess` prefill workers (0 means their share of the work) and ends early at a split for
    which `enough` returns true.
    """
    workers = experiment.workers
    if name == OFFLINE:
        return best_offline(experiment).report
    if not has_hindsight(name):
        return run(experiment, policy_named(name, workers), _counter(experiment, name, note))[0]

    def attempt(prefill: int) -> LabReport:
        split = with_split(name, prefill, workers - prefill)
        report = run(experiment, policy_named(split, workers), _counter(experiment, split, note))[0]
        note(f"{split}: {report.score.slo_attainment:.1%} of requests good")
        return report

    # Raises InvalidRequest if the name cannot have a split.
    policy_named(with_split(name, 1, max(workers - 1, 1)), workers)
    return best_split(workers, guess or first_guess(experiment), attempt, enough)


def _counter(experiment: Experiment, name: str, note: Note) -> Callable[[int], None]:
    total = len(experiment.trace.requests)

    def on_progress(ended: int) -> None:
        note(f"{name}: {ended:,} of {total:,} requests")

    return on_progress


def scaled(experiment: Experiment, factor: float, method: ScaleMethod) -> Experiment:
    """Return the experiment at `factor` times the rate of its trace."""
    if factor == 1:
        return experiment
    return replace(experiment, trace=scale_rate(experiment.trace, factor, method, experiment.seed))


def search_named(
    experiment: Experiment,
    name: str,
    method: ScaleMethod,
    seeds: int,
    note: Note,
    *,
    start: float = 1.0,
    every_step: bool = False,
) -> SearchResult:
    """Find the highest rate at which a policy meets the SLO, starting at `start` times the trace's rate.

    Each seed draws another superposition; compression has only one.
    """
    return search_measures(
        experiment, name, method, seeds, note, measures=("both",), start=start, every_step=every_step
    )["both"]


def search_measures(
    experiment: Experiment,
    name: str,
    method: ScaleMethod,
    seeds: int,
    note: Note = lambda line: None,
    *,
    measures: Sequence[Measure],
    start: float = 1.0,
    every_step: bool = False,
    quick: bool = False,
) -> dict[Measure, SearchResult]:
    """Search as `search_named` does by each of these measures, which share the runs at each rate.

    If `quick`, a search over one seed ends runs that can no longer pass, and tries no other split once one passes. The
    rates found are the same. The shares noted for rates that fail are too low.
    """

    guess = 0
    known: Schedule | None = None
    hindsight = has_hindsight(name)
    quick = quick and seeds == 1
    if quick and not hindsight:
        # Then only the failure of a rate counts, not its extent. Splits are compared by their shares.
        experiment = replace(experiment, give_up_below=WANTED)

    def enough(report: LabReport) -> bool:
        """Return whether no other split must be tried, because this one passes by every measure."""
        return quick and passes([report]) >= WANTED

    def offline(each: Experiment) -> LabReport:
        nonlocal known
        found = best_offline(each, known)
        if passes([found.report]) >= WANTED:
            known = found.schedule
        return found.report

    @cache
    def at_rate(rate: float) -> Sequence[LabReport]:
        nonlocal guess
        drawn = (replace(experiment, seed=seed) for seed in range(experiment.seed, experiment.seed + seeds))
        reports = []
        for each in drawn:
            made = scaled(each, rate, method)
            reports.append(offline(made) if name == OFFLINE else run_named(made, name, guess=guess, enough=enough))
            guess = int(reports[-1].roles.partition(":")[0]) if hindsight else 0
        note(f"{name}: {reports[0].score.slo_attainment:.1%} good at {rate:.2f} times the rate")
        return reports

    return {each: highest_rate(at_rate, start, every_step=every_step, measure=each) for each in measures}


def without_split(name: str) -> str:
    """Return the policy's name for a cluster of another size, which the present split does not fit."""
    bare, extras = bare_name(name)
    kind, *numbers = bare.split(":")
    return kind + extras if len(numbers) > 1 else name


def side_by_side(
    call: Callable[[Experiment, str, Note], Result],
    experiment: Experiment,
    names: Sequence[str],
    jobs: int,
    note: Note = lambda line: None,
) -> Iterator[tuple[str, Result]]:
    """Yield (policy, result of the call) as results arrive. A caller that stops iterating ends the remaining calls.

    The calls' notes arrive late by up to `LOOK_S`.
    """
    # Do not fork, because reading traces may have started threads.
    context = get_context("spawn")
    notes: SimpleQueue[str] = context.SimpleQueue()
    pool = ProcessPoolExecutor(
        max(min(jobs, len(names)), 1), mp_context=context, initializer=_start, initargs=(experiment, notes)
    )
    try:
        name_of = {pool.submit(_call, call, name): name for name in names}
        waiting = set(name_of)
        while waiting:
            done, waiting = wait(waiting, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            while not notes.empty():
                note(notes.get())
            for future in done:
                yield name_of[future], future.result()
    finally:
        for child in active_children():  # a run may take minutes, and its result is no longer needed
            child.kill()
        pool.shutdown(cancel_futures=True)


LOOK_S: Final = 1.0
"""The pause between two polls for notes from the processes of a pool, and between two notes of one of them."""
_shared: tuple[Experiment, Note] | None = None
"""The experiment of this pool process, sent once because traces are large, and the destination of its notes."""


def _start(experiment: Experiment, notes: SimpleQueue[str]) -> None:
    global _shared  # noqa: PLW0603 (a process of a pool has nowhere else)
    noted_s = time.monotonic()

    def note(line: str) -> None:
        nonlocal noted_s
        if time.monotonic() - noted_s >= LOOK_S:
            noted_s = time.monotonic()
            notes.put(line)

    _shared = experiment, note
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    quiet()


def _call(call: Callable[[Experiment, str, Note], Result], name: str) -> Result:
    assert _shared is not None
    experiment, note = _shared
    return call(experiment, name, note)


def quiet() -> None:
    # The dispatcher would log a million requests of a simulation.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
