"""Tests against the official JSON Schema test suite, as packaged in the sources of jsonschema: no answer violates
its schema, and no schema that was enforced before is refused."""

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

from libs.model.grammar import json_rule, kept_schema, loose_schema
from libs.model.instances import satisfies
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
"""The addresses of the drafts, and the minimum number of enforced schemas."""
MAX_STRICTER = 24
"""Bound on valid instances of one draft that no guide writes, because a guide has one form of each value."""
MAX_ORDERED = 4
"""The number of properties up to which all orders are tried, as a guide has one order."""


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
def test_no_answer_is_invalid_by_the_suite(suite: Path, draft: str) -> None:
    address, least = DRAFTS[draft]
    schemas, lax, refused_now = 0, [], []
    for file in sorted((suite / draft).glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            if isinstance(case["schema"], bool):
                continue
            schema = {"$schema": address, **case["schema"]}
            kept, fault = kept_schema(schema)
            if fault:
                if "no value can match" not in fault and not LLMatcher.validate_grammar(f"start: {json_rule(schema)}"):
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


@pytest.mark.parametrize("draft", DRAFTS)
def test_valid_answers_are_accepted_under_every_enforced_schema(suite: Path, draft: str) -> None:
    address = DRAFTS[draft][0]
    accepted, refused = 0, []
    for file in sorted((suite / draft).glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            if isinstance(case["schema"], bool):
                continue
            kept, fault = kept_schema({"$schema": address, **case["schema"]})
            if fault:
                continue
            for test in case["tests"]:
                if test["valid"] and any(accepts(kept, each) for each in orders(test["data"])):
                    accepted += 1
                elif test["valid"]:
                    refused.append((file.name, case["description"], test["description"]))
    print(f"{draft}: {accepted} valid instances accepted, {len(refused)} refused: {refused}")
    # Guides write integers without a fraction, keep to formats, and read no `$ref` apart from what stands beside it.
    assert len(refused) <= MAX_STRICTER


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_constraint_is_enforced_or_listed(suite: Path, draft: str) -> None:
    """A schema without what cannot be enforced accepts its valid instances; invalid ones fail the later check."""
    address = DRAFTS[draft][0]
    loosened, accepted, refused, found_invalid, wrong = 0, 0, [], 0, []
    for file in sorted((suite / draft).glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            if isinstance(case["schema"], bool):
                continue
            schema = {"$schema": address, **case["schema"]}
            loose, fault = loose_schema(schema)
            if fault or not loose.omitted:
                continue
            loosened += 1
            for test in case["tests"]:
                name = (file.name, case["description"], test["description"])
                found = satisfies(json.dumps(test["data"]), schema)
                if found is not test["valid"]:
                    wrong.append((*name, found))
                if test["valid"]:
                    taken = any(accepts(loose.schema, each) for each in orders(test["data"]))
                    accepted += taken
                    refused += [] if taken else [name]
                else:
                    found_invalid += 1
    print(f"{draft}: {loosened} schemas loosened, {accepted} valid instances accepted, {found_invalid} invalid found")
    print(f"refused: {refused}; wrong: {wrong}")
    assert (wrong, refused) == ([], [])
    assert accepted + found_invalid >= 90
