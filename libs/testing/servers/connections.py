"""`python -m libs.testing.servers.connections --times N COMMAND...`: run a command N times beside many connections.

200 a second come and go between ports that the system picks, so that thousands of those are open or in TIME_WAIT: a
port of that range that was found free is often somebody's a moment later. Says how often the command failed.
"""

import argparse
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
PER_S = 200
HELD = 600
"""The number of connections open at a time; each lasts three seconds."""


class Connections:
    """A thread that opens and closes connections to its own listener until `stop`."""

    def __init__(self) -> None:
        self.opened = 0
        self.without_port = 0
        """The number of connections that failed because every port was taken."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return once all connections are closed."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        held: deque[tuple[socket.socket, socket.socket]] = deque()
        with socket.create_server((LOOPBACK, 0)) as listener:
            began_s = time.monotonic()
            for number in range(sys.maxsize):
                if self._stopping.wait(max(began_s + number / PER_S - time.monotonic(), 0)):
                    break
                # Linux takes even ports for a client that binds none, and odd ones for a client that binds port 0.
                source = (LOOPBACK, 0) if number % 2 else None
                try:
                    client = socket.create_connection(listener.getsockname(), source_address=source)
                except OSError:
                    self.without_port += 1
                    continue
                held.append((client, listener.accept()[0]))
                self.opened += 1
                if len(held) > HELD:
                    _close(held.popleft())
        for pair in held:
            _close(pair)


def _close(pair: tuple[socket.socket, socket.socket]) -> None:
    """Close the client first, so that TIME_WAIT is at its port."""
    for sock in pair:
        sock.close()


@contextlib.contextmanager
def many_connections() -> Iterator[Connections]:
    """Open and close connections while the context is open."""
    connections = Connections()
    connections.start()
    try:
        yield connections
    finally:
        connections.stop()


def main(argv: list[str] | None = None) -> int:
    """Return 0 if the command ended with 0 each time, else 1."""
    parser = argparse.ArgumentParser(prog="python -m libs.testing.servers.connections", description=__doc__)
    parser.add_argument("--times", type=int, default=20, metavar="N", help="how often to run it (default 20)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="and its options")
    arguments = parser.parse_args(argv)
    failed = 0
    with many_connections() as connections:
        for number in range(1, arguments.times + 1):
            code = subprocess.run(arguments.command, check=False).returncode
            failed += code != 0
            print(f"round {number} of {arguments.times}: exit code {code}", flush=True)
    print(f"{failed} of {arguments.times} failed beside {connections.opened} connections", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
