"""Tests of docs/settings.md against the settings classes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "settings_page.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_lists_every_setting_as_in_the_code(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.page(), "run `make settings-page`"


def test_every_setting_has_a_description(script: ModuleType) -> None:
    assert [line for line in script.page().splitlines() if line.endswith("|  |")] == []
