"""The official JSON Schema test suite, as the sources of package jsonschema carry it: no answer is lax, and no schema
is refused that was kept to before."""

import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from libs.model.grammar import json_rule, kept_schema
from libs.runtime.paths import cache_dir

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]

BYTES = LLTokenizer("byte")
DRAFTS = {
    "draft2020-12": ("https://json-schema.org/draft/2020-12/schema", 240),
    "draft2019-09": ("https://json-schema.org/draft/2019-09/schema", 250),
    "draft7": ("http://json-schema.org/draft-07/schema#", 190),
    "draft6": ("http://json-schema.org/draft-06/schema#", 170),
    "draft4": ("http://json-schema.org/draft-04/schema#", 120),
}
"""Addresses, and how many schemas are kept to at least."""
MAX_ORDERED = 4
"""Properties of an object whose orders are all tried: a guide has one order."""


@pytest.fixture(scope="module")
def suite() -> Path:
    """The suite's folder, of the version that the lock names; fetched once."""
    name = f"jsonschema-{version('jsonschema')}"
    home = cache_dir() / "schema-suite"
    found = home / name / "json" / "tests"
    if not found.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        fetch = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(home)]
        try:
            subprocess.run(
                [sys.executable, "-m", "pip", *fetch, name.replace("-", "==")],
                capture_output=True, check=True, timeout=300,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            (pytest.fail if os.environ.get("CI", "").lower() in ("1", "true") else pytest.skip)("no registry")
        with tarfile.open(home / f"{name}.tar.gz") as archive:
            archive.extractall(home, filter="data")
    return found


def orders(instance: Any) -> Iterator[Any]:
    if isinstance(instance, dict) and len(instance) <= MAX_ORDERED:
        return (dict(each) for each in itertools.permutations(instance.items()))
    return iter((instance,))


def accepts(schema: dict[str, Any], instance: Any) -> bool:
    matcher = LLMatcher(BYTES, f"start: {json_rule(schema)}\n", log_level=0)
    text = json.dumps(instance, ensure_ascii=False).encode()
    return bool(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_answer_is_one_that_the_suite_calls_invalid(suite: Path, draft: str) -> None:
    address, least = DRAFTS[draft]
    schemas, lax, refused_now = 0, [], []
    for file in sorted((suite / draft).glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            if isinstance(case["schema"], bool):
                continue
            schema = {"$schema": address, **case["schema"]}
            kept, fault = kept_schema(schema)
            if fault:
                if "nothing fits" not in fault and not LLMatcher.validate_grammar(f"start: {json_rule(schema)}"):
                    refused_now.append((file.name, case["description"], fault))
                continue
            schemas += 1
            lax += [
                (file.name, case["description"], test["description"])
                for test in case["tests"]
                if not test["valid"] and any(accepts(kept, each) for each in orders(test["data"]))
            ]
    assert (lax, refused_now) == ([], [])
    assert schemas >= least
