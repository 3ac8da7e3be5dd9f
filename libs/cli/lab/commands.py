"""The command group `fulcrum lab`: traces replayed through the live system's decisions in virtual time."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from libs.cli.options import Json, ReadyFile

lab = typer.Typer(
    help="Replay traces on a simulated cluster, through Fulcrum's own decisions and those of other systems.",
    no_args_is_help=True,
)

TraceOption = Annotated[
    str,
    typer.Option("--trace", metavar="FILE|SPEC", help="A file (see `fulcrum lab traces`), or e.g. poisson:rate=5."),
]
Workers = Annotated[int, typer.Option(min=0, metavar="N", help="Workers, each of --tp GPUs.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="h100, b200, … as in docs/profiles.md.")]
Model = Annotated[str, typer.Option(metavar="NAME", help="llama-3.1-8b, … as in docs/profiles.md.")]
Tp = Annotated[int, typer.Option(min=0, metavar="N", help="GPUs of a worker. Default: the profile's only width.")]
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help="Profile written by `fulcrum lab calibrate`, instead of --model and --device.",
    ),
]
Slo = Annotated[str, typer.Option(metavar="SLO", help="Targets; ttft=3x is three times the prompt's own prefill time.")]
RateScale = Annotated[
    float, typer.Option(min=0.001, metavar="X", help="Factor by which the trace's rate is multiplied.")
]
Scaling = Annotated[
    Literal["superpose", "compress"],
    typer.Option(help="Overlay shifted copies with prefixes of their own, or let time pass faster."),
]
Start = Annotated[float, typer.Option(min=0, metavar="S", help="Time in the trace at which to begin.")]
Seconds = Annotated[float, typer.Option(min=0, metavar="S", help="Length of the trace to run; 0 runs it to its end.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of random draws.")]
Interference = Annotated[
    float,
    typer.Option(
        min=-1, max=1, metavar="I", help="Slowdown of steps with prompts and decodes, 0 to 1. Default: the profile's."
    ),
]
ClosedLoop = Annotated[
    bool,
    typer.Option(
        "--closed-loop", metavar="", help="Later turns of a session wait for the answer, then for a think time."
    ),
]
Allowed = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Output limit of requests for which the trace has none; 0 sets it to the tokens generated.",
    ),
]
Lose = Annotated[
    list[str] | None,
    typer.Option(
        "--lose", metavar="AT:WORKER:BACK", help="120:3:60: worker 3 dies at 120 s and is back after 60. Repeatable."
    ),
]
WrongOption = Annotated[
    list[str] | None,
    typer.Option(
        "--wrong",
        metavar="WHAT=X",
        help="Inject an error: telemetry=500 (ms), steps=0.2, slow=3:2, hints=0.05. Repeatable.",
    ),
]
Jobs = Annotated[int, typer.Option(min=0, metavar="N", help="Runs at the same time. Default: one per core.")]

SLO = "ttft=max(2s,3x),tpot=50ms"
MODEL, DEVICE = "llama-3.1-8b", "h100"


@lab.callback()
def options() -> None:
    """Replay traces on a simulated cluster, through Fulcrum's own decisions and those of other systems."""


@lab.command(epilog="Example: fulcrum lab run --trace flipflop:rate=8 --policy fulcrum:5:3 --workers 8")
def run(
    trace: TraceOption,
    policy: Annotated[str, typer.Option(metavar="NAME", help="fulcrum, static, fulcrum:9:7, arrow, …")] = "fulcrum",
    *,
    workers: Workers = 16,
    device: Device = DEVICE,
    model: Model = MODEL,
    tp: Tp = 0,
    profile: ProfileOption = "",
    slo: Slo = SLO,
    rate_scale: RateScale = 1.0,
    scaling: Scaling = "superpose",
    start: Start = 0.0,
    seconds: Seconds = 0.0,
    seed: Seed = 1,
    interference: Interference = -1.0,
    closed_loop: ClosedLoop = False,
    max_output_tokens: Allowed = 4096,
    lose: Lose = None,
    wrong: WrongOption = None,
    json: Json = False,
) -> None:
    """Run one policy on one trace: how many requests were served in time, and where GPU time went."""
    from libs.cli.lab.runs import RunOptions, run_one  # noqa: PLC0415 (what only this command needs)

    run_options = RunOptions(
        trace, workers, device, model, tp, slo, rate_scale, scaling, start, seconds, seed, interference,
        profile=profile, closed_loop=closed_loop, losses=lose or (), wrong=wrong or (),
        allowed_tokens=max_output_tokens,
    )  # fmt: skip
    run_one(run_options, policy, as_json=json)


