"""The commands of `fulcrum tls`: write certificates and print the settings that use them."""

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from libs.cli.console import make_console, plain_table
from libs.contracts.errors import Conflict, InvalidRequest
from libs.runtime.net.authority import Issued, describe, issue
from libs.runtime.paths import cache_dir
from libs.runtime.settings import CommonSettings, load_settings

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
MAX_NAMES: Final = 100
# Certificates with fewer days left are reported as ending soon.
SOON_DAYS: Final = 14


def make_certificates(folder: Path | None, names: Sequence[str], *, days: int, as_json: bool) -> None:
    """Make a certificate for every role. Raise Conflict if some exist already, StartupError if they cannot be
    written.
    """
    home, cluster = _home(folder)
    if describe(home):
        raise Conflict(f"there are certificates in {home} already: `fulcrum tls rotate` renews them")
    made = issue(home, cluster, now=_now(), names=_names(names), days=days)
    _print(made, as_json=as_json)
    if not as_json:
        print(
            f"\nOn each host, with copies of ca.pem and of its role's files, set:\n"
            f"  FULCRUM_TLS_CA={home / 'ca.pem'}\n"
            f"  FULCRUM_TLS_CERT={home}/ROLE.pem FULCRUM_TLS_KEY={home}/ROLE.pem\n"
            f"ca-key.pem signs new certificates: keep it off machines that serve.",
            file=sys.stderr,
        )


def rotate_certificates(
    folder: Path | None, names: Sequence[str], *, days: int, authority: bool, as_json: bool
) -> None:
    """Renew all certificates for their names and `names`. Raise InvalidRequest if there are none."""
    home, cluster = _home(folder)
    there = describe(home)
    if not there:
        raise InvalidRequest(f"there are no certificates in {home} yet: `fulcrum tls init` creates them")
    kept = [name for each in there for name in each.names]
    made = issue(home, cluster, now=_now(), names=_names([*kept, *names]), days=days, new_authority=authority)
    _print(made, as_json=as_json)


def show_certificates(folder: Path | None, *, as_json: bool) -> None:
    home, _ = _home(folder)
    there = describe(home)
    if not there and not as_json:
        print(f"There are no certificates in {home}: `fulcrum tls init` creates them.")
        return
    _print(there, as_json=as_json)


def _home(folder: Path | None) -> tuple[Path, str]:
    cluster = load_settings(CommonSettings).cluster
    return (folder or cache_dir() / "tls" / cluster).absolute(), cluster


def _names(names: Sequence[str]) -> list[str]:
    every = list(dict.fromkeys((*LOOPBACK_NAMES, *names)))
    if len(every) > MAX_NAMES:
        raise InvalidRequest(f"a certificate is for {MAX_NAMES} names at most: use several folders", param="host")
    return every


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _print(issued: Sequence[Issued], *, as_json: bool) -> None:
    if as_json:
        shown = [
            {"role": each.role, "file": str(each.file), "names": each.names, "expires": each.expires.isoformat()}
            for each in issued
        ]
        print(json.dumps(shown))
        return
    table = plain_table("role", "file", "names", "ends", left=("role", "file", "names", "ends"), wraps=("names",))
    for each in issued:
        soon = " (soon)" if each.expires - _now() < datetime.timedelta(days=SOON_DAYS) else ""
        table.add_row(each.role, str(each.file), ", ".join(each.names), f"{each.expires:%Y-%m-%d}{soon}")
    make_console().print(table)
