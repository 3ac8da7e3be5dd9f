"""The command `fulcrum down`: signals a suite's `fulcrum up` and waits until it is gone."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from libs.cli.find import find_one_suite
from libs.contracts.errors import StartupError

# A suite is gone within 10 s; a busy machine takes longer.
GONE_WITHIN_S: Final = 30.0
POLL_S: Final = 0.05


def stop_suite(ready_file: Path | None, *, now: bool, as_json: bool) -> None:
    """Stop the suite. Raises StartupError if none runs here or it does not end."""
    suite = find_one_suite(ready_file)
    if not suite.pid:
        raise StartupError("no suite runs on this machine: `fulcrum up` starts one")
    if not is_suite(suite.pid):
        raise StartupError(f"process {suite.pid} is no `fulcrum up`: its ready file is old, and can be removed")
    started_s = time.monotonic()
    if not as_json:
        waits = "at once" if now else "requests may finish"
        print(f"Stopping the suite at {suite.gateway} (process {suite.pid}), {waits}.", file=sys.stderr)
    os.kill(suite.pid, signal.SIGTERM)
    if now:
        time.sleep(POLL_S)
        _signal_again(suite.pid)
    while _runs(suite.pid):
        if time.monotonic() - started_s > GONE_WITHIN_S:
            raise StartupError(
                f"process {suite.pid} has not ended within {GONE_WITHIN_S:g} s: try `fulcrum down --now`"
            )
        time.sleep(POLL_S)
    took_s = round(time.monotonic() - started_s, 2)
    if as_json:
        print(json.dumps({"gateway": suite.gateway, "pid": suite.pid, "took_s": took_s}))
    else:
        print(f"Stopped after {took_s:.1f} s.")


def is_suite(pid: int) -> bool:
    """Return whether the process is a `fulcrum up`; True if the system does not say what a process runs.

    A ready file that outlived a restart of the machine may name another program's process.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True
    return b"up" in words and any(b"fulcrum" in word or b"libs.cli" in word for word in words)


def _signal_again(pid: int) -> None:
    """Send the second signal, which ends everything at once, unless the process has ended already."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Return whether the process has ended but was not yet reaped by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
