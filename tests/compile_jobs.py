"""The number of C files that a test may compile at a time."""

import os


def compile_jobs() -> int:
    """Return 1 beside other test processes, which already use all cores, and otherwise 0 for one per core."""
    return 1 if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 else 0
