"""`make bench-kube`: what following and scaling a thousand pods costs a planner: CPU, memory, time of a reconcile.

On the cluster that KUBECONFIG names, with nodes and pods of KWOK's, which run nothing. The chart is installed in a
namespace of its own; the actuator, in this process, has the rights of its planner and is looked at once a second.
"""

import argparse
import asyncio
import gc
import json
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from libs.actuators.kubernetes.actuator import KubernetesActuator
from libs.actuators.port import ActuatorDown
from libs.testing.kube.namespace import Namespace, installed, run

PODS_A_NODE: Final = 110
LOOK_S: Final = 1.0
"""As the planner's scaler looks."""
SETTLE_S: Final = 5.0
BOUND_S: Final = 300.0
ENDED: Final = 20
"""Pods that are ended by name."""


@asynccontextmanager
async def nodes(pods: int) -> AsyncIterator[dict[str, str]]:
    """KWOK's, enough of them, while the context is open; the label that they have."""
    label = {"fulcrum.dev/bench": uuid.uuid4().hex[:8]}
    room = {"cpu": "64", "memory": "512Gi", "pods": str(PODS_A_NODE)}
    items = [
        {
            "apiVersion": "v1", "kind": "Node", "status": {"allocatable": room, "capacity": room},
            "metadata": {
                "name": f"bench-{label['fulcrum.dev/bench']}-{number}", "labels": {"type": "kwok", **label},
                "annotations": {"kwok.x-k8s.io/node": "fake"},
            },
        }
        for number in range(pods // PODS_A_NODE + 1)
    ]  # fmt: skip
    await run(
        "kubectl", "apply", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    )
    try:
        yield label
    finally:
        await run("kubectl", "delete", "nodes", "--selector", f"fulcrum.dev/bench={label['fulcrum.dev/bench']}")


def resident_mib() -> float:
    """Of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def until(actuator: KubernetesActuator, count: int) -> None:
    """Wait until the actuator sees `count` pods."""
    async with asyncio.timeout(BOUND_S):
        while len(await names_of(actuator)) != count:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.2)


async def names_of(actuator: KubernetesActuator) -> Sequence[str]:
    """None while the server is too busy to answer, as the planner takes it."""
    try:
        return (await actuator.look()).worker_ids
    except ActuatorDown:
        return ()


async def wish(actuator: KubernetesActuator, count: int, names: list[str]) -> None:
    """As the scaler asks: again after a call that failed."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                return await actuator.have(count, first_to_end=names)
            except ActuatorDown:
                await asyncio.sleep(LOOK_S)


async def measure(own: Namespace, pods: int, idle_s: float) -> dict[str, Any]:
    """One size."""
    kubeconfig = await own.account("fulcrum-planner")
    actuator = KubernetesActuator(deployment=f"{own.name}/fulcrum-spare", most=pods, kubeconfig=kubeconfig)
    try:
        await wish(actuator, 0, [])
        before_mib, began_s, cpu_s = resident_mib(), time.monotonic(), time.process_time()
        await wish(actuator, pods, [])
        await until(actuator, pods)
        up_s, up_cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        await settled(pods)
        looks = 0
        idle_cpu_s, since_s = time.process_time(), time.monotonic()
        while time.monotonic() - since_s < idle_s:
            looks += len(await names_of(actuator)) == pods
            await asyncio.sleep(LOOK_S)
        idle = (time.process_time() - idle_cpu_s) / (time.monotonic() - since_s)
        grown_mib = resident_mib() - before_mib
        names = list(await names_of(actuator))[:ENDED]
        cpu_s, began_s = time.process_time(), time.monotonic()
        await wish(actuator, pods - ENDED, names)
        asked_s = time.monotonic() - began_s
        await until(actuator, pods - ENDED)
        gone = not set(names) & set(await names_of(actuator))
        return {
            "pods": pods, "up_s": up_s, "up_cpu_s": up_cpu_s, "idle_cpu_share": idle, "looks": looks,
            "resident_mib": grown_mib, "asked_s": asked_s, "reconcile_s": time.monotonic() - began_s,
            "reconcile_cpu_s": time.process_time() - cpu_s, "named_pods_went": gone,
        }  # fmt: skip
    finally:
        await actuator.close()


async def settled(pods: int) -> None:
    """Pods that have just come report themselves for a while, each several times."""
    await asyncio.sleep(SETTLE_S + pods / 20)


async def bench(sizes: list[int], idle_s: float) -> list[dict[str, Any]]:
    """A row for each size."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for pods in sizes:
            async with nodes(pods) as label:
                values = Path(folder) / "values.json"
                values.write_text(json.dumps({
                    "worker": {"nodeSelector": label, "env": {}}, "topologySpread": [], "planner": {"most": pods},
                    "kafka": {"address": "broker:9092"}, "redis": {"address": "redis://redis:6379/0"},
                }))  # fmt: skip
                async with installed(Path(folder), "--values", str(values)) as own:
                    row = await measure(own, pods, idle_s)
            found.append(row)
            print(
                f"{row['pods']:>6} {row['up_s']:>7.1f} s {row['up_cpu_s']:>7.2f} s {row['idle_cpu_share']:>8.2%}"
                f" {row['resident_mib']:>8.1f} MiB {row['asked_s']:>7.2f} s {row['reconcile_s']:>8.2f} s"
                f" {row['reconcile_cpu_s']:>7.2f} s",
                flush=True,
            )
    return found


def main() -> None:
    """Print a line a size, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, nargs="+", default=[100, 1000])
    parser.add_argument(
        "--idle-seconds", type=float, default=20.0, help="that nothing changes, looked at once a second"
    )
    asked = parser.parse_args()
    print(f"  pods   0 to all    its CPU  idle CPU       memory  {ENDED} named: asked    gone     its CPU", flush=True)
    print(json.dumps({"sizes": asyncio.run(bench(asked.pods, asked.idle_seconds))}))


if __name__ == "__main__":
    main()
