"""The brokers that this process cannot reach while others can, found by a request to each of them."""

import asyncio
from typing import Any, Final

from aiokafka.protocol.admin import ApiVersionRequest

from libs.bus.clients import CONNECTION_ERRORS, BrokerAway, Brokers, open_admin
from libs.policy.copies import UnreachableBroker, UnreachableBrokers

PROBE_S: Final = 2.0
"""The pause between two rounds of requests to every broker."""
PROBE_TIMEOUT_S: Final = 10.0
"""The longest time of one round, which a silent broker that accepts connections could otherwise extend."""
ALONE_PROBE_S: Final = 30.0
"""The pause while the cluster has one broker, which no other broker can report as up."""


class BrokerReach:
    """A watch over the brokers of a cluster, from this process."""

    def __init__(self, bootstrap: Brokers, cluster: str, client_id: str, node: str) -> None:
        """Create the watch; `node` names this host in the result."""
        self._bootstrap = bootstrap
        self._prefix = f"fulcrum.{cluster}."
        self._client_id = client_id
        self._node = node
        self.found: UnreachableBrokers | None = None
        """The result of the last round; None while no broker answers."""

    async def run(self) -> None:
        while True:
            try:
                async with open_admin(self._bootstrap, self._client_id) as admin:
                    while True:
                        async with asyncio.timeout(PROBE_TIMEOUT_S):
                            brokers = await self._probe(admin._client)
                        await asyncio.sleep(PROBE_S if brokers > 1 else ALONE_PROBE_S)
            except CONNECTION_ERRORS:
                self.found = None
                await asyncio.sleep(PROBE_S)

    async def _probe(self, client: Any) -> int:
        """Send a request to every broker listed by another one, and return the number of listed brokers. Raise one of
        CONNECTION_ERRORS.
        """
        if not await client.force_metadata_update():
            raise BrokerAway("no broker describes the cluster")
        brokers = sorted(client.cluster.brokers(), key=lambda broker: broker.nodeId)
        answered = await asyncio.gather(*(_answers(client, broker.nodeId) for broker in brokers))
        silent = tuple(
            UnreachableBroker(broker.nodeId, f"{broker.host}:{broker.port}", self._led(client, broker.nodeId))
            for broker, answers in zip(brokers, answered, strict=True)
            if not answers
        )
        self.found = UnreachableBrokers(self._node, silent) if len(silent) < len(brokers) else None
        return len(brokers)

    def _led(self, client: Any, node: int) -> int:
        """Return the number of partitions of this suite's topics that the broker leads."""
        led = client.cluster.partitions_for_broker(node) or ()
        return sum(partition.topic.startswith(self._prefix) for partition in led)


async def _answers(client: Any, node: int) -> bool:
    try:
        await client.send(node, ApiVersionRequest())
    except CONNECTION_ERRORS:
        return False
    return True
