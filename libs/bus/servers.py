"""Where the broker is now: fixed addresses, or those in the file that the embedded broker wrote."""

import json
from dataclasses import dataclass
from pathlib import Path

EMBEDDED_PREFIX = "embedded:"


class BrokerAway(Exception):
    """There is no broker to connect to, or not yet."""


@dataclass(frozen=True, slots=True)
class Address:
    """A broker to connect to."""

    bootstrap: str
    """HOST:PORT[,HOST:PORT...]."""
    run: str
    """Differs between runs of a broker that forgets everything when it stops; constant for one that does not."""


class Servers:
    """Reads "HOST:PORT[,...]" or "embedded:FILE"; the file anew each time, as each run has another port."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self.embedded = spec.startswith(EMBEDDED_PREFIX)

    def address(self) -> Address:
        """The present address; raises BrokerAway while the embedded broker has written none."""
        if not self.embedded:
            return Address(self._spec, self._spec)
        path = Path(self._spec.removeprefix(EMBEDDED_PREFIX))
        try:
            text = path.read_text()
            return Address(str(json.loads(text)["bootstrap"]), text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BrokerAway(f"{path} holds no broker's address: {error}") from error

    def run(self) -> str | None:
        """What tells this run of the broker from the next; None while there is none."""
        try:
            return self.address().run
        except BrokerAway:
            return None
