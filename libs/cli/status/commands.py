"""The commands that show a suite: `fulcrum status`, `advice`, `alerts`, `events`, `request`, `workers`, `occupancy` and
`observe`.
"""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json, JsonLines, MetricsUrl, ReadyFile


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", metavar="", help="Repeat every second until Ctrl-C.")] = False,
    links: Annotated[
        bool, typer.Option("--links", metavar="", help="Show the speed of KV transfers between workers instead.")
    ] = False,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="WHEN", help="Show a past moment: 10m ago, or a time such as 2026-01-31T12:00."),
    ] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show whether the cluster is balanced and what to do: the verdict, then the figures behind it."""
    if at is not None:
        if watch or links:
            from libs.contracts.errors import InvalidRequest  # noqa: PLC0415

            raise InvalidRequest("--at goes with neither --watch nor --links")
        from libs.cli.status.past import show_past  # noqa: PLC0415 (what only this option needs)

        show_past(ready, at, as_json=json)
        return
    if links:
        from libs.cli.status.show import show_links  # noqa: PLC0415 (what only this command needs)

        show_links(ready, as_json=json)
        return
    from libs.cli.status.show import show_status  # noqa: PLC0415 (what only this command needs)

    show_status(ready, watch=watch, as_json=json)


def advice(
    apply: Annotated[
        bool, typer.Option("--apply", metavar="", help="Run the first advised command after confirmation.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", metavar="", help="With --apply, do not ask for confirmation.")
    ] = False,
    score: Annotated[
        bool,
        typer.Option("--score", metavar="", help="Compare what past commands promised with their effect."),
    ] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Print the commands that would balance the cluster, one per line; print nothing if it is balanced."""
    from libs.cli.status.alerts import show_advice, show_score  # noqa: PLC0415 (what only this command needs)

    if score:
        show_score(ready, as_json=json)
        return
    show_advice(ready, apply=apply, yes=yes, as_json=json)


alerts = typer.Typer(invoke_without_command=True)
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, shown with the alert.")]


@alerts.callback(epilog="Example: fulcrum alerts --all")
def alerts_that_fire(
    context: typer.Context,
    over: Annotated[bool, typer.Option("--all", "-a", metavar="", help="Include alerts that are over.")] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show firing alerts with their start, reason and runbook. Subcommands silence or acknowledge them."""
    if context.invoked_subcommand is None:
        _list_alerts(over, ready, json)


@alerts.command("list", epilog="Example: fulcrum alerts list --all")
def list_alerts(
    over: Annotated[bool, typer.Option("--all", "-a", metavar="", help="Include alerts that are over.")] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show firing alerts, silences with their end, and acknowledgements."""
    _list_alerts(over, ready, json)


def _list_alerts(over: bool, ready: Path | None, as_json: bool) -> None:
    from libs.cli.status.alerts import show_alerts  # noqa: PLC0415 (what only this command needs)

    show_alerts(ready, over=over, as_json=as_json)


@alerts.command(
    epilog="Example: fulcrum alerts silence FulcrumWorkerStuck --label worker=gpu-3 --for 2h --reason replaced"
)
def silence(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Name of alerts, e.g. FulcrumWorkerStuck. Default: any.")
    ] = "",
    *,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", "-l", metavar="NAME=VALUE", help="Label that an alert must have. May be repeated."),
    ] = None,
    length: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Duration from 1m to 7d, e.g. 90m or 2h.")
    ] = "1h",
    reason: Reason = "",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Silence alerts for a while. They still fire, but send no notification by webhooks or Prometheus."""
    from libs.cli.status.alerts import make_silence  # noqa: PLC0415 (what only this command needs)

    make_silence(ready, name, label or [], length, reason=reason, as_json=json)


@alerts.command(epilog='Example: fulcrum alerts ack FulcrumWorkerStuck --reason "on it"')
def ack(
    alert: Annotated[
        str, typer.Argument(metavar="ALERT", help="Id of a firing alert, or a name for all alerts of that name.")
    ],
    reason: Reason = "",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Acknowledge an alert until it is over."""
    from libs.cli.status.alerts import acknowledge  # noqa: PLC0415 (what only this command needs)

    acknowledge(ready, alert, reason=reason, as_json=json)


