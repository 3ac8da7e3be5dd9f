"""The command `fulcrum lab compare`: policies side by side on one trace, as a table and as a page."""

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from libs.cli.console import make_console
from libs.cli.lab.asked import RunOptions
from libs.cli.lab.page import write_page
from libs.cli.lab.progress import noting
from libs.cli.lab.runs import WIDE, about, rounded, table
from libs.cli.report.page import make_folder
from libs.contracts.errors import InvalidRequest
from libs.lab.experiment import Experiment, LabReport
from libs.lab.policies import ALL, has_hindsight, policy_named
from libs.lab.search import merit
from libs.lab.study import count_gpus, quiet, run_all

Result = TypeVar("Result")
Needs = dict[str, int | None]
"""The workers that each policy needs; None means more than were tried."""


def compare_all(
    asked: RunOptions, policies: str, *, count: bool, report: Path | None, jobs: int, as_json: bool
) -> None:
    """Print each policy's figures. Results found before Ctrl-C are printed and written too."""
    names = list(ALL) if policies == "all" else policies.split(",")
    reports: dict[str, LabReport] = {}
    needs: Needs = {}
    interrupted = False
    quiet()
    with noting() as notes:
        experiment = asked.experiment()
        if count and experiment.losses:
            raise InvalidRequest("which workers are lost says nothing of clusters of other sizes: add --no-gpus")
        if report is not None:
            make_folder(report)
        for name in names:
            if not has_hindsight(name):
                policy_named(name, experiment.workers)
        try:
            cores = jobs or os.cpu_count() or 1
            for name, found in unless_interrupted(run_all(experiment, names, cores)):
                reports[name] = found
                notes.done(f"{len(reports)} of {len(names)}: {found.policy}, {found.score.slo_attainment:.1%} good")
            for name, workers in count_gpus(experiment, names, cores) if count else ():
                needs[name] = workers
                notes.done(f"{name} needs {workers or 'more'} workers")
        except KeyboardInterrupt:
            interrupted = True
    ranked = sorted(reports.values(), key=merit, reverse=True)
    by_policy = {found.policy: needs.get(name) for name, found in reports.items()}
    figures = _figures(experiment, ranked, by_policy, interrupted=interrupted)
    if report is not None:
        (report / "compare.json").write_text(json.dumps(figures, indent=1) + "\n")
        write_page(report / "index.html", experiment, ranked, by_policy)
    if as_json:
        print(json.dumps(figures))
    else:
        _show(experiment, ranked, by_policy, report)
    if interrupted:
        sys.exit(130)


def unless_interrupted(found: Iterable[Result]) -> Iterator[Result]:
    """Yield results as they arrive, and raise KeyboardInterrupt at the next one at the latest after Ctrl-C.

    Python raises it wherever it happens to be, and drops it inside a finalizer or a callback.
    """
    asked = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        for each in found:
            yield each
            if asked:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _figures(experiment: Experiment, ranked: list[LabReport], needs: Needs, *, interrupted: bool) -> dict[str, Any]:
    gpus = experiment.hardware.profile.gpus
    return {
        "trace": experiment.trace.name,
        "workers": experiment.workers,
        "gpus_per_worker": gpus,
        "profile": experiment.hardware.profile.name,
        "slo": experiment.slo.text,
        "interrupted": interrupted,
        "policies": [
            {
                **rounded(report.as_json()),
                "gpus_needed": workers * gpus if (workers := needs.get(report.policy)) else None,
            }
            for report in ranked
        ],
    }


def _show(experiment: Experiment, ranked: list[LabReport], needs: Needs, report: Path | None) -> None:
    console = make_console()
    console.print(about(experiment.trace))
    gpus = experiment.hardware.profile.gpus
    needed = {name: workers * gpus if workers else None for name, workers in needs.items()}
    console.print(table(ranked, needed, wide=console.width >= WIDE))
    if report is not None:
        console.print(f"\nThe page is {report / 'index.html'}")
