"""Faults of NIXL in vLLM's worker processes, as a plug-in that vLLM loads there.

A test writes the name of the present fault into the file that FILE_VARIABLE names.
"""

import os
import time
from pathlib import Path
from typing import Any, Final

FILE_VARIABLE: Final = "FULCRUM_TEST_NIXL_FAULT"
LOST, LATE, DUPLICATED, FAILED = "lost", "late", "duplicated", "failed"
# A read that ends as done without all that was asked for. The share that is read follows, 0 for one piece, 1 for all
# pieces but one. A piece is a block of one layer.
SHORT: Final = "short"
HEARTBEAT: Final = b"HB:"


def offer(folder: Path) -> None:
    """Write the package into `folder` by which vLLM finds the plug-in, once the folder is on Python's path."""
    package = folder / "nixl_faults-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl-faults\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[vllm.general_plugins]\nnixl_faults = {__name__}:install\n")


def install() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker  # noqa: PLC0415

    take = NixlPullConnectorWorker._get_new_notifs
    if take.__module__ == __name__:  # vLLM loads plug-ins more than once
        return

    def _get_new_notifs(self: Any) -> set[str]:
        if not isinstance(self.nixl_wrapper, FaultyAgent):
            self.nixl_wrapper = FaultyAgent(self.nixl_wrapper)
        found: set[str] = take(self)
        return found

    NixlPullConnectorWorker._get_new_notifs = _get_new_notifs


class FaultyAgent:
    """An agent of NIXL's whose notifications and transfers fail as the file says."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._file = Path(os.environ[FILE_VARIABLE])
        self._kept: list[tuple[float, str, bytes]] = []
        """(time of delivery, sender, notification)"""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        fault, _, seconds = self._file.read_text().partition(" ")
        now_s = time.monotonic()
        found: dict[str, list[bytes]] = {}
        for sender, messages in self._agent.get_new_notifs().items():
            for message in messages:
                if message.startswith(HEARTBEAT) or fault not in {LOST, LATE, DUPLICATED}:
                    found.setdefault(sender, []).append(message)
                elif fault == DUPLICATED:
                    found.setdefault(sender, []).extend([message, message])
                    self._kept.append((now_s, sender, message))
                elif fault == LATE:
                    self._kept.append((now_s + float(seconds), sender, message))
        ready, self._kept = (
            [each for each in self._kept if each[0] < now_s],
            [each for each in self._kept if each[0] >= now_s],
        )
        for _, sender, message in ready:
            found.setdefault(sender, []).append(message)
        return found

    def make_prepped_xfer(
        self, kind: str, local: Any, local_ids: Any, remote: Any, remote_ids: Any, **options: Any
    ) -> Any:
        fault, _, share = self._file.read_text().partition(" ")
        if fault == SHORT:
            read = min(max(int(len(local_ids) * float(share)), 1), len(local_ids) - 1)
            local_ids, remote_ids = local_ids[:read], remote_ids[:read]
        return self._agent.make_prepped_xfer(kind, local, local_ids, remote, remote_ids, **options)

    def check_xfer_state(self, handle: Any) -> Any:
        state = self._agent.check_xfer_state(handle)
        return "ERR" if state == "DONE" and self._file.read_text() == FAILED else state
