"""Status lines as their reader sees them; `libs.runtime.status` writes them."""

import msgspec


class StatusLine(msgspec.Struct, frozen=True):
    """One line of a child's stdout: progress, ready, or failed."""

    event: str
    stage: str = ""
    fraction: float = 0.0
    http: str = ""
    grpc: str = ""
    kafka: str = ""
    path: str = ""
    """Of a model that was made ready."""
    error: str = ""

    @property
    def address(self) -> str:
        """Where the child serves, as people write it."""
        return self.http or self.grpc or self.kafka


_decoder = msgspec.json.Decoder(StatusLine)


def parse_status(line: bytes) -> StatusLine | None:
    """None for a line that is something else: a library that prints, say."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
