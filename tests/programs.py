"""The treatment of tests whose programs this machine lacks."""

import os

import pytest


def skip_or_fail_in_ci(error: Exception) -> None:
    """Skip the test with the reason of `error`; in CI, which must have every program, fail it."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(str(error), pytrace=False)
    pytest.skip(str(error))
