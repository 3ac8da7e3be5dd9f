"""Windows of all workers in a binary format, for readers of a thousand GPUs at once. Pure.

A little-endian uint32 gives the length of a JSON header, which spaces pad so that the arrays are aligned to 8. Then
follow times [windows, workers, 4] (covered, prefill, decode, KV wait) in nanoseconds, uint32 or float64 as the
header's `type` says. Roles [windows, workers] uint8 end the message, with bit 7 set where the time is provisional.
"""

from typing import Final

import msgspec
import numpy as np

from libs.telemetry.members import UNKNOWN, Member, Members
from libs.telemetry.windows.cells import PROVISIONAL
from libs.telemetry.windows.ring import NO_ROLE
from libs.telemetry.windows.rollups import Series

MAX_CELLS: Final = 200_000
"""Windows x workers in one answer: 3.4 MB of windows below 4 s, 6.6 MB of longer ones."""
ALIGNMENT_BYTES: Final = 8
_LENGTH_BYTES: Final = 4


class Header(msgspec.Struct):
    window_ms: int
    first_start_unix_ms: int
    windows: int
    workers: list[str]
    nodes: list[str]
    models: list[str]
    gpus: list[int]
    """GPUs of each worker by its last report."""
    groups: list[str]
    """Data-parallel groups of which workers are ranks; empty for a worker without one."""
    type: str
    told_to_unix_ms: int
    """End of the newest 100 ms included. Of the window that holds it, only the time before it is over."""


def pack(series: Series, members: Members, written_to_ns: int) -> bytes:
    """Encode the windows; one that is not over at `written_to_ns` is provisional."""
    starts = series.starts_ns
    # JavaScript reads both types without loss; nanoseconds of a long window need 53 bits.
    small = series.window_ns < 2**32
    of = [members.get(worker_id) or Member(worker_id, UNKNOWN, UNKNOWN, 1) for worker_id in series.worker_ids]
    header = msgspec.json.encode(
        Header(
            window_ms=series.window_ns // 1_000_000,
            first_start_unix_ms=int(starts[0]) // 1_000_000 if len(starts) else 0,
            windows=len(starts),
            workers=list(series.worker_ids),
            nodes=[member.node for member in of],
            models=[member.model for member in of],
            gpus=[member.gpus for member in of],
            groups=[member.group for member in of],
            type="uint32" if small else "float64",
            told_to_unix_ms=written_to_ns // 1_000_000,
        )
    )
    header += b" " * (-(len(header) + _LENGTH_BYTES) % ALIGNMENT_BYTES)
    times = series.times_ns.astype("<u4" if small else "<f8")
    provisional = series.provisional | (starts[:, None] + series.window_ns > written_to_ns)
    roles = series.roles | ((provisional & (series.roles != NO_ROLE)) * np.uint8(PROVISIONAL))
    return b"".join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, times.tobytes(), roles.tobytes()))
