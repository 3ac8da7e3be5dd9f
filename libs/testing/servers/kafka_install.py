"""Apache Kafka from Maven Central: its jars, fetched once into the user's cache."""

import fcntl
import shutil
import subprocess
import tempfile
from pathlib import Path

from libs.runtime.paths import cache_dir

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "kafka"
VERSION = "4.1.0"
FETCH_TIMEOUT_S = 600.0


class KafkaUnavailable(Exception):
    """This machine cannot run Apache Kafka; the message says what is missing."""


def kafka_jars() -> Path:
    """The folder of Kafka's jars, fetched first if need be; raises KafkaUnavailable."""
    if shutil.which("java") is None:
        raise KafkaUnavailable("a real Kafka needs Java 17 or later: there is no java on the PATH")
    home = cache_dir() / f"kafka-{VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    jars = home / "libs"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several that start at once fetches, the others wait for it
        if not jars.is_dir():
            _fetch(jars)
    return jars


def _fetch(jars: Path) -> None:
    if shutil.which("mvn") is None:
        raise KafkaUnavailable("fetching Kafka needs Maven: there is no mvn on the PATH")
    with tempfile.TemporaryDirectory(dir=jars.parent) as part:
        command = ["mvn", "-q", "-B", "-f", str(DEPLOY / "pom.xml"), "dependency:copy-dependencies"]
        try:
            subprocess.run(
                [*command, "-DincludeScope=runtime", f"-DoutputDirectory={part}/libs"],
                check=True,
                capture_output=True,
                timeout=FETCH_TIMEOUT_S,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = (error.stdout or b"").decode(errors="replace")
            raise KafkaUnavailable(f"Maven could not fetch Kafka: {said or error}") from error
        (Path(part) / "libs").rename(jars)
