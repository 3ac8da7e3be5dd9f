"""The command group `fulcrum lab`: traces replayed through the live system's decisions in virtual time."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from libs.cli.options import Json, ReadyFile

lab = typer.Typer(
    help="Replay traces through Fulcrum's own decisions, and those of others, on a simulated cluster.",
    no_args_is_help=True,
)

TraceOption = Annotated[
    str,
    typer.Option("--trace", metavar="FILE|SPEC", help="A file (see `fulcrum lab traces`), or e.g. poisson:rate=5."),
]
Workers = Annotated[int, typer.Option(min=0, metavar="N", help="Workers, each of --tp GPUs.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="h100, b200, … as in docs/profiles.md.")]
Model = Annotated[str, typer.Option(metavar="NAME", help="llama-3.1-8b, … as in docs/profiles.md.")]
Tp = Annotated[int, typer.Option(min=0, metavar="N", help="GPUs of a worker; 0: the profile's only width.")]
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile", metavar="NAME|FILE", help="In place of --model and --device: as `fulcrum lab calibrate` writes it."
    ),
]
Slo = Annotated[str, typer.Option(metavar="SLO", help="3x: three times the prompt's own prefill.")]
RateScale = Annotated[float, typer.Option(min=0.001, metavar="X", help="Factor on the rate of the trace.")]
Scaling = Annotated[
    Literal["superpose", "compress"],
    typer.Option(help="Overlay shifted copies with prefixes of their own, or let time pass faster."),
]
Start = Annotated[float, typer.Option(min=0, metavar="S", help="Where in the trace to begin.")]
Seconds = Annotated[float, typer.Option(min=0, metavar="S", help="How much of the trace; 0: to its end.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Of whatever is drawn.")]
Interference = Annotated[
    float, typer.Option(min=-1, max=1, metavar="I", help="Of prompts beside decodes; -1: the profile's own.")
]
ClosedLoop = Annotated[
    bool,
    typer.Option("--closed-loop", metavar="", help="Later turns of a session wait for the answer, then think."),
]
Allowed = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", help="Output tokens that clients allow where the trace is silent; 0: as many as come."
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
    typer.Option("--wrong", metavar="WHAT=X", help="telemetry=500, steps=0.2, slow=3:2, hints=0.05. Repeatable."),
]
Jobs = Annotated[int, typer.Option(min=0, metavar="N", help="Runs at a time; 0: as many as there are cores.")]

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
    from libs.cli.lab.asked import RunOptions  # noqa: PLC0415 (what only this command needs)
    from libs.cli.lab.runs import run_one  # noqa: PLC0415

    asked = RunOptions(
        trace, workers, device, model, tp, slo, rate_scale, scaling, start, seconds, seed, interference,
        profile=profile, closed_loop=closed_loop, losses=lose or (), wrong=wrong or (),
        allowed_tokens=max_output_tokens,
    )  # fmt: skip
    run_one(asked, policy, as_json=json)


@lab.command(epilog="Example: fulcrum lab compare --trace mine.csv --policies fulcrum,static,arrow --report out/")
def compare(
    trace: TraceOption,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="With commas between; all: every one.")] = "all",
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
    gpus: Annotated[bool, typer.Option(help="Also how many GPUs each policy needs.")] = True,
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="One HTML page with plots, and the figures as JSON.")
    ] = None,
    jobs: Jobs = 0,
    json: Json = False,
) -> None:
    """Run several policies on one trace, side by side."""
    from libs.cli.lab.asked import RunOptions  # noqa: PLC0415
    from libs.cli.lab.compare import compare_all  # noqa: PLC0415

    asked = RunOptions(
        trace, workers, device, model, tp, slo, rate_scale, scaling, start, seconds, seed, interference,
        profile=profile, closed_loop=closed_loop, losses=lose or (), wrong=wrong or (),
        allowed_tokens=max_output_tokens,
    )  # fmt: skip
    compare_all(asked, policies, count=gpus, report=report, jobs=jobs, as_json=json)


@lab.command(epilog="Example: fulcrum lab search --trace mine.csv --policies fulcrum,static --seconds 600")
def search(
    trace: TraceOption,
    policies: Annotated[str, typer.Option(metavar="NAMES", help="With commas between.")] = "fulcrum",
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
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs at each rate, each with its seed.")] = 1,
    interference: Interference = -1.0,
    closed_loop: ClosedLoop = False,
    max_output_tokens: Allowed = 4096,
    lose: Lose = None,
    wrong: WrongOption = None,
    every_step: Annotated[bool, typer.Option("--every-step", metavar="", help="No leaps: 5 % at a time.")] = False,
    json: Json = False,
) -> None:
    """Find the highest rate, as a multiple of the trace's, at which 90 % of requests and of work are in time."""
    from libs.cli.lab.asked import RunOptions  # noqa: PLC0415
    from libs.cli.lab.runs import search_all  # noqa: PLC0415

    asked = RunOptions(
        trace, workers, device, model, tp, slo, 1.0, scaling, start, seconds, seed, interference,
        profile=profile, closed_loop=closed_loop, losses=lose or (), wrong=wrong or (),
        allowed_tokens=max_output_tokens,
    )  # fmt: skip
    search_all(asked, policies, seeds=seeds, every_step=every_step, as_json=json)


