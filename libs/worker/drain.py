"""The drain of a worker: one bounded sequence of steps, for SIGTERM and the admin verb alike."""

import asyncio
from dataclasses import dataclass

import structlog

from libs.worker.host import WorkerHost

log = structlog.get_logger()

# Bound on waiting for aborted sequences to leave the engine.
ABORT_S = 2.0


@dataclass(frozen=True, slots=True)
class Drained:
    """The fate of the sequences that ran when the drain began."""

    finished: int
    aborted: int


async def drain(host: WorkerHost, deadline_s: float) -> Drained:
    """Refuse new work, recall credits, let sequences finish and held KV be pulled, then abort the rest at the
    deadline.

    Gateways are notified first, so that they reroute meanwhile. Returns after `deadline_s` plus ABORT_S at the
    latest.
    """
    running = host.running
    host.start_draining()
    try:
        async with asyncio.timeout(deadline_s):
            await host.wait_idle()
    except TimeoutError:
        log.warning("drain deadline reached", running=host.running)
    aborted = host.abort_all()
    try:
        async with asyncio.timeout(ABORT_S):
            await host.wait_empty()
    except TimeoutError:
        log.warning("the engine keeps aborted sequences", running=host.running)
    return Drained(finished=max(running - aborted, 0), aborted=aborted)
