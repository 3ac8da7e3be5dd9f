"""A real headless Chromium for tests, pictures and benches: that of the system, driven by Playwright."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from playwright.async_api import Browser, Page, ViewportSize, async_playwright

PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
OPTIONS: Final = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--metrics-recording-only",
)
WIDE: Final[ViewportSize] = {"width": 1920, "height": 1080}
PHONE: Final[ViewportSize] = {"width": 390, "height": 844}


class BrowserUnavailable(Exception):
    """This machine has no Chromium."""


def find_browser() -> str:
    """Return the path of Chromium. Raise BrowserUnavailable that says what to install."""
    found = next((path for program in PROGRAMS if (path := shutil.which(program))), None)
    if found is None:
        raise BrowserUnavailable("no chromium on PATH: install Debian's package `chromium`")
    return found


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Run a headless Chromium that makes no requests of its own."""
    path = find_browser()
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=path, args=list(OPTIONS), headless=True)
        try:
            yield running
        finally:
            await running.close()


def listen_for_errors(page: Page) -> list[str]:
    """Record what a page reports from now on: uncaught errors, refused contents, and failed requests."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return errors
