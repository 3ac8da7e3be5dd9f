"""The commands `fulcrum lab run` and `fulcrum lab search`."""

import json
import sys
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.cli.lab.asked import RunOptions
from libs.cli.lab.progress import noting
from libs.lab.experiment import LabReport
from libs.lab.policies import has_hindsight, policy_named
from libs.lab.search import Found
from libs.lab.study import quiet, run_named, search_named
from libs.lab.traces.describe import describe
from libs.lab.traces.request import Trace

# The columns that all figures of a run take.
WIDE: Final = 120


def run_one(asked: RunOptions, policy: str, *, as_json: bool) -> None:
    """Run one policy and print its figures. Raises InvalidRequest."""
    quiet()
    with noting() as notes:
        experiment = asked.experiment()
        report = run_named(experiment, policy, notes.doing)
    if as_json:
        print(json.dumps(rounded(report.as_json())))
        return
    console = make_console()
    console.print(about(experiment.trace))
    console.print(table([report], wide=console.width >= WIDE))
    console.print(times(report))
    if not experiment.hardware.mixed_measured:
        console.print(
            f"Interference of {experiment.step_time.interference:g} is an assumption: no mixed steps of "
            f"{experiment.hardware.profile.name} were measured.",
            style="dim",
        )


def search_all(asked: RunOptions, policies: str, *, seeds: int, every_step: bool, as_json: bool) -> None:
    """Print the highest rate of each policy. Rates found before Ctrl-C are printed too."""
    found: dict[str, Found] = {}
    interrupted = False
    quiet()
    with noting() as notes:
        experiment = asked.experiment()
        for name in policies.split(","):
            if not has_hindsight(name):
                policy_named(name, experiment.workers)
        try:
            for name in policies.split(","):
                found[name] = search_named(experiment, name, asked.scaling, seeds, notes.done, every_step=every_step)
        except KeyboardInterrupt:
            interrupted = True
    base_rps = describe(experiment.trace)["rate_per_s"] or 0.0
    if as_json:
        print(json.dumps({"interrupted": interrupted, "policies": [_edge(*each, base_rps) for each in found.items()]}))
    else:
        _show_edges(found, base_rps)
    if interrupted:
        sys.exit(130)


def _edge(name: str, found: Found, base_rps: float) -> dict[str, Any]:
    reports = [rounded(report.as_json()) for report in found.reports]
    return {
        "policy": name,
        "rate_scale": found.rate_scale,
        "requests_per_s": round(found.rate_scale * base_rps, 4),
        "tried": {f"{rate:.4g}": round(bound, 4) for rate, bound in sorted(found.tried.items())},
        "reports": reports,
    }


def _show_edges(found: dict[str, Found], base_rps: float) -> None:
    shown = _plain_table("policy", "times the rate", "requests/s", "roles", "good", "work good", "TTFT p90", "TPOT p90")
    for name, edge in sorted(found.items(), key=lambda each: -each[1].rate_scale):
        report = edge.reports[0] if edge.reports else None
        cells = _cells(report)[1:6] if report else ["–"] * 5
        shown.add_row(name, f"{edge.rate_scale:.2f}", f"{edge.rate_scale * base_rps:.2f}", *cells)
    make_console().print(shown)


# ---------------------------------------------------------------- what they print


def about(trace: Trace) -> Text:
    """Return a short description of a trace, with its burstiness."""
    found = describe(trace)
    dispersion = ", ".join(f"{value:.1f} at {window}" for window, value in found["dispersion"].items() if value)
    rate = found["rate_per_s"] or 0.0
    return Text.assemble(
        f"{len(trace.requests):,} requests in {found['duration_s']:,.0f} s, {rate:.2f} a second; "
        f"index of dispersion {dispersion or 'not known'}",
        *((f"\n{note}", "dim") for note in trace.notes),
        "\n",
    )


def table(reports: list[LabReport], gpus_needed: dict[str, int | None] | None = None, *, wide: bool = True) -> Table:
    """Return a table of reports with the GPUs that each policy needs, if known; fewer columns unless `wide`."""
    titles = [
        "policy",
        "roles",
        "good",
        "work good",
        "TTFT p90",
        "TPOT p90",
        "good/s/GPU",
        "not served",
        "moves",
        "took",
    ]
    hidden = () if wide else ("good/s/GPU", "not served", "moves", "took")
    kept = [place for place, title in enumerate(titles) if title not in hidden]
    shown = _plain_table(*(titles[place] for place in kept), *(["GPUs needed"] if gpus_needed else []))
    for report in reports:
        cells = _cells(report)
        needed = [str(gpus_needed.get(report.policy) or "–")] if gpus_needed else []
        shown.add_row(*(cells[place] for place in kept), *needed)
    return shown


def _cells(report: LabReport) -> list[str]:
    score = report.score
    return [
        report.policy,
        report.roles,
        f"{score.slo_attainment:.1%}",
        f"{score.work_attainment:.1%}",
        f"{score.ttft_s.get('p90', 0):.2f} s",
        f"{score.tpot_s.get('p90', 0) * 1e3:.1f} ms",
        f"{report.goodput_rps_per_gpu:.3f}",
        f"{score.rejected + score.aborted + score.unfinished:,}",
        f"{report.role_moves:,}",
        f"{report.wall_s:.1f} s",
    ]


def times(report: LabReport) -> str:
    """Return one line that says where GPU time went."""
    spent = report.gpu_seconds
    whole = sum(spent[name] for name in ("prefill", "decode", "kv_wait", "idle")) or 1.0
    parts = ", ".join(
        f"{words} {spent[name] / whole:.1%}"
        for name, words in (("prefill", "prefill"), ("decode", "decode"), ("kv_wait", "KV wait"), ("idle", "idle"))
    )
    return f"GPU time: {parts} (starved {spent['starved'] / whole:.1%}); {report.virtual_s:,.0f} s simulated"


def _plain_table(*titles: str) -> Table:
    return plain_table(*titles, left=("policy", "roles"))


def rounded(figures: Any) -> Any:
    """Round all numbers to six digits, the precision of a simulation."""
    if isinstance(figures, float):
        return float(f"{figures:.6g}")
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    return [rounded(each) for each in figures] if isinstance(figures, list) else figures
