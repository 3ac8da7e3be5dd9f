"""Signs of life: a gateway that is told nothing else is told the load, so that silence means trouble."""

import asyncio

from libs.contracts.liveness import SIGN_OF_LIFE_MS
from libs.worker.host import WorkerHost

BEAT_S = SIGN_OF_LIFE_MS / 1000


async def beat(host: WorkerHost) -> None:
    """Until cancelled: a sign of life to each gateway just when its last frame is so old."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = host.gateways.beat(loop.time(), BEAT_S)
        await asyncio.sleep(due_s - loop.time())
