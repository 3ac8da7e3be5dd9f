"""The treatment of tests whose programs this machine lacks."""

import os

import pytest


def skip_unless_ci(error: Exception) -> None:
    """Skip with the reason on a person's machine; fail in CI, which must have every program."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(str(error), pytrace=False)
    pytest.skip(str(error))
