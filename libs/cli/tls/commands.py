"""The command group `fulcrum tls`: certificates that services present to each other."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json

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
        help="Name or address by which services are reached, beside loopback's. May be repeated.",
    ),
]
Days = Annotated[int, typer.Option(min=1, max=825, metavar="N", help="Days for which certificates are valid.")]


@tls.callback()
def options() -> None:
    """Make, rotate and show the certificates that services present to each other, one for each role."""


@tls.command(epilog="Example: fulcrum tls init --host gpu-1.example --host 10.0.0.7")
def init(folder: Folder = None, host: Hosts = None, days: Days = 90, json: Json = False) -> None:
    """Make an authority and a certificate for each role, and print the settings. Existing ones are never replaced."""
    from libs.cli.tls.certificates import make_certificates  # noqa: PLC0415 (what only this command needs)

    make_certificates(folder, host or [], days=days, as_json=json)


@tls.command(epilog="Example: fulcrum tls rotate, from cron each month; services take the new ones by themselves")
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
    """Renew all certificates for the names that they have. No service needs a restart."""
    from libs.cli.tls.certificates import rotate_certificates  # noqa: PLC0415

    rotate_certificates(folder, host or [], days=days, authority=authority, as_json=json)


@tls.command(epilog="Example: fulcrum tls show --json")
def show(folder: Folder = None, json: Json = False) -> None:
    """Show role, names and end of each certificate."""
    from libs.cli.tls.certificates import show_certificates  # noqa: PLC0415

    show_certificates(folder, as_json=json)
