"""The embedded broker, a process of its own: librdkafka's mock cluster, whose address goes into a file.

Limits, declared as capabilities by the bus: everything is in memory and gone with the process; the port changes at each
start; topics cannot be made by request but appear on first use, with 4 partitions; a partition keeps its last 5 MB;
aborted transactions' records are read like others; an answer has one batch of each partition, so a reader that seldom
gets a core falls behind where many write to one. It listens on 127.0.0.1 only.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from libs.runtime import status

METADATA_TIMEOUT_S = 10.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 0 then, 2 when the broker cannot start."""
    parser = argparse.ArgumentParser(prog="python -m libs.bus.embedded", description="Run the embedded broker.")
    parser.add_argument("--file", type=Path, required=True, help='where to write {"bootstrap": "HOST:PORT"}')
    path: Path = parser.parse_args(argv).file
    # Blocked before librdkafka starts its threads, which inherit this: sigwait below is then the only receiver.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        cluster, bootstrap = _start()
        _write(path, bootstrap)
    except (ImportError, RuntimeError, OSError) as error:
        message = f"the embedded broker cannot start: {error}"
        status.emit("failed", error=message)
        print(f"fulcrum kafka: {message}", file=sys.stderr)
        return 2
    status.emit("ready", kafka=bootstrap)
    signal.sigwait(_STOP_SIGNALS)
    del cluster
    return 0


def _start() -> tuple[Any, str]:
    """A client that holds the mock cluster, and the cluster's address."""
    from confluent_kafka import KafkaException, Producer  # noqa: PLC0415  (an optional dependency, reported as such)

    try:
        client = Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0})
        (broker,) = client.list_topics(timeout=METADATA_TIMEOUT_S).brokers.values()
    except KafkaException as error:
        raise RuntimeError(str(error)) from error
    return client, f"{broker.host}:{broker.port}"


def _write(path: Path, bootstrap: str) -> None:
    """Readers see the old file or the whole new one; the pid tells two runs apart that got the same port."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"bootstrap": bootstrap, "pid": os.getpid()}))
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
