"""Test that the installed vLLM has every name that this project uses."""

import importlib.util
from pathlib import Path

import pytest

from deploy.try_vllm.check import Check
from deploy.try_vllm.names import touched
from deploy.try_vllm.touched import Kind

pytestmark = pytest.mark.vllm


def test_the_installed_vllm_has_all_used_names() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    names = [each for each in touched() if each.kind is not Kind.FILE]  # those of the GPU build
    problems = Check(Path(spec.origin).parents[1]).problems(names)
    assert not problems, "\n".join(map(str, problems))
