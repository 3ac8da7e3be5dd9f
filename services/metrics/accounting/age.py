"""Age of the data that the service shows. Pure."""

import numpy as np

from libs.telemetry.listing import Loads

MS_NS = 1_000_000


def age_ns(loads: Loads, written_to_ns: int | None, now_ns: int) -> int | None:
    """Now less the newest instant that the shown data cover: windows are written until then, and half of the workers,
    those that have left not counted, have reported until then. By this process's clock and each worker's; never
    below 0. None without any worker.

    A dead worker does not make the others' data old: it lowers coverage.
    """
    reported_to_ns = np.sort(loads.covered_to_ns[~loads.listing.left])[::-1]
    if not len(reported_to_ns):
        return None
    newest_ns = int(reported_to_ns[(len(reported_to_ns) - 1) // 2])
    return max(now_ns - (newest_ns if written_to_ns is None else min(newest_ns, written_to_ns)), 0)
