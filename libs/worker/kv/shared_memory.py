"""The folder through which workers of one host share their KV pools, kept clean of what ended workers left."""

import asyncio
from pathlib import Path

import structlog

from libs.engine.kv.pool_file import sweep
from libs.engine.kv.pool_map import PoolMaps

log = structlog.get_logger()

SWEEP_S = 5.0
"""A killed worker's pool takes up memory for so long, while another worker is on its host."""


class SharedMemory:
    """What this worker has mapped of others, and the sweep of files whose owners are gone."""

    def __init__(self, folder: Path | None) -> None:
        """Sweeps at once, so that a pool that starts now finds the room. None: nothing is shared."""
        self._folder = folder
        self.maps = PoolMaps(folder) if folder else None
        self._sweep()

    async def run(self) -> None:
        """Sweep now and then, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep()

    def close(self) -> None:
        """Let go of what is mapped."""
        if self.maps is not None:
            self.maps.close()

    def _sweep(self) -> None:
        if self._folder is None or self.maps is None:
            return
        self.maps.drop_unowned()
        if removed := sweep(self._folder):
            log.info("removed KV pools of workers that have ended", files=removed)
