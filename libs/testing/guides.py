"""The how-to and reference pages whose shell blocks a test runs, in addition to tutorials and examples."""

from collections.abc import Mapping
from typing import Final

SUITE: Final = ("--engine", "sim", "--prefill", "2", "--decode", "5")
"""The workers gpu-0 to gpu-6, some of which the pages name."""
KEYED: Final = ("--engine", "sim", "--prefill", "1", "--decode", "1")
POOL: Final = ("--engine", "sim", "--pool", "2", "--model", "A", "--model", "B", "--model", "C")
GUIDES: Final[Mapping[str, tuple[str, ...]]] = {
    "backup": SUITE,
    "batch": SUITE,
    "embeddings": SUITE,
    "lab": SUITE,
    "models": POOL,
    "models-forecast": (),
    "planner": SUITE,
    "profiles": (),
    "security": KEYED,
    "security-records": SUITE,
    "slow-request": SUITE,
    "status": SUITE,
    "tune": SUITE,
    "upgrade": SUITE,
    "verdict": SUITE,
}
"""Pages of docs, each with the arguments of `fulcrum up` for its suite; none means that it needs no suite."""
NOT_TYPED: Final = "<!-- not typed:"
"""The start of the comment after a block that a test cannot run; the reason follows it."""
TYPED_ELSEWHERE: Final = "<!-- typed by tests/"
"""The start of the comment after a block that the named test runs, against its own suite."""
