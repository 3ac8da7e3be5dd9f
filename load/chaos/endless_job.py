"""A batch job without end, for gateways in virtual time: where its shares and lines come from is made up, what becomes
of them is the gateway's own doing."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count

from google.protobuf.message import Message

from libs.bus.port import Record
from libs.bus.work import Handle, Produced
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Result, Share
from libs.contracts.topics import BATCH_SHARES, Topic
from load.chaos.cluster import EPOCH_NS

ENDPOINT = "/v1/completions"
SHARE_LINES = 256
LANES = 8
WINDOW_NS = 24 * 3600 * 1_000_000_000


class EndlessJob:
    """Both the work bus and the file store of a gateway, as far as its runner asks them. Answers are counted."""

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._numbers = count()
        self.answered = 0
        self.failed = 0

    async def send(self, topic: Topic, value: Message) -> None:
        """Nothing is kept."""

    async def committed(self, topic: Topic, group: str) -> list[int]:
        """Nothing was."""
        return []

    async def follow(
        self, topic: Topic, since: Sequence[int] = (), *, on_replayed: Callable[[], None] | None = None
    ) -> AsyncIterator[Record]:
        """Nothing ever comes."""
        await asyncio.Event().wait()
        yield Record(topic, "", Share(), 0, 0)

    async def work(self, topic: Topic, group: str, handle: Handle) -> None:
        """Lanes of shares; of other topics none."""
        async with asyncio.TaskGroup() as lanes:
            for number in range(LANES if topic is BATCH_SHARES else 0):
                lanes.create_task(handle(_Lane(self, number)))
            await asyncio.Event().wait()

    def share(self) -> Share:
        """Another one, in a file of its own."""
        number = next(self._numbers)
        return Share(
            share_id=f"share-{number}", job_id="batch_endless", number=number, input_file_id=f"file-{number}",
            endpoint=ENDPOINT, first_line=1, lines=SHARE_LINES, expires_unix_ns=EPOCH_NS + WINDOW_NS,
            first_place=number * SHARE_LINES,
        )  # fmt: skip

    def count(self, produced: Sequence[Produced]) -> None:
        """What a transaction holds."""
        for one in produced:
            if isinstance(one, tuple) and isinstance(one[1], Result):
                self.answered += one[1].ok
                self.failed += not one[1].ok

    async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The lines of a share, no two prompts alike."""
        for place in range(SHARE_LINES):
            prompt = f"{file_id} {place} ".ljust(self._prompt_tokens, "y")
            body = {"model": "sim", "prompt": prompt, "max_tokens": self._output_tokens, "ignore_eos": True}
            line = {"custom_id": f"{file_id}-{place}", "method": "POST", "url": ENDPOINT, "body": body}
            yield json.dumps(line).encode() + b"\n"


class _Lane:
    note = ""
    end = 0
    replayed = True

    def __init__(self, job: EndlessJob, partition: int) -> None:
        self._job = job
        self.partition = partition

    async def batches(self) -> AsyncIterator[list[Record]]:
        for offset in count():
            yield [Record(BATCH_SHARES, "", self._job.share(), self.partition, offset)]

    async def commit(self, produced: Sequence[Produced], *, next_offset: int, note: str = "") -> None:
        self._job.count(produced)
