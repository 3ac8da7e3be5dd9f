"""Signs of life: a gateway that is told nothing else is told the load, so that silence means trouble."""

import asyncio

from libs.contracts.liveness import SIGN_OF_LIFE_MS
from libs.worker.host import WorkerHost

BEAT_S = SIGN_OF_LIFE_MS / 1000 / 2
"""A frame may come at any moment between two beats: twice as often, the gap is at most a sign of life's."""


async def beat(host: WorkerHost) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(BEAT_S)
        host.gateways.beat()
