"""Compose files and the manifest of `observe`: tokens that containers share, and volumes that they can write."""

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


def test_observe_keeps_its_history_in_a_volume_that_it_can_write() -> None:
    found = read("observe.yaml")
    service = found["services"]["observe"]
    (mount,) = service["volumes"]
    volume, _, folder = mount.partition(":")
    assert volume in found["volumes"]
    assert service["environment"]["FULCRUM_METRICS_HISTORY_FILE"].removesuffix("}").partition("-")[2].startswith(folder)
    # Only this volume is written, and a new one has the owner of the image's folder.
    assert service["read_only"] is True
    dockerfile = (ROOT / "deploy" / "images" / "Dockerfile").read_text()
    made, user = dockerfile.partition(f" {folder} ")[2], dockerfile.rpartition("\nUSER ")[2].split()[0]
    _, _, owned = made.partition("\n")[0].partition(f"chown {user}: ")
    assert folder in owned.split()


def test_observe_on_kubernetes_keeps_its_history_in_a_claim_that_its_user_can_write() -> None:
    manifest = (ROOT / "deploy" / "observe" / "kubernetes.yaml").read_text()
    found = {each["kind"]: each for each in yaml.safe_load_all(manifest)}
    spec, claim = found["Deployment"]["spec"], found["PersistentVolumeClaim"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    folder = Path(next(each["value"] for each in container["env"] if each["name"].endswith("HISTORY_FILE"))).parent
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    claimed = volumes[mounted[str(folder)]]["persistentVolumeClaim"]["claimName"]
    assert claimed == claim["metadata"]["name"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["fsGroup"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in (ROOT / "deploy" / "images" / "Dockerfile").read_text()
    # A volume that one node mounts at a time must be given back before another pod begins.
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"] and spec["strategy"]["type"] == "Recreate"
