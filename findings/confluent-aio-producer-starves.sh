#!/usr/bin/env bash
# confluent-kafka's AIOProducer sends nothing while messages keep coming: each one restarts its `buffer_timeout` of 1 s.
# Met by: asyncio services that publish an event per request, such as usage or a job's state. Until 1,000 are gathered
# or a second passes without any, nothing leaves the process, whatever linger.ms says: at five requests a second that
# is 200 s, and a crash loses them all. Headers, such as a traceparent, are refused, which Producer takes.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q confluent-kafka==2.16.1
cat > "$T/run.py" <<'PY'
import asyncio, json, time

import confluent_kafka
from confluent_kafka.aio import AIOProducer

# The broker within librdkafka. Linger of 0 asks for each message to be sent at once.
CONFIG = {"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "linger.ms": 0, "log_level": 0}
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
COUNT, GAP_S = 80, 0.1


async def trickle(producer):
    """Return how many of COUNT messages were delivered as the last one came, and the longest gap between two."""
    futures, longest_s, last = [], 0.0, time.monotonic()
    for _ in range(COUNT):
        futures.append(await producer.produce("usage", b"{}"))
        longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
        await asyncio.sleep(GAP_S)
    delivered = sum(future.done() for future in futures)
    await producer.flush()
    await asyncio.gather(*futures)
    return delivered, longest_s


async def main():
    producer = AIOProducer(CONFIG)
    await (await producer.produce("usage", b"{}"))
    for _ in range(10):
        delivered, longest_s = await trickle(producer)
        if longest_s < 0.5:  # a busy machine may pause for so long that the timeout is over
            break
    try:
        await producer.produce("usage", b"{}", headers=TRACE)
        refused = None
    except NotImplementedError as error:
        refused = str(error).split(". ")[0]
    await producer.close()
    return delivered, refused


def in_order():
    """Return the same count of the synchronous Producer."""
    delivered = []
    producer = confluent_kafka.Producer(CONFIG)
    for _ in range(COUNT):
        producer.produce("usage", b"{}", on_delivery=lambda error, message: delivered.append(error))
        producer.poll(GAP_S)
    producer.poll(1)
    return len(delivered)


delivered, refused = asyncio.run(main())
seen = {"AIOProducer": delivered, "Producer": in_order()}
print("version:     confluent-kafka", confluent_kafka.__version__)
print(f"expectation: of {COUNT} messages, one each {GAP_S} s, those older than linger.ms (0), or at least than buffer_timeout")
print("             (1 s), are delivered")
print("behaviour:   the async producer has delivered none after 8 s, as each message restarts its timeout")
print("output:      delivered in time", json.dumps(seen), "headers:", refused)
assert seen["AIOProducer"] == 0 and seen["Producer"] > COUNT / 2, "the behaviour has changed"
assert refused and "Headers are not supported" in refused, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