@lab.command(epilog="Example: fulcrum lab compare --trace mine.csv --policies fulcrum,static,arrow --report out/")
def compare(
    trace: TraceOption,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Policies separated by commas, or all.")] = "all",
    *,
    workers: Workers = 16,
    device: Device = DEVICE,
    model: Model = MODEL,
    tp: Tp = 0,
    profile: ProfileOption = "",
    slo: Slo = SLO,
    rate_scale: RateScale = 1.0,
    scaling: Scaling = "superpose",
    start: Start = 0.0,
    seconds: Seconds = 0.0,
    seed: Seed = 1,
    interference: Interference = -1.0,
    closed_loop: ClosedLoop = False,
    max_output_tokens: Allowed = 4096,
    lose: Lose = None,
    wrong: WrongOption = None,
    gpus: Annotated[bool, typer.Option(help="Also find how many GPUs each policy needs.")] = True,
    gpus_needed: Annotated[
        bool,
        typer.Option(
            "--gpus-needed", metavar="", help="Only find the GPUs needed, and answer whether to disaggregate at all."
        ),
    ] = False,
    most_workers: Annotated[
        int, typer.Option(min=2, max=1024, metavar="N", help="Largest number of workers to try for the GPUs needed.")
    ] = 64,
    measure: Annotated[
        Literal["requests", "work", "both"],
        typer.Option(help="Measure of which 90 % must be in time for the GPUs needed."),
    ] = "requests",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the answer as one HTML page, with --gpus-needed.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for an HTML page with plots and the figures as JSON.")
    ] = None,
    jobs: Jobs = 0,
    json: Json = False,
) -> None:
    """Run several policies on one trace, side by side; or find the GPUs that each needs, with --gpus-needed."""
    from libs.cli.lab.compare import compare_all  # noqa: PLC0415
    from libs.cli.lab.needs import answer_needs  # noqa: PLC0415
    from libs.cli.lab.runs import RunOptions  # noqa: PLC0415
    from libs.contracts.errors import InvalidRequest  # noqa: PLC0415

    run_options = RunOptions(
        trace, workers, device, model, tp, slo, rate_scale, scaling, start, seconds, seed, interference,
        profile=profile, closed_loop=closed_loop, losses=lose or (), wrong=wrong or (),
        allowed_tokens=max_output_tokens,
    )  # fmt: skip
    if gpus_needed:
        if report is not None:
            raise InvalidRequest("--gpus-needed writes its page with --html FILE, not with --report")
        answer_needs(run_options, policies, most=most_workers, measure=measure, html=html, jobs=jobs, as_json=json)
        return
    if html is not None:
        raise InvalidRequest("--html is the page of --gpus-needed; the page of all figures is --report FOLDER")
    compare_all(
        run_options, policies, count=gpus, most=most_workers, measure=measure, report=report, jobs=jobs, as_json=json
    )


@lab.command(epilog="Example: fulcrum lab search --trace mine.csv --policies fulcrum,static --seconds 600")
def search(
    trace: TraceOption,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Policies separated by commas.")] = "fulcrum",
    *,
    workers: Workers = 16,
    device: Device = DEVICE,
    model: Model = MODEL,
    tp: Tp = 0,
    profile: ProfileOption = "",
    slo: Slo = SLO,
    scaling: Scaling = "superpose",
    start: Start = 0.0,
    seconds: Seconds = 0.0,
    seed: Seed = 1,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs at each rate, each with its own seed.")] = 1,
    interference: Interference = -1.0,
    closed_loop: ClosedLoop = False,
    max_output_tokens: Allowed = 4096,
    lose: Lose = None,
    wrong: WrongOption = None,
    every_step: Annotated[
        bool, typer.Option("--every-step", metavar="", help="Raise the rate by 5 % at a time, without larger steps.")
    ] = False,
    json: Json = False,
) -> None:
    """Find the highest rate, as a multiple of the trace's, at which 90 % of requests and of work are in time."""
    from libs.cli.lab.runs import RunOptions, search_all  # noqa: PLC0415 (what only this command needs)

    run_options = RunOptions(
        trace, workers, device, model, tp, slo, 1.0, scaling, start, seconds, seed, interference,
        profile=profile, closed_loop=closed_loop, losses=lose or (), wrong=wrong or (),
        allowed_tokens=max_output_tokens,
    )  # fmt: skip
    search_all(run_options, policies, seeds=seeds, every_step=every_step, as_json=json)


@lab.command(epilog="Example: fulcrum lab traces chat-flood:rate=4 --json")
def traces(
    trace: Annotated[str | None, typer.Argument(metavar="[FILE|SPEC]", help="Trace to describe.")] = None,
    *,
    start: Start = 0.0,
    seconds: Seconds = 0.0,
    seed: Seed = 1,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the trace to a file in Fulcrum's own format.")
    ] = None,
    json: Json = False,
) -> None:
    """Describe a trace, or list the formats of files and the kinds of generated traces."""
    from libs.cli.lab.runs import show_traces  # noqa: PLC0415

    show_traces(trace, start_s=start, seconds=seconds, seed=seed, write=write, as_json=json)


@lab.command(epilog="Example: fulcrum lab record --seconds 600 --out monday.jsonl.gz")
def record(
    *,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, metavar="S", help="Record for this long from now; 0 reads all that the broker still holds."
        ),
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write, compressed if it ends in .gz.")
    ] = None,
    kafka: Annotated[str, typer.Option(metavar="HOST:PORT", help="Broker to read from. Default: the suite's.")] = "",
    cluster: Annotated[
        str, typer.Option(metavar="NAME", help="Cluster whose topics are read, with --kafka. Default: local.")
    ] = "",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Record a trace of the requests that a running suite served, or serves from now on. Ctrl-C keeps the trace so far.

    Requests count as they end: the trace has lengths and arrivals, not prompts, prefixes or conversations.
    """
    from libs.cli.lab.record import record as record_trace  # noqa: PLC0415

    record_trace(ready_file=ready, kafka=kafka, cluster=cluster, seconds=seconds, out=out, as_json=json)


@lab.command(epilog="Example: fulcrum lab calibrate --from-live --out mine.json")
def calibrate(
    *,
    from_live: Annotated[
        bool, typer.Option("--from-live", metavar="", help="Use what the workers of a running suite have learned.")
    ] = False,
    worker: Annotated[
        str | None, typer.Option(metavar="ID", help="Use the workers of the same kind as this one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write. Default: live.json.")] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Write a profile of your own workers for --profile: step times, KV, link speed, and network delays."""
    from libs.cli.lab.calibrate import calibrate as calibrate_profile  # noqa: PLC0415
    from libs.contracts.errors import InvalidRequest  # noqa: PLC0415

    if not from_live:
        raise InvalidRequest("name the source: only --from-live, a running suite, is supported")
    calibrate_profile(ready_file=ready, worker=worker, out=out, as_json=json)
