"""The commands `fulcrum lab run`, `search` and `traces`, and the options and progress lines of the lab's commands."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.host.shape import InjectedErrors
from libs.lab.cluster.run import PlannedLoss
from libs.lab.experiment import HOP_MS, MAX_SEQUENCES, Experiment, LabReport, gpu_link_gbps
from libs.lab.hardware import profile_named, resolve
from libs.lab.policies import has_hindsight, policy_named
from libs.lab.search import SearchResult
from libs.lab.slo import parse_slo
from libs.lab.study import quiet, run_named, scaled, search_named
from libs.lab.traces.describe import describe
from libs.lab.traces.generate import KINDS, Parameter, generate
from libs.lab.traces.read import KNOWN_FORMATS, read_trace
from libs.lab.traces.recording import write_trace
from libs.lab.traces.request import Trace
from libs.lab.traces.scaling import ScaleMethod, cut

# The largest accepted time: further than any trace goes.
MOST_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that all runs of the lab share."""

    trace: str
    workers: int
    device: str
    model: str
    tp: int
    slo: str
    rate_scale: float
    scaling: ScaleMethod
    start_s: float
    seconds: float
    seed: int
    interference: float
    profile: str = ""
    """The file or name of a profile, instead of model, device and tp."""
    closed_loop: bool = False
    losses: Sequence[str] = ()
    """Losses of workers, each written as AT:WORKER:BACK in seconds."""
    wrong: Sequence[str] = ()
    allowed_tokens: int = 0

    def experiment(self) -> Experiment:
        """Return the experiment. Raise InvalidRequest if an option cannot be run, which says what to do."""
        hardware = profile_named(self.profile) if self.profile else resolve(self.model, self.device, self.tp)
        slo = parse_slo(self.slo)
        experiment = Experiment(
            trace=trace_of(self.trace, self.start_s, self.seconds, self.seed),
            hardware=hardware,
            workers=self.workers,
            slo=slo,
            seed=self.seed,
            interference=None if self.interference < 0 else self.interference,
            link_gbps=gpu_link_gbps(hardware),
            hop_ms=HOP_MS if hardware.hop_ms is None else hardware.hop_ms,
            max_sequences=hardware.max_sequences or MAX_SEQUENCES,
            chunk_tokens=hardware.chunk_tokens,
            closed_loop=self.closed_loop,
            losses=tuple(map(parse_loss, self.losses)),
            wrong=parse_wrong(self.wrong),
            allowed_tokens=self.allowed_tokens,
        )
        return scaled(experiment, self.rate_scale, self.scaling)


def parse_loss(text: str) -> PlannedLoss:
    """Return the loss of `120:3:60`: worker 3 dies at 120 s and is back 60 s later. Raise InvalidRequest."""
    parts = text.split(":")
    try:
        at_s, worker, back_after_s = float(parts[0]), int(parts[1]), float(parts[2])
        sane = len(parts) == 3 and 0 <= at_s <= MOST_S and worker >= 0 and 0 < back_after_s <= MOST_S
    except (ValueError, IndexError):
        sane = False
    if not sane:
        raise InvalidRequest(
            f"{text!r} is not a loss such as 120:3:60, by which worker 3 dies at 120 s and is back 60 s later"
        )
    return PlannedLoss(at_s, worker, back_after_s)


def parse_wrong(texts: Sequence[str]) -> InjectedErrors:
    """Return the errors of `telemetry=500`, `steps=0.2`, `slow=3:2`, `hints=0.05`, combined. Raise InvalidRequest."""
    found = InjectedErrors()
    for text in texts:
        try:
            found = _also_wrong(found, *text.split("=", 1))
        except (TypeError, ValueError):
            raise InvalidRequest(
                f"{text!r} is not an error to inject: telemetry=500 (ms older), steps=0.2 (share by which step times"
                " are off), slow=3:2 (worker 3 takes twice as long as it reports), hints=0.05 (share of false ones)"
            ) from None
    return found


def _also_wrong(found: InjectedErrors, name: str, value: str) -> InjectedErrors:
    """Return the errors with another one added. Raise ValueError if the text is not an error."""
    match name:
        case "telemetry":
            return replace(found, telemetry_ms=_between(value, 0.0, 60_000.0))
        case "steps":
            return replace(found, step_times=_between(value, 0.0, 0.9))
        case "hints":
            return replace(found, hints=_between(value, 0.0, 1.0))
        case "slow":
            worker, _, times = value.partition(":")
            return replace(found, slow={**found.slow, int(worker): _between(times, 0.1, 100.0)})
    raise ValueError(name)


def _between(text: str, least: float, most: float) -> float:
    value = float(text)
    if not least <= value <= most:
        raise ValueError(text)
    return value


def trace_of(text: str, start_s: float, seconds: float, seed: int) -> Trace:
    """Return the trace of the file with this name, or else the generated trace that the text describes."""
    path = Path(text)
    if path.exists():
        return read_trace(path, seed=seed, start_s=start_s, seconds=seconds or None)
    kind = text.partition(":")[0]
    if kind not in KINDS:
        raise InvalidRequest(
            f"there is no file {text!r}, and {kind!r} is not a kind of trace that can be made; "
            f"kinds are {', '.join(KINDS)}: see `fulcrum lab traces`"
        )
    made = generate(text, seed=seed)
    return cut(made, start_s, seconds or float("inf")) if start_s or seconds else made


