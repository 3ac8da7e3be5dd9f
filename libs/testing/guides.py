"""The how-to and reference pages whose shell blocks a test types, beside the tutorials and examples."""

from collections.abc import Mapping
from typing import Final

SUITE: Final = ("--engine", "sim", "--prefill", "2", "--decode", "5")
"""Workers gpu-0 to gpu-6: pages name some of them."""
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
"""Pages of docs with the arguments of the `fulcrum up` that their blocks are typed against; none need no suite."""
NOT_TYPED: Final = "<!-- not typed:"
"""The start of the comment after a block that a test cannot type; the reason follows it."""
TYPED_ELSEWHERE: Final = "<!-- typed by tests/"
"""The start of the comment after a block that the named test types, against a suite of its own."""
