"""Test of a person at the page of a suite with keys, from login until the key is revoked."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.async_api import expect

from libs.testing.suites.browser import browser
from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.usefixtures("chromium")]
WAIT_MS = 20_000


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("login")
    with running_suite(folder, "--engine", "sim", env={"FULCRUM_CACHE": str(folder / "cache")}) as found:
        yield found


def command(suite: RunningSuite, *arguments: str) -> Any:
    done = suite.fulcrum("keys", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_a_person_logs_in_sees_the_cluster_and_is_logged_out_once_the_key_is_revoked(suite: RunningSuite) -> None:
    url = str(suite.ready["metrics"])
    async with browser() as running:
        page = await running.new_page()
        await page.goto(url)
        await expect(page.locator("#status")).not_to_have_text("connecting", timeout=WAIT_MS)
        await expect(page.locator("#logout")).to_have_attribute("hidden", "")
        # The first key closes a page that was open without one.
        made = await asyncio.to_thread(command, suite, "create", "--tenant", "ops", "--role", "operator")
        await page.wait_for_url("**/login", timeout=WAIT_MS)
        await page.get_by_label("API key").fill(made["key"])
        await page.get_by_role("button", name="Log in").click()
        await page.wait_for_url(f"{url}/", timeout=WAIT_MS)
        await expect(page.locator("#status")).not_to_have_text("connecting", timeout=WAIT_MS)
        await page.locator("#logout").evaluate("button => button.click()")
        await page.wait_for_url("**/login", timeout=WAIT_MS)
        assert (await page.request.get(f"{url}/v1/status")).status == 401
        await page.get_by_label("API key").fill(made["key"])
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"{url}/", timeout=WAIT_MS)
        await expect(page.locator("#status")).not_to_have_text("connecting", timeout=WAIT_MS)
        await asyncio.to_thread(command, suite, "revoke", made["id"])
        await page.wait_for_url("**/login", timeout=WAIT_MS)
