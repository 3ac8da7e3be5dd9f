"""What telemetry has told of KV that went from worker to worker."""

import asyncio
from collections import Counter
from collections.abc import Mapping

from libs.bus.kafka import KafkaBus
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, StepBatch
from libs.contracts.topics import STEPS
from libs.testing.suite import Suite

WAIT_S = 30.0


async def kv_transfers(suite: Suite, wanted: Mapping[int, int]) -> list[KvTransfer]:
    """All from the start until there are so many, by prompt tokens; a request that went elsewhere has more than one.

    Others are left out. Raises TimeoutError.
    """
    bus = KafkaBus(suite.ready["kafka"], "local", "test")
    await bus.start()
    found: list[KvTransfer] = []
    try:
        async with asyncio.timeout(WAIT_S):
            async for record in bus.subscribe([STEPS], from_start=True):
                assert isinstance(record.value, StepBatch)
                found += (transfer for transfer in record.value.kv_transfers if transfer.prompt_tokens in wanted)
                if Counter(transfer.prompt_tokens for transfer in found) >= Counter(wanted):
                    break
    finally:
        await bus.close()
    return found
