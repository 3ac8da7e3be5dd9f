"""A cache of lab tables, so that the same workers, SLO and traffic are measured only once."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from libs.capacity.measure import SIZES, Bench, Note
from libs.policy.capacity import PHASES, Phase, PoolTable

# The version of the measurement and its format; a new one invalidates all tables.
LAYOUT: Final = 2
MOST_FILES: Final = 200


def kept_tables(bench: Bench, folder: Path | None, note: Note = lambda line: None) -> dict[Phase, PoolTable]:
    """Return tables from the folder, or measure and store them; a folder of None stores nothing.

    Raise InvalidRequest if the SLO cannot be met.
    """
    path = None if folder is None else folder / f"{fingerprint(bench)}.json"
    if path is not None and path.is_file():
        with suppress(ValueError, KeyError, TypeError, OSError):
            row = json.loads(path.read_text())
            return {phase: PoolTable(tuple(row[phase]["workers"]), tuple(row[phase]["work"])) for phase in PHASES}
    tables = bench.tables(note)
    if path is not None and folder is not None:
        with suppress(OSError):  # a table that cannot be stored is measured again
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({phase: asdict(table) for phase, table in tables.items()}))
            for old in sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-MOST_FILES]:
                old.unlink()
    return tables


def fingerprint(bench: Bench) -> str:
    """Return a hash of everything that a table depends on."""
    profile = bench.hardware.profile
    what = [
        LAYOUT, SIZES, asdict(profile.step_time), profile.kv_bytes_per_token, profile.kv_memory_bytes, profile.gpus,
        bench.hardware.chunk_tokens, bench.hardware.link_gbps, bench.slo.text, bench.max_sequences, bench.objective,
        bench.seed, bench.traffic.cv, list(bench.traffic.lengths),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]
