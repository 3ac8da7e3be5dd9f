"""The folder through which workers of one host share their KV pools, and the removal of files that dead workers
left.
"""

import asyncio
from pathlib import Path

import structlog

from libs.engine.kv.pool_file import sweep
from libs.engine.kv.pool_map import PoolMaps

log = structlog.get_logger()

# Bounds how long a killed worker's pool takes up memory while another worker runs on its host.
SWEEP_S = 5.0


class SharedMemory:
    """The pools of other workers that this one has mapped, and the sweep of ownerless files."""

    def __init__(self, folder: Path | None) -> None:
        """Sweep at once, so that a pool that starts now finds room. Without a folder, nothing is shared."""
        self._folder = folder
        self.maps = PoolMaps(folder) if folder else None
        self._sweep()

    async def run(self) -> None:
        """Sweep every `SWEEP_S` until cancelled, if a folder is shared."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep()

    def close(self) -> None:
        if self.maps is not None:
            self.maps.close()

    def _sweep(self) -> None:
        if self._folder is None or self.maps is None:
            return
        self.maps.drop_unowned()
        if removed := sweep(self._folder):
            log.info("removed KV pools of workers that have ended", files=removed)
