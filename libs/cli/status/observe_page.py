"""`fulcrum observe --page`: the metrics service alone, over observed servers."""

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain
from libs.launch.preflight import check_writable
from libs.launch.processes import leash
from libs.launch.ready import Ready, default_ready_file, write_ready
from libs.observe.dynamo_folder import check_folder, read_members
from libs.observe.fleet import read_fleet, targets_of
from libs.observe.pods import PodQuery
from libs.runtime.http import bind
from libs.runtime.paths import cache_dir

STOP_S: Final = 10.0
MAX_LINE_CHARS: Final = 65_536
FLEET: Final = tuple(f"FULCRUM_METRICS_OBSERVE{each}" for each in ("", "_FILE", "_DYNAMO", "_KUBERNETES", "_NAMESPACE"))
"""The settings that name the servers."""
DIGEST_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class Acting:
    """The limits within which servers are moved between roles."""

    min_prefill: int
    min_decode: int
    rest_s: float
    router: str = ""
    """The router by which roles are changed; empty for the label of pods."""


def show_page(
    urls: Sequence[str],
    file: Path | None,
    dynamo: Path | None,
    pods: PodQuery | None = None,
    acting: Acting | None = None,
    *,
    history: Path | None = None,
    host: str,
    port: int,
    ready_file: Path | None,
    as_json: bool,
) -> int:
    """Serve until a signal, and return the exit code. Raise InvalidRequest and StartupError.

    History and demand are kept in a file for this fleet and port unless `history` names one; with port 0 in memory.
    """
    # A mistake in the list ends the command before anything starts.
    servers = targets_of(urls) if file is None else read_fleet(file)
    bind(host, port, "--port").close()
    workers = 0
    if dynamo is not None:
        check_folder(dynamo)
        workers = len(read_members(dynamo, time.time()).cards)
    token = os.environ.get("FULCRUM_TOKEN", "") or secrets.token_urlsafe(32)
    own = {
        "FULCRUM_METRICS_OBSERVE": ",".join(urls),
        "FULCRUM_METRICS_OBSERVE_FILE": "" if file is None else str(file.resolve()),
        "FULCRUM_METRICS_OBSERVE_DYNAMO": "" if dynamo is None else str(dynamo.resolve()),
        **_pod_settings(pods),
        **_act_settings(acting),
        "FULCRUM_METRICS_PORT": str(port),
        "FULCRUM_HOST": host,
        "FULCRUM_TOKEN": token,
    }
    kept = history or _history_file(own, port)
    if kept is not None:
        own["FULCRUM_METRICS_HISTORY_FILE"] = str(kept)
    # Huge pages would allocate memory for windows of the history long before they are written.
    huge_pages = {"NUMPY_MADVISE_HUGEPAGE": "0"}
    defaults = {"FULCRUM_LOG_LEVEL": "warning", "FULCRUM_LOG_FORMAT": "console", **huge_pages}
    leashed = (sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid()))
    child = subprocess.Popen(
        [*leashed, sys.executable, "-m", "services.metrics"],
        env={**defaults, **os.environ, **own},
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C reaches it only once, from here
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: child.terminate())
    written: Path | None = None
    assert child.stdout is not None
    try:
        while line := child.stdout.readline(MAX_LINE_CHARS):
            url = _ready_url(line)
            if url:
                written = _write_ready(url, token, ready_file)
                _print_start(url, written, len(servers), workers, pods, acting=acting, as_json=as_json)
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(STOP_S)
        if written is not None:
            written.unlink(missing_ok=True)


def _history_file(own: dict[str, str], port: int) -> Path | None:
    """Return the file that the same command finds again; None for a port that changes each time, or if no file can be
    written.
    """
    if not port or os.environ.get("FULCRUM_METRICS_HISTORY_FILE"):
        return None
    folder = cache_dir() / "observe"
    try:
        check_writable(folder, "name a file with --history")
    except StartupError as error:
        print(f"fulcrum: history and demand stay in memory: {error.message}", file=sys.stderr)
        return None
    fleet = [own.get(name, "") for name in FLEET]
    digest = hashlib.sha256(json.dumps(fleet).encode()).hexdigest()[:DIGEST_CHARS]
    return folder / f"{port}-{digest}"


def _pod_settings(pods: PodQuery | None) -> dict[str, str]:
    if pods is None:
        return {"FULCRUM_METRICS_OBSERVE_KUBERNETES": ""}
    return {
        "FULCRUM_METRICS_OBSERVE_KUBERNETES": pods.selector,
        "FULCRUM_METRICS_OBSERVE_NAMESPACE": pods.namespace,
        "FULCRUM_METRICS_OBSERVE_PORT": str(pods.port),
        "FULCRUM_METRICS_OBSERVE_ROLE_LABEL": pods.role_label,
    }


def _act_settings(acting: Acting | None) -> dict[str, str]:
    if acting is None:
        return {"FULCRUM_METRICS_OBSERVE_ACT": "0"}
    return {
        "FULCRUM_METRICS_OBSERVE_ACT": "1",
        "FULCRUM_METRICS_OBSERVE_ROUTER": acting.router,
        "FULCRUM_METRICS_OBSERVE_PREFILL_MIN": str(acting.min_prefill),
        "FULCRUM_METRICS_OBSERVE_DECODE_MIN": str(acting.min_decode),
        "FULCRUM_METRICS_OBSERVE_REST_S": str(acting.rest_s),
    }


def _ready_url(line: str) -> str:
    try:
        event = json.loads(line)
        return str(event["http"]) if event["event"] == "ready" else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _write_ready(url: str, token: str, ready_file: Path | None) -> Path:
    port = int(url.rpartition(":")[2])
    path = ready_file or default_ready_file(port).with_name(f"observe-{port}.json")
    ready = Ready(
        gateway="", gateways=(), planner=url, metrics=url, pid=os.getpid(), token=token,
        kafka="", redis="", cluster="", model="", engine="",
    )  # fmt: skip
    write_ready(path, ready)
    return path


def _print_start(
    url: str, ready: Path, servers: int, workers: int, pods: PodQuery | None, *, acting: Acting | None, as_json: bool
) -> None:
    if as_json:
        print(json.dumps({"page": url, "ready": str(ready), "servers": servers + workers}), flush=True)
        return
    acts = ""
    if acting is not None:
        kept = f"at least {acting.min_prefill} prefill and {acting.min_decode} decode stay"
        acts = f"Acts:    it changes roles by itself ({kept}); see fulcrum events --ready {plain(str(ready))}\n"
    several = "server" if servers == 1 else "servers"
    observed = f"{servers} {several}; all GPU time is estimated"
    if pods is not None:
        observed = f"pods that match {plain(pods.selector)}; all GPU time is estimated"
    elif workers:
        exact = f"{workers} of Dynamo's workers; their steps are measured"
        observed = f"{servers} {several}, estimated, and {exact}" if servers else exact
    print(
        f"Page:    {url}  ({observed})\n"
        f"Screen:  fulcrum top --metrics {url}\n"
        f"Status:  fulcrum status --ready {plain(str(ready))}\n"
        f"{acts}Stop with Ctrl-C.",
        flush=True,
    )
