"""Helpers that submit a prompt and read the state of a worker afterwards."""

from libs.testing.workers.hosts import LocalWorker

PROMPT = [(7 * i) % 256 for i in range(100)]
BLOCK = 16


def is_clean(worker: LocalWorker) -> bool:
    integrity = worker.host.integrity()
    return not (integrity.live_sequences or integrity.referenced_blocks or integrity.leased_handles)
