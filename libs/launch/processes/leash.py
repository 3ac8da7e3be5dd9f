"""`python -I -S leash.py LAUNCHER_PID COMMAND...`: become COMMAND, and be killed when the launcher dies.

The kernel kills the process (PR_SET_PDEATHSIG survives exec), so no process survives even a `kill -9` of the launcher.
Every child starts through this module, so it uses only the standard library.
"""

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_NOT_STARTED = 127


def main(launcher_pid: int, command: list[str]) -> None:
    """Replace this process by the command. Return only if the launcher has ended or the command does not exist."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher_pid:  # the launcher died before the call above
        sys.exit(EXIT_NOT_STARTED)
    try:
        os.execvp(command[0], command)  # noqa: S606 (its whole purpose)
    except OSError as error:
        print(json.dumps({"event": "failed", "error": f"{command[0]} cannot be run: {error.strerror}"}))
        sys.exit(EXIT_NOT_STARTED)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
