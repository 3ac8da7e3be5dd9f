"""The command `fulcrum lab compare`: policies side by side on one trace, as a table and as a page."""

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, TypeVar

from libs.cli.console import make_console
from libs.cli.lab.runs import WIDE, RunOptions, about, noting, rounded, table
from libs.cli.page import draw_svg, html_page, make_folder
from libs.contracts.errors import InvalidRequest
from libs.lab.experiment import Experiment, LabReport
from libs.lab.needs import find_needs
from libs.lab.policies import ALL, has_hindsight, policy_named
from libs.lab.search import Measure, merit
from libs.lab.study import quiet, run_named, side_by_side
from libs.lab.traces.describe import describe

COLORS: Final = {"prefill": "#2a9fbc", "decode": "#4c9f50", "kv_wait": "#d9a514", "idle": "#c9d0d8"}


def write_page(path: Path, experiment: Experiment, ranked: Sequence[LabReport], needs: dict[str, int | None]) -> None:
    """Write a table and plots, the best policy first. Raise InvalidRequest without matplotlib."""
    found = describe(experiment.trace)
    gpus = experiment.hardware.profile.gpus
    notes = "".join(f'<p class="dim">{escape(note)}</p>' for note in experiment.trace.notes)
    interference = (
        "measured" if experiment.hardware.mixed_measured and experiment.interference is None else "an assumption"
    )
    plots = "".join(
        f"<h2>{title}</h2>{draw_svg(draw)}"
        for title, draw in (
            ("Served in time", lambda axes: _attainment(axes, ranked)),
            ("Time to first token", lambda axes: _spans(axes, ranked, "ttft_s", 1.0, "seconds", log=True)),
            ("Time per output token", lambda axes: _spans(axes, ranked, "tpot_s", 1e3, "milliseconds")),
            ("Where GPU time went", lambda axes: _gpu_time(axes, ranked)),
        )
        if ranked
    )
    path.write_text(
        html_page(
            f"Policies on {experiment.trace.name}",
            f"""<h1>Policies on {escape(experiment.trace.name)}</h1>
<p>{len(experiment.trace.requests):,} requests in {found["duration_s"]:,.0f} s on {experiment.workers} workers of
{gpus} GPU{"s" if gpus > 1 else ""}, {escape(experiment.hardware.profile.name)}; {escape(experiment.slo.text)}</p>
<p class="dim">Good: complete, first token in time, mean TPOT kept and 99 % of tokens within 200 ms of it.
Interference of prompts beside decodes is {experiment.step_time.interference:g}, {interference}.</p>{notes}
<div class="scroll">{_table(ranked, needs, gpus)}</div>{plots}""",
        )
    )


def _table(ranked: Sequence[LabReport], needs: dict[str, int | None], gpus: int) -> str:
    titles = (
        "policy", "roles", "good", "work good", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "good/s/GPU",
        "not served", "role moves", "GPUs needed",
    )  # fmt: skip
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = []
    for place, report in enumerate(ranked):
        score = report.score
        needed = needs.get(report.policy)
        cells = [
            report.policy, report.roles, f"{score.slo_attainment:.1%}", f"{score.work_attainment:.1%}",
            *(f"{score.ttft_s.get(name, 0):.2f} s" for name in ("p50", "p90", "p99")),
            *(f"{score.tpot_s.get(name, 0) * 1e3:.1f} ms" for name in ("p50", "p90", "p99")),
            f"{report.goodput_rps_per_gpu:.3f}", f"{score.rejected + score.aborted + score.unfinished:,}",
            f"{report.role_moves:,}", f"{needed * gpus}" if needed else "–",
        ]  # fmt: skip
        mark = ' class="best"' if not place else ""
        rows.append(f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _attainment(axes: Any, ranked: Sequence[LabReport]) -> None:
    places = range(len(ranked))
    width = 0.4
    axes.bar([at - width / 2 for at in places], [100 * each.score.slo_attainment for each in ranked], width,
             label="requests", color=COLORS["prefill"])  # fmt: skip
    axes.bar([at + width / 2 for at in places], [100 * each.score.work_attainment for each in ranked], width,
             label="work", color=COLORS["decode"])  # fmt: skip
    axes.axhline(90, color="#888", linewidth=0.8, linestyle="--")
    axes.set_ylabel("% good")
    _name(axes, ranked)
    axes.legend(loc="lower left")


def _spans(axes: Any, ranked: Sequence[LabReport], name: str, factor: float, unit: str, *, log: bool = False) -> None:
    for at, report in enumerate(ranked):
        values = getattr(report.score, name)
        if not values:
            continue
        low, middle, high = (max(values[each] * factor, 1e-3) for each in ("p50", "p90", "p99"))
        axes.plot([at, at], [low, high], color="#99a", linewidth=2)
        for value, mark, words in ((low, "o", "p50"), (middle, "s", "p90"), (high, "^", "p99")):
            axes.plot(at, value, mark, color=COLORS["prefill"], label=words if not at else None)
    if log:
        axes.set_yscale("log")
    axes.set_ylabel(unit)
    _name(axes, ranked)
    axes.legend(loc="upper left")


def _gpu_time(axes: Any, ranked: Sequence[LabReport]) -> None:
    bottoms = [0.0] * len(ranked)
    for name, color in COLORS.items():
        wholes = [sum(each.gpu_seconds[part] for part in COLORS) or 1.0 for each in ranked]
        shares = [100 * each.gpu_seconds[name] / whole for each, whole in zip(ranked, wholes, strict=True)]
        axes.bar(range(len(ranked)), shares, 0.6, bottom=bottoms, color=color, label=name.replace("kv_", "KV "))
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_ylabel("% of GPU time")
    _name(axes, ranked)
    axes.legend(loc="upper right")


def _name(axes: Any, ranked: Sequence[LabReport]) -> None:
    axes.set_xticks(range(len(ranked)), [each.policy for each in ranked], rotation=20, ha="right")


Result = TypeVar("Result")
Needs = dict[str, int | None]
"""The workers that each policy needs; None means more than the largest number tried."""


def compare_all(
    options: RunOptions,
    policies: str,
    *,
    count: bool,
    most: int,
    measure: Measure,
    report: Path | None,
    jobs: int,
    as_json: bool,
) -> None:
    """Print each policy's figures. Results found before Ctrl-C are printed and written too."""
    names = list(ALL) if policies == "all" else policies.split(",")
    reports: dict[str, LabReport] = {}
    needs: Needs = {}
    interrupted = False
    quiet()
    with noting() as notes:
        experiment = options.experiment()
        if count and experiment.losses:
            raise InvalidRequest("lost workers cannot be carried over to clusters of other sizes: add --no-gpus")
        if report is not None:
            make_folder(report)
        for name in names:
            if not has_hindsight(name):
                policy_named(name, experiment.workers)
        try:
            cores = jobs or os.cpu_count() or 1
            for name, found in unless_interrupted(side_by_side(run_named, experiment, names, cores)):
                reports[name] = found
                notes.done(f"{len(reports)} of {len(names)}: {found.policy}, {found.score.slo_attainment:.1%} good")
            sized = find_needs(experiment, names, cores, notes.doing, most=most, measure=measure) if count else ()
            for name, need in sized:
                needs[name] = need.workers
                notes.done(f"{name} needs {need.workers or 'more'} workers")
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
    """Yield results as they arrive. After Ctrl-C, raise KeyboardInterrupt at the next result at the latest.

    Python raises it at an arbitrary point, and drops it inside a finalizer or a callback.
    """
    interrupted = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        for each in found:
            yield each
            if interrupted:
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