@lab.command(epilog="Example: fulcrum lab traces chat-flood:rate=4 --json")
def traces(
    trace: Annotated[str | None, typer.Argument(metavar="[FILE|SPEC]", help="One to look at.")] = None,
    *,
    start: Start = 0.0,
    seconds: Seconds = 0.0,
    seed: Seed = 1,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep it in our own format.")] = None,
    json: Json = False,
) -> None:
    """Describe a trace, or list the formats that can be read and the kinds that can be made."""
    from libs.cli.lab.traces import show_traces  # noqa: PLC0415

    show_traces(trace, start_s=start, seconds=seconds, seed=seed, write=write, as_json=json)


@lab.command(epilog="Example: fulcrum lab record --seconds 600 --out monday.jsonl.gz")
def record(
    *,
    seconds: Annotated[
        float, typer.Option(min=0, metavar="S", help="For so long from now; 0: all that the broker still holds.")
    ] = 0.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; gzip where it ends in .gz.")] = None,
    kafka: Annotated[str, typer.Option(metavar="HOST:PORT", help="A broker, in place of the suite's.")] = "",
    cluster: Annotated[str, typer.Option(metavar="NAME", help="Whose topics, with --kafka; else local.")] = "",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Record a trace of what a running suite has served, or serves from now on. Ctrl-C keeps what was read.

    Requests count as they end: the trace has lengths and arrivals, not prompts, prefixes or conversations.
    """
    from libs.cli.lab.record import record as record_trace  # noqa: PLC0415

    record_trace(ready_file=ready, kafka=kafka, cluster=cluster, seconds=seconds, out=out, as_json=json)


@lab.command(epilog="Example: fulcrum lab calibrate --from-live --out mine.json")
def calibrate(
    *,
    from_live: Annotated[
        bool, typer.Option("--from-live", metavar="", help="From what the workers of a running suite have learned.")
    ] = False,
    worker: Annotated[
        str | None, typer.Option(metavar="ID", help="Those that are like this one, where several kinds run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; else live.json.")] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Write a profile of your own workers for --profile: step times, KV, link speed, and network delays."""
    from libs.cli.lab.calibrate import calibrate as calibrate_profile  # noqa: PLC0415
    from libs.contracts.errors import InvalidRequest  # noqa: PLC0415

    if not from_live:
        raise InvalidRequest("name where from: --from-live, a running suite, is all there is")
    calibrate_profile(ready_file=ready, worker=worker, out=out, as_json=json)