# The pause between two progress lines if stderr is not a terminal.
QUIET_S: Final = 2.0


class ProgressNotes(Protocol):
    """A display of the run in progress and of those that have ended."""

    def doing(self, text: str) -> None: ...

    def done(self, text: str) -> None: ...


class _Lines:
    def __init__(self) -> None:
        self._shown_s = time.monotonic()

    def doing(self, text: str) -> None:
        if time.monotonic() - self._shown_s >= QUIET_S:
            self.done(text)

    def done(self, text: str) -> None:
        self._shown_s = time.monotonic()
        print(text, file=sys.stderr, flush=True)


class _Spinner:
    def __init__(self, status: Status) -> None:
        self._status = status

    def doing(self, text: str) -> None:
        self._status.update(Text(text))

    def done(self, text: str) -> None:
        self._status.update(Text(text))
        self._status.console.print(text, style="dim")


@contextmanager
def noting() -> Iterator[ProgressNotes]:
    """Yield the display that suits stderr, and clear it at the end."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with console.status("reading") as status:
        yield _Spinner(status)


# The columns of a run's figures.
WIDE: Final = 120


def run_one(options: RunOptions, policy: str, *, as_json: bool) -> None:
    """Run one policy and print its figures. Raise InvalidRequest."""
    quiet()
    with noting() as notes:
        experiment = options.experiment()
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


def search_all(options: RunOptions, policies: str, *, seeds: int, every_step: bool, as_json: bool) -> None:
    """Print the highest rate of each policy. Rates found before Ctrl-C are printed too."""
    found: dict[str, SearchResult] = {}
    interrupted = False
    quiet()
    with noting() as notes:
        experiment = options.experiment()
        for name in policies.split(","):
            if not has_hindsight(name):
                policy_named(name, experiment.workers)
        try:
            for name in policies.split(","):
                found[name] = search_named(experiment, name, options.scaling, seeds, notes.done, every_step=every_step)
        except KeyboardInterrupt:
            interrupted = True
    base_rps = describe(experiment.trace)["rate_per_s"] or 0.0
    if as_json:
        print(json.dumps({"interrupted": interrupted, "policies": [_edge(*each, base_rps) for each in found.items()]}))
    else:
        _show_edges(found, base_rps)
    if interrupted:
        sys.exit(130)


def _edge(name: str, found: SearchResult, base_rps: float) -> dict[str, Any]:
    reports = [rounded(report.as_json()) for report in found.reports]
    return {
        "policy": name,
        "rate_scale": found.rate_scale,
        "requests_per_s": round(found.rate_scale * base_rps, 4),
        "tried": {f"{rate:.4g}": round(bound, 4) for rate, bound in sorted(found.tried.items())},
        "reports": reports,
    }


def _show_edges(found: dict[str, SearchResult], base_rps: float) -> None:
    shown = _plain_table("policy", "times the rate", "requests/s", "roles", "good", "work good", "TTFT p90", "TPOT p90")
    for name, edge in sorted(found.items(), key=lambda each: -each[1].rate_scale):
        report = edge.reports[0] if edge.reports else None
        cells = _cells(report)[1:6] if report else ["–"] * 5
        shown.add_row(name, f"{edge.rate_scale:.2f}", f"{edge.rate_scale * base_rps:.2f}", *cells)
    make_console().print(shown)


# ---------------------------------------------------------------- output


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
    """Return one line with the shares of GPU time."""
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


def show_traces(
    text: str | None, *, start_s: float, seconds: float, seed: int, write: Path | None, as_json: bool
) -> None:
    """Describe one trace, or list formats and kinds. Raise InvalidRequest."""
    if text is None:
        _list(as_json=as_json)
        return
    trace = trace_of(text, start_s, seconds, seed)
    found = rounded(describe(trace))
    if write is not None:
        write_trace(trace, write)
    if as_json:
        print(json.dumps(found))
        return
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column()
    for name, value in found.items():
        if value:
            shown.add_row(name.replace("_", " "), _words(value))
    make_console().print(shown)


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name or 'none'}: {each:,}" for name, each in value.items() if each is not None)
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _list(*, as_json: bool) -> None:
    if as_json:
        formats = {name: list(each) for name, each in KNOWN_FORMATS.items()}
        print(json.dumps({"formats": formats, "kinds": kinds_json(KINDS)}))
        return
    console = make_console()
    console.print(Text.assemble(("Files", "bold"), ", known by their columns or keys:"))
    for name, columns in KNOWN_FORMATS.items():
        console.print(Text.assemble(f"  {name}: ", (", ".join(columns), "dim")))
    console.print(Text.assemble("\n", ("Made", "bold"), ", e.g. poisson:rate=5,isl=1000,osl=200,seconds=600:"))
    print_kinds(console, KINDS)


def kinds_json(kinds: Mapping[str, Sequence[Parameter]]) -> dict[str, Any]:
    """Return the kinds of generated traces with their parameters, as printed by `--json`."""
    return {
        name: {each.name: {"default": each.default, "meaning": each.says} for each in parameters}
        for name, parameters in kinds.items()
    }


def print_kinds(console: Console, kinds: Mapping[str, Sequence[Parameter]]) -> None:
    for name, parameters in kinds.items():
        named = ", ".join(f"{each.name}={each.default:g}" for each in parameters)
        console.print(Text.assemble(f"  {name}: ", (named, "dim")))
