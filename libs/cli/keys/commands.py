"""The command groups `fulcrum keys` (permissions and limits of callers) and `fulcrum tls`."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile

keys = typer.Typer(
    help="Create, list and revoke API keys. Once a key exists, every request needs one.",
    no_args_is_help=True,
)


@keys.callback()
def options() -> None:
    """Create, list and revoke API keys. Once a key exists, every request needs one."""


@keys.command(
    epilog="Example: fulcrum keys create --tenant search --models SmolLM2-135M-Instruct --expires 30d; then"
    " OpenAI(base_url=..., api_key=KEY), or FULCRUM_API_KEY=KEY fulcrum chat Hello"
)
def create(
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="Tenant that the key belongs to, and whose limits apply.")
    ],
    *,
    role: Annotated[
        str,
        typer.Option(
            metavar="ROLE", help="user, operator (sees everything, moves roles) or admin (changes everything)."
        ),
    ] = "user",
    models: Annotated[str, typer.Option(metavar="A,B", help="Models that requests may name. Default: all.")] = "",
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time until the key expires, e.g. 12h or 30d.")
    ] = None,
    service_class: Annotated[
        str, typer.Option("--class", metavar="CLASS", help="Service class of its requests; '*' lets a header name it.")
    ] = "online",
    priority: Annotated[int, typer.Option(metavar="N", help="Highest priority that its batch jobs may have.")] = 0,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Make a key and show it once: only its hash is stored."""
    from libs.cli.keys.book import create_key  # noqa: PLC0415 (what only this command needs)

    create_key(
        tenant, role=role, models=models, expires=expires, service_class=service_class, priority=priority,
        ready_file=ready, as_json=json,
    )  # fmt: skip


@keys.command(name="list", epilog="Example: fulcrum keys list --json")
def list_keys(ready: ReadyFile = None, json: Json = False) -> None:
    """List all keys, including ended ones: tenant, role, models, expiry. The keys themselves are never shown."""
    from libs.cli.keys.book import show_keys  # noqa: PLC0415

    show_keys(ready, as_json=json)


@keys.command(epilog="Example: fulcrum keys limits search --requests 600 --tokens 200000 --concurrent 32")
def limits(
    tenant: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Tenant to change. Default: show every tenant with limits.")
    ] = None,
    *,
    requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests a minute, over all gateways.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens a minute, of prompts and answers.")
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Choices in progress at the same time.")
    ] = None,
    gpu_seconds: Annotated[int | None, typer.Option(min=1, metavar="N", help="GPU-seconds in 24 hours.")] = None,
    stored_bytes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Bytes of all its files.")] = None,
    files: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of files, answers of its batches included.")
    ] = None,
    file_days: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Days after which its files are deleted.")
    ] = None,
    batch_lines: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Unanswered lines of its batches.")
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(min=1, max=100, metavar="N", help="Weight of its share when tenants compete. Default: 1."),
    ] = None,
    off: Annotated[bool, typer.Option("--off", metavar="", help="Remove the tenant's limits.")] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Set or show a tenant's limits. Limits that are not given keep their value."""
    from libs.cli.keys.book import set_limits, show_limits  # noqa: PLC0415

    if tenant is None:
        show_limits(ready, as_json=json)
        return
    wanted = {
        "requests_per_minute": requests, "tokens_per_minute": tokens, "concurrent": concurrent,
        "gpu_seconds_per_day": gpu_seconds, "stored_bytes": stored_bytes, "file_days": file_days,
        "batch_lines": batch_lines, "weight": weight, "files": files,
    }  # fmt: skip
    set_limits(tenant, wanted, off=off, ready_file=ready, as_json=json)


@keys.command(name="delete-tenant", epilog="Example: fulcrum keys delete-tenant search --yes")
def delete_tenant(
    tenant: Annotated[str, typer.Argument(metavar="NAME", help="As shown by `fulcrum keys list`.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", metavar="", help="Do not ask for confirmation.")] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Delete a tenant: its keys, limits, files, batches and responses. This cannot be undone."""
    from libs.cli.keys.book import delete_tenant as delete  # noqa: PLC0415

    delete(tenant, yes=yes, ready_file=ready, as_json=json)


@keys.command(name="rotate-salt", epilog="Example: fulcrum keys rotate-salt")
def rotate_salt(ready: ReadyFile = None, json: Json = False) -> None:
    """Draw a new secret for the salts that separate tenants' KV blocks. Cached prefixes can then not be reused."""
    from libs.cli.keys.book import rotate_cache_secret  # noqa: PLC0415

    rotate_cache_secret(ready_file=ready, as_json=json)


@keys.command(epilog="Example: fulcrum keys revoke key_0a1b2c3d4e5f")
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="As shown by `fulcrum keys list`.")],
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Revoke a key. It stops working within two seconds; its running answers finish."""
    from libs.cli.keys.book import revoke_key  # noqa: PLC0415

    revoke_key(key, ready_file=ready, as_json=json)


tls = typer.Typer(
    help="Make, rotate and show the certificates that services present to each other, one for each role.",
    no_args_is_help=True,
)
Folder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder of the certificates. Default: tls/CLUSTER in the cache folder."),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME",
        help="Host name or address of the services, in addition to loopback. May be repeated.",
    ),
]
Days = Annotated[int, typer.Option(min=1, max=825, metavar="N", help="Days for which certificates are valid.")]


@tls.callback()
def tls_options() -> None:
    """Make, rotate and show the certificates that services present to each other, one for each role."""


@tls.command(epilog="Example: fulcrum tls init --host gpu-1.example --host 10.0.0.7")
def init(folder: Folder = None, host: Hosts = None, days: Days = 90, json: Json = False) -> None:
    """Make an authority and a certificate for each role, and print the settings. Existing ones are never replaced."""
    from libs.cli.keys.certificates import make_certificates  # noqa: PLC0415 (what only this command needs)

    make_certificates(folder, host or [], days=days, as_json=json)


@tls.command(epilog="Example: fulcrum tls rotate, from cron each month; services load the new ones by themselves")
def rotate(
    folder: Folder = None,
    host: Hosts = None,
    days: Days = 90,
    authority: Annotated[
        bool,
        typer.Option(
            "--authority",
            metavar="",
            help="Make a new authority too; the previous one stays trusted until the next rotation.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Renew all certificates under their present names. No service needs a restart."""
    from libs.cli.keys.certificates import rotate_certificates  # noqa: PLC0415

    rotate_certificates(folder, host or [], days=days, authority=authority, as_json=json)


@tls.command(epilog="Example: fulcrum tls show --json")
def show(folder: Folder = None, json: Json = False) -> None:
    """Show role, names and expiry of each certificate."""
    from libs.cli.keys.certificates import show_certificates  # noqa: PLC0415

    show_certificates(folder, as_json=json)
