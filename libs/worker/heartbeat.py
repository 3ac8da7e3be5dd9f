"""Signs of life: a gateway that is told nothing else is told the load, so that silence means trouble."""

import asyncio
from contextlib import suppress

from libs.worker.host import WorkerHost


async def beat(host: WorkerHost) -> None:
    """Until cancelled: a sign of life to each gateway just when its last frame is too old."""
    gateways, now_s = host.gateways, asyncio.get_running_loop().time
    while True:
        due_s = gateways.beat(now_s())
        with suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await gateways.stirred.wait()
        gateways.stirred.clear()
