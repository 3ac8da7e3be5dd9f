"""Ending the process: one bounded order of events, on SIGTERM and for the admin verb alike."""

import asyncio
from dataclasses import dataclass

import structlog

from libs.worker.host import WorkerHost

log = structlog.get_logger()

ABORT_S = 2.0
"""Bound on waiting for aborted sequences to leave the engine."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of the sequences that ran when the drain began."""

    finished: int
    aborted: int


async def drain(host: WorkerHost, deadline_s: float) -> Drained:
    """Refuse new work, recall credits, let sequences finish and held KV be pulled, abort what is left at the deadline.

    Gateways learn of it first, so they reroute meanwhile. Returns after `deadline_s` plus ABORT_S at the latest.
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
