"""Fixtures shared by tests of whole suites."""

from collections.abc import Iterator

import openai
import pytest

from libs.testing.suites.suite import RunningSuite


@pytest.fixture(scope="module")
def client(suite: RunningSuite) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the suite that the test's module starts, without retries."""
    with openai.OpenAI(base_url=f"{suite.gateway}/v1", api_key="none", max_retries=0) as found:
        yield found