@alerts.command(epilog="Example: fulcrum alerts unsilence 18e9a0c1f00d")
def unsilence(
    silence_id: Annotated[str, typer.Argument(metavar="ID", help="Id of a silence, as `fulcrum alerts` shows it.")],
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """End a silence or an acknowledgement early."""
    from libs.cli.status.alerts import end_silence  # noqa: PLC0415 (what only this command needs)

    end_silence(ready, silence_id, as_json=json)


def events(
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            metavar="N",
            min=1,
            max=1000,
            help="How many of the newest events to list: 30 by default, with --since 1000.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only events since then: a span such as 10m or 2h, or a time such as 2026-01-31T12:00 (local) or "
            "2026-01-31T12:00Z.",
            show_default=False,
        ),
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", metavar="", help="Continue with new events until Ctrl-C.")
    ] = False,
    ready: ReadyFile = None,
    json: JsonLines = False,
) -> None:
    """List role moves, decisions, workers that started or died, and alerts, oldest first."""
    from libs.cli.status.events import show_events  # noqa: PLC0415 (what only this command needs)

    show_events(ready, limit=limit, since=since, follow=follow, as_json=json)


def request(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="Id of a request (header x-request-id, or id of its answer), or the first 6 characters or more. "
            "With --slowest: how many to list, 10 by default.",
            show_default=False,
        ),
    ] = None,
    *,
    slowest: Annotated[
        bool,
        typer.Option("--slowest", metavar="[N]", help="List the last ten minutes' requests with the longest TTFT."),
    ] = False,
    metrics: MetricsUrl = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show one finished request: where its time went, its workers, and TTFT and TPOT against their targets."""
    from libs.cli.status.request import MAX_LISTED, show_request, show_slowest  # noqa: PLC0415

    if slowest:
        count = request_id or "10"
        if not (count.isdecimal() and 1 <= int(count) <= MAX_LISTED):
            raise typer.BadParameter(f"--slowest takes the number to list, 1 to {MAX_LISTED}, not {count!r}")
        show_slowest(ready, int(count), metrics=metrics, as_json=json)
    elif request_id is None:
        raise typer.BadParameter("name a request, or list some: fulcrum request --slowest")
    else:
        show_request(ready, request_id, metrics=metrics, as_json=json)


def workers(ready: ReadyFile = None, json: Json = False) -> None:
    """List the workers of the suite."""
    from libs.cli.status.tables import show_workers  # noqa: PLC0415 (what only this command needs)

    show_workers(ready, as_json=json)


def occupancy(
    window: Annotated[str, typer.Option(metavar="TIME", help="How far back: 500ms, 2s, 1m.")] = "2s",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show the share of GPU time in prefill, decode, KV wait and idle."""
    from libs.cli.status.tables import show_occupancy  # noqa: PLC0415 (what only this command needs)

    show_occupancy(ready, window, as_json=json)


Selector = Annotated[
    str | None,
    typer.Option("--kubernetes", metavar="SELECTOR", help="Pods by label in a Kubernetes cluster, e.g. app=vllm."),
]
Namespace = Annotated[
    str, typer.Option(metavar="NAME", help="With --kubernetes. Default: that of the kubeconfig or service account.")
]
PodPort = Annotated[
    int, typer.Option(min=0, max=65535, metavar="PORT", help="Default: the pods' port named metrics or http, or 8000.")
]
RoleLabel = Annotated[
    str, typer.Option(metavar="LABEL", help="The pods' label with their role: prefill or decode; others do both.")
]
Act = Annotated[
    bool,
    typer.Option(
        "--act",
        metavar="",
        help="With --page: change servers' roles, one at a time, by the pods' label or --router.",
    ),
]
Router = Annotated[
    str, typer.Option(metavar="URL", help="With --act: address of sglang-router, if servers are not pods.")
]
LeastPrefill = Annotated[
    int, typer.Option(min=1, metavar="N", help="With --act: least number of prefill servers of each model to keep.")
]
LeastDecode = Annotated[
    int, typer.Option(min=1, metavar="N", help="With --act: least number of decode servers of each model to keep.")
]
RestS = Annotated[float, typer.Option(min=5, max=3600, metavar="S", help="With --act: least time between two moves.")]


