"""What kept demand takes: bytes on disk, memory, time of a save and of a read, by the rows of a bin.

    python -m load.forecast.bench_demand_file --rows 10 --days 30

Written as the service writes: bins as they end, with 400 days of quarters of an hour beside them where it is full.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

from libs.demand.counts import Counts, DemandKey
from libs.demand.fold import BinDelta
from services.metrics.demand.file import COARSE, COARSE_BINS, FINE_BINS, TIMES, DemandFile

BATCH: int = 1440
"""Fine bins in a transaction: a day, to be quick; the service writes one in twelve saves."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10, help="models x classes x tenants that ask in every bin")
    parser.add_argument("--days", type=int, default=30)
    args = parser.parse_args()
    chance = random.Random(1)
    keys = [DemandKey("llama", "online", f"tenant-{number}") for number in range(args.rows)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demand"
        file = DemandFile(str(path), "bench")
        began_s, first = time.perf_counter(), 29_000_000
        for start in range(first, first + args.days * 1440, BATCH):
            deltas = {number: _bin(chance, keys) for number in range(start, start + BATCH)}
            file.save(deltas, {})
        wrote_s = time.perf_counter() - began_s
        last = first + args.days * 1440
        began_s = time.perf_counter()
        file.save({last: _bin(chance, keys)}, {})
        save_ms = (time.perf_counter() - began_s) * 1e3
        began_s = time.perf_counter()
        file.read(COARSE, (last - 56 * 1440) // TIMES, last // TIMES, 900 * 10**9)
        read_ms = (time.perf_counter() - began_s) * 1e3
        file.close()
        held = path.stat().st_size
    bins = args.days * 1440 * (1 + 1 / TIMES)
    print(
        json.dumps(
            {
                "rows": args.rows,
                "bins": round(bins),
                "bytes": held,
                "bytes_a_bin": round(held / bins),
                "full_mb": round(held / bins * (FINE_BINS + COARSE_BINS) / 1e6, 1),
                "write_ms_a_bin": round(wrote_s / (args.days * 1440) * 1e3, 3),
                "save_of_one_bin_ms": round(save_ms, 2),
                "read_of_56_days_ms": round(read_ms, 1),
                "most_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            }
        )
    )


def _bin(chance: random.Random, keys: list[DemandKey]) -> BinDelta:
    rows = {}
    for key in keys:
        requests = chance.randint(1, 600)
        rows[key] = Counts(requests, requests, requests * 900, requests * 200, requests * 250, requests, 0)
    return BinDelta(rows, 60_000_000_000)


if __name__ == "__main__":
    main()
