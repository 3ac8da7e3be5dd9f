"""Tests that the compose files give every container the settings it needs to reach the others."""

from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[3]


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose" / name).read_text())
    return found


def test_every_container_of_ours_has_a_token_by_default() -> None:
    common, base = read("common.yaml")["services"]["fulcrum"], read("base.yaml")
    folder = Path(common["environment"]["FULCRUM_TOKEN_FILE"]).parent
    assert common["environment"]["FULCRUM_TOKEN"] == "${FULCRUM_TOKEN:-}"
    assert common["environment"]["FULCRUM_ALLOW_PLAINTEXT_TOKEN"] == "1"
    assert common["volumes"] == [f"token:{folder}"] and "token" in base["volumes"]
    assert f" {folder} " in (ROOT / "deploy" / "images" / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["base.yaml", "cpu.yaml", "gpu.yaml", "sim.yaml"])
def test_every_service_of_ours_has_the_common_settings(name: str) -> None:
    ours = {key: each for key, each in read(name)["services"].items() if key not in ("kafka", "redis")}
    assert ours
    for service in ours.values():
        assert service["extends"]["file"] == "compose/common.yaml"
