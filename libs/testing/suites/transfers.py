"""KV transfers between workers as telemetry reports them."""

import asyncio
from collections import Counter
from collections.abc import Mapping

from libs.bus.kafka import KafkaBus
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, StepBatch
from libs.contracts.topics import STEPS
from libs.testing.suites.suite import Suite

WAIT_S = 30.0


async def kv_transfers(suite: Suite, wanted: Mapping[int, int]) -> list[KvTransfer]:
    """All transfers from the start until there are `wanted` (count by prompt tokens); a rerouted request has several.

    Leaves out transfers of other prompts. Raises TimeoutError.
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
