"""Tests of the Helm chart's generated files and of rules for every template; Helm itself runs in tests/kube."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "fulcrum"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "deploy" / "chart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return found


def values(name: str = "values.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / name).read_text())
    return found


def test_schema_and_profiles_match_the_code(script: ModuleType) -> None:
    for path, text in script.made().items():
        assert path.read_text() == text, "run `make chart`"


def test_every_setting_belongs_to_the_chart_or_can_be_set(script: ModuleType, schema: dict[str, Any]) -> None:
    named = set(re.findall(r"^\| `(FULCRUM_\w+)`", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE))
    top = schema["properties"]
    offered = {
        name
        for part in ("gateway", "planner", "metrics", "worker")
        for name in top[part]["properties"]["env"]["properties"]
    }
    assert named == offered | script.OWN
    assert not offered & script.OWN


def test_values_fit_their_schema_and_misspelt_or_invalid_ones_do_not(schema: dict[str, Any]) -> None:
    jsonschema.validate(values(), schema)
    for wrong in (
        {"gatewy": {}},
        {"gateway": {"env": {"FULCRUM_GATEWAY_MAX_WAITNG": 1}}},
        {"gateway": {"env": {"FULCRUM_GATEWAY_MAX_WAITING": 0}}},
        {"worker": {"env": {"FULCRUM_WORKER_ROLE": "decode"}}},
        {"pools": {"decode": {"role": "decoder", "replicas": 1}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**values(), **wrong}, schema)


@pytest.mark.parametrize("file", sorted((CHART / "profiles").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_profile_fits_the_schema(file: Path, schema: dict[str, Any]) -> None:
    jsonschema.validate(values(f"profiles/{file.name}"), schema)
