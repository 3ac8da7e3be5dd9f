"""The commands `fulcrum up`, a whole suite on this machine, `fulcrum doctor` and `fulcrum profile`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json

MAX_PER_KIND = 64
DEFAULT_POOL = 2


class EngineChoice(StrEnum):
    TORCH = "torch"
    SIM = "sim"
    VLLM = "vllm"


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3-json"
    MISTRAL = "mistral"
    DEEPSEEK = "deepseek"
    KIMI_K2 = "kimi-k2"
    QWEN3_CODER = "qwen3-coder"
    GLM = "glm"
    MINIMAX_M2 = "minimax-m2"
    SEED_OSS = "seed-oss"
    NONE = "none"


EngineName = Annotated[
    EngineChoice, typer.Option(help="torch and vllm compute; sim takes as long as a GPU would and invents its text.")
]
PrefillCount = Annotated[
    int | None, typer.Option(min=0, max=MAX_PER_KIND, metavar="N", show_default="1", help="Prefill workers.")
]
DecodeCount = Annotated[
    int | None, typer.Option(min=0, max=MAX_PER_KIND, metavar="N", show_default="1", help="Decode workers.")
]
MixedCount = Annotated[
    int | None,
    typer.Option(
        min=0, max=MAX_PER_KIND, metavar="N", show_default="0", help="Workers that do both prefill and decode."
    ),
]
SpareCount = Annotated[
    int,
    typer.Option(min=0, max=MAX_PER_KIND, metavar="N", help="Further workers that the planner may start."),
]
WorkersPerProcess = Annotated[
    int,
    typer.Option(min=1, max=MAX_PER_KIND, metavar="N", help="With --engine sim, N workers share a process."),
]
GatewayCount = Annotated[int, typer.Option(min=1, max=MAX_PER_KIND, metavar="N", help="Gateways.")]
GatewayPort = Annotated[
    int,
    typer.Option(
        min=0, max=65535, metavar="PORT", help="Port of the first gateway, 0 for any; further gateways pick theirs."
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        metavar="M",
        help="A Hugging Face folder, or ORG/NAME on the hub; the bundled model by default; any name with --engine"
        " sim. Several share a pool of workers.",
    ),
]
PoolSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_PER_KIND,
        metavar="N",
        show_default="2 for several models",
        help="Workers onto which models are loaded on demand.",
    ),
]
WorkersPerGpu = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_PER_KIND,
        metavar="N",
        help="With --pool, N workers share each GPU, each with a model of its own.",
    ),
]
SimProfile = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Device that --engine sim simulates, e.g. llama3.1-8b-h200-aic."),
]
ProfileName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Model and workers for --engine vllm, e.g. gpt-oss-120b-8xh100."),
]
EngineArguments = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Argument of vLLM's engine, e.g. max_model_len=32768; values that are not text are JSON. May be repeated.",
    ),
]
ChatTemplateFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Jinja chat template to use in place of each model's own."),
]
ToolFormatName = Annotated[
    ToolFormat | None,
    typer.Option(show_default="by the chat template", help="Format of the models' tool calls; none serves no tools."),
]
Kafka = Annotated[
    str | None,
    typer.Option(envvar="FULCRUM_KAFKA", metavar="HOST:PORT", help="A running Kafka; an embedded broker by default."),
]
Redis = Annotated[
    str | None,
    typer.Option(envvar="FULCRUM_REDIS", metavar="URL", help="A running Redis; an embedded one by default."),
]
History = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Keep occupancy and demand here over restarts; in memory by default."),
]
NoQuestion = Annotated[bool, typer.Option("--no-question", metavar="", help="Do not ask a first question.")]
NoRestart = Annotated[
    bool, typer.Option("--no-restart", metavar="", help="Stop when a process dies instead of restarting it.")
]
JsonReady = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the ready file here: addresses, pid, token.")
]


def up(
    *,
    engine: EngineName = EngineChoice.TORCH,
    prefill: PrefillCount = None,
    decode: DecodeCount = None,
    mixed: MixedCount = None,
    spare: SpareCount = 0,
    workers_per_process: WorkersPerProcess = 1,
    gateways: GatewayCount = 1,
    gateway_port: GatewayPort = 8000,
    model: Models = None,
    pool: PoolSize = None,
    workers_per_gpu: WorkersPerGpu = 1,
    sim_profile: SimProfile = None,
    profile: ProfileName = None,
    engine_arg: EngineArguments = None,
    chat_template: ChatTemplateFile = None,
    tool_format: ToolFormatName = None,
    kafka: Kafka = None,
    redis: Redis = None,
    history: History = None,
    no_question: NoQuestion = False,
    no_restart: NoRestart = False,
    json_ready: JsonReady = None,
    json: Json = False,
) -> None:
    """Start gateways, workers, planner and metrics, and serve until Ctrl-C."""
    from libs.cli.up.serve import serve  # noqa: PLC0415 (what only this command needs)
    from libs.launch.options import SuiteOptions  # noqa: PLC0415

    if profile is not None and (prefill, decode, mixed) != (None, None, None):
        raise typer.BadParameter("--prefill, --decode and --mixed are for suites without --profile")
    models = tuple(model or ())
    if pool is None and len(models) > 1:
        pool = DEFAULT_POOL
    if pool and ((prefill, decode, mixed) != (None, None, None) or profile is not None):
        raise typer.BadParameter("models that share a pool have no --prefill, --decode, --mixed or --profile")
    options = SuiteOptions(
        engine=engine.value,
        prefill=1 if prefill is None else prefill,
        decode=1 if decode is None else decode,
        mixed=mixed or 0,
        spare=spare,
        pool=pool or 0,
        workers_per_gpu=workers_per_gpu,
        models=models if pool else (),
        workers_per_process=workers_per_process,
        gateways=gateways,
        gateway_port=gateway_port,
        sim_profile=sim_profile,
        profile=profile,
        engine_args=tuple(engine_arg or ()),
        chat_template=chat_template.expanduser().absolute() if chat_template else None,
        tool_format=tool_format.value if tool_format else None,
        kafka=kafka,
        redis=redis,
        restart=not no_restart,
        history=history.expanduser().absolute() if history else None,
        json_ready=json_ready.absolute() if json_ready else None,
    )
    raise typer.Exit(serve(options, models[0] if models else None, question=not no_question, as_json=json))


ENGINES = ("sim", "torch", "vllm")
MARKS = {"ok": ("✓", "green"), "slower": ("!", "yellow"), "missing": ("✗", "red")}


def doctor(
    engine: Annotated[str, typer.Option(help="Engine that workers would run: sim, torch or vllm.")] = "torch",
    *,
    json: Json = False,
) -> None:
    """Check this machine: driver, CUDA, compilers, shared memory, RDMA, packages. Exit code 1 if the engine would not
    start.
    """
    import os  # noqa: PLC0415 (what only this command needs)

    import msgspec  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from libs.contracts.errors import InvalidRequest  # noqa: PLC0415
    from libs.launch.doctor import Level, findings, look  # noqa: PLC0415

    if engine not in ENGINES:
        raise InvalidRequest(f"--engine {engine!r} is not one of {', '.join(ENGINES)}", param="engine")
    found = findings(look(os.environ), engine)
    starts = all(each.level is not Level.MISSING for each in found)
    if json:
        print(msgspec.json.encode({"engine": engine, "starts": starts, "findings": found}).decode())
        raise typer.Exit(0 if starts else 1)
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for each in found:
        mark, colour = MARKS[each.level]
        says = f"{escape(each.says)}\n[bold]{escape(each.do)}[/]" if each.do else escape(each.says)
        shown.add_row(f"[{colour}]{mark}[/]", each.what, says)
    console = Console(highlight=False)
    console.print(shown)
    console.print(f"\nIt starts here: fulcrum up --engine {engine}" if starts else "\nIt does not start here yet.")
    raise typer.Exit(0 if starts else 1)


# A placeholder for the folder with a machine's models.
MODELS = "/models"


def profile(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Profile to print. Default: list all.")] = None,
    *,
    json: Json = False,
) -> None:
    """List deployment profiles, or print one: its workers' settings, its predictions, and what is untested."""
    import msgspec  # noqa: PLC0415 (what only this command needs)

    from libs.launch.profile import load_profile, profile_names  # noqa: PLC0415

    names = profile_names() if name is None else [name]
    found = {each: load_profile(each) for each in names}
    if json:
        print(msgspec.json.encode(found).decode())
        return
    if name is None:
        for each, known in found.items():
            print(f"{each:<30} {known.model}, {known.machine}")
        return
    known = found[name]
    print(f"# {known.model} on {known.machine}\n# {known.not_run}")
    predicted = known.predicted
    prompts = ", ".join(f"{tokens} tokens {ms} ms" for tokens, ms in predicted.prefill_ms.items())
    steps = ", ".join(f"{batch} sequences {ms} ms" for batch, ms in predicted.decode_ms.items())
    print(f"# Predicted by {predicted.source}: prompts of {prompts}; decode steps of {steps}.")
    print(f"# On each node first: python -m libs.model.prepare {known.model} {MODELS}; a gateway has it too, as")
    print(f'FULCRUM_GATEWAY_MODELS={{"{known.model}": "{MODELS}/{known.model}"}}')
    for number, worker in enumerate(known.workers, start=1):
        print(f"\n# worker {number} on node {worker.node}: python -m services.{worker.service}")
        for variable, value in {**known.model_settings(MODELS), **worker.settings()}.items():
            print(f"{variable}={value}")