KeptIn = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="FILE",
        help="With --page: where history and demand are kept. Default: a file for this fleet and port.",
        show_default=False,
    ),
]


Servers = Annotated[
    list[str] | None,
    typer.Option("--vllm", metavar="URL", help="A vLLM server, e.g. http://10.0.0.5:8000. May be repeated."),
]
Recording = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Recorded /metrics (.scrapes.jsonl, also .gz) instead of servers."),
]
MostLines = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Stop after N lines of each server. Default: at Ctrl-C.")
]
ServerFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="TOML file of servers with their roles, re-read on change."),
]
DynamoFolder = Annotated[
    Path | None,
    typer.Option("--dynamo", metavar="FOLDER", help="With --page: a Dynamo fleet's discovery folder, DYN_FILE_KV."),
]


def observe(
    vllm: Servers = None,
    replay: Recording = None,
    lines: MostLines = None,
    file: ServerFile = None,
    dynamo: DynamoFolder = None,
    *,
    kubernetes: Selector = None,
    namespace: Namespace = "",
    kubernetes_port: PodPort = 0,
    role_label: RoleLabel = "llm-d.ai/role",
    act: Act = False,
    router: Router = "",
    min_prefill: LeastPrefill = 1,
    min_decode: LeastDecode = 1,
    rest_s: RestS = 30.0,
    page: Annotated[
        bool, typer.Option("--page", metavar="", help="Serve page, status, verdict and alerts instead of lines.")
    ] = False,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="With --page: where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="With --page; 0 picks one.")] = 8002,
    history: KeptIn = None,
    ready: Annotated[
        Path | None,
        typer.Option("--json-ready", metavar="FILE", help="With --page: ready file for other commands' --ready."),
    ] = None,
    json: Json = False,
) -> None:
    """Estimate how servers spend GPU time, from their /metrics alone; nothing is replaced or intercepted."""
    from libs.cli.status.observe import fleet_urls, replay_file, watch_pods, watch_servers  # noqa: PLC0415
    from libs.observe.pods import PodQuery  # noqa: PLC0415 (what only this command needs)

    sources = sum((replay is not None, bool(vllm), file is not None, kubernetes is not None))
    if sources > 1 or (not sources and dynamo is None):
        raise typer.BadParameter(
            "name servers with --vllm, --file, --kubernetes or --dynamo, or a recording with --replay"
        )
    _check_pods(kubernetes, has_more=bool(namespace or kubernetes_port))
    if dynamo is not None and not page:
        raise typer.BadParameter("--dynamo goes with --page")
    _check_acting(act, router, page=page, pods=kubernetes is not None)
    if page and (replay is not None or lines is not None):
        raise typer.BadParameter("--page goes with neither --replay nor --lines")
    pods = None if kubernetes is None else PodQuery(kubernetes, namespace, kubernetes_port, role_label)
    if page:
        from libs.cli.status.observe_page import Acting, show_page  # noqa: PLC0415 (what only this option needs)

        acting = Acting(min_prefill, min_decode, rest_s, router) if act else None
        raise typer.Exit(
            show_page(
                vllm or [],
                file,
                dynamo,
                pods,
                acting,
                history=history,
                host=host,
                port=port,
                ready_file=ready,
                as_json=json,
            )
        )
    if replay is not None:
        replay_file(replay, as_json=json)
    elif pods is not None:
        watch_pods(pods, lines, as_json=json)
    else:
        watch_servers(vllm or fleet_urls(file), lines, as_json=json)


def _check_pods(selector: str | None, *, has_more: bool) -> None:
    if selector is not None and not selector.strip():
        raise typer.BadParameter("--kubernetes needs a label selector, such as app=vllm")
    if selector is None and has_more:
        raise typer.BadParameter("--namespace and --kubernetes-port go with --kubernetes")


def _check_acting(act: bool, router: str, *, page: bool, pods: bool) -> None:
    if act and not (page and pods != bool(router)):
        raise typer.BadParameter("--act goes with --page and either --kubernetes or --router, which change the roles")
    if router and not act:
        raise typer.BadParameter("--router goes with --act")
