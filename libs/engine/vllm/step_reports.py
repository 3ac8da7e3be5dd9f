"""Messages between the worker and the scheduler in the EngineCore process: reports and commands. Plain data, no vLLM.

A report is part of vLLM's own message for a step, so it is in order with the tokens of that step. A command is a
request that is never scheduled, in order with the requests before and after it. The running step and dummy steps are in
memory that both processes map. vLLM reports a step only after it has ended, and dummy steps never.
"""

import functools
import mmap
import struct
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from libs.contracts.hashing import ImageSpan, block_hashes
from libs.engine.kv_blocks import KvWait
from libs.policy.step_time import StepTimeModel, StepWork, chunks_work

# The key in a request's extra arguments for the number of the last prompt tokens that were generated.
GENERATED_KEY = "fulcrum_generated"
# The key of the report in vLLM's statistics.
REPORT_KEY = "fulcrum"
# The key of a command in a request's extra arguments.
COMMAND_KEY = "fulcrum"
# The key of the end of a pulled prompt's lease in a request's extra arguments, in Unix nanoseconds.
LEASE_KEY = "fulcrum_lease"
# The key of the properties that the scheduler needs beside vLLM's own parameters.
PACE_KEY = "fulcrum_pace"
# The key in the requests of a measurement. Its value is the number of these requests.
TRIAL_KEY = "fulcrum_trial"


class Step(msgspec.Struct, array_like=True, frozen=True):
    """A step with a model call, in Unix nanoseconds. The fields are those of `StepReport` in libs/engine/reports.py."""

    start_ns: int
    end_ns: int
    prefill_tokens: int
    prefill_sequences: int
    prefill_context_tokens: int
    prefill_squared_tokens: int
    decode_sequences: int
    decode_kv_tokens: int
    encoded_images: int = 0
    encode_ns: int = 0
    """The part of the step in which the images were encoded, in nanoseconds."""


def step_of(work: StepWork, start_ns: int, end_ns: int) -> Step:
    return Step(
        start_ns,
        end_ns,
        work.prefill_tokens,
        work.prefill_sequences,
        work.prefill_context_tokens,
        work.prefill_squared_tokens,
        work.decode_sequences,
        work.decode_kv_tokens,
    )


class Pulled(msgspec.Struct, array_like=True, frozen=True):
    """The KV of one request that came from another engine."""

    request_id: str
    tokens: int
    start_ns: int
    end_ns: int


class EngineReport(msgspec.Struct, array_like=True, frozen=True):
    """The state of the engine at the end of one step, and the events since the previous report."""

    now_ns: int
    taken: int
    """The number of requests that have reached the scheduler. The depths below cover only these."""
    running: int
    waiting: int
    waiting_prefill_tokens: int
    waiting_prefill_squares: int
    awaiting_kv: int
    free_blocks: int
    preemptions: int
    recomputed_tokens: int
    kv_wait_since_ns: int
    running_since_ns: int = 0
    """The start of a running step; 0 if there is none. It is nonzero only if steps are decided while others run."""
    steps: int = 0
    """The number of ended steps with a model call."""
    step: Step | None = None
    kv_waits: list[tuple[int, int]] = msgspec.field(default_factory=list)
    pulling: list[str] = msgspec.field(default_factory=list)
    pulled: list[Pulled] = msgspec.field(default_factory=list)
    aborted: list[str] = msgspec.field(default_factory=list)
    released: list[str] = msgspec.field(default_factory=list)
    """The prefilled requests whose blocks are no longer held because they were pulled or released, or because their
    lease ended.
    """
    stored: list[bytes] = msgspec.field(default_factory=list)
    """The hashes (libs/contracts/hashing.py) of blocks that became reusable."""
    removed: list[bytes] = msgspec.field(default_factory=list)
    trial_ns: int | None = None
    """The duration of the measurement's step; 0 if there was no room for it, None without a measurement."""
    lost: list[str] = msgspec.field(default_factory=list)
    """The requests that ended by preemption, because only another engine has the files of their images."""
    image_cache_bytes: int = 0
    """The bytes of cached image embeddings."""


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """A command of the worker to the scheduler. A field that is None leaves its value unchanged."""

    prefill_budget: int | None = None
    prefill_chunk: int | None = None
    step_time: StepTimeModel | None = None
    release: list[str] = msgspec.field(default_factory=list)


def encode(value: EngineReport | Command) -> bytes:
    """Encode a message as msgpack, for `decode_report` or `decode_command`."""
    return msgspec.msgpack.encode(value)


def decode_report(data: bytes) -> EngineReport:
    return msgspec.msgpack.decode(data, type=EngineReport)


def decode_command(data: bytes) -> Command:
    return msgspec.msgpack.decode(data, type=Command)


# The number, the start, the pending KV wait, and six figures of the work. A version precedes and follows them.
BODY: Final = struct.Struct("<9q")
VERSION: Final = struct.Struct("<q")
READ_TRIES: Final = 3


class Running(msgspec.Struct, frozen=True):
    """The running step as published on the board."""

    number: int
    """The number of steps that have started, including this one; 0 if none runs."""
    start_unix_ns: int
    pending_wait_ns: int
    """The start of the first ended KV wait that no report contains yet; 0 if there is none."""
    work: StepWork


NOBODY: Final = Running(0, 0, 0, StepWork())


class Board:
    """The running step in mapped memory, for one writer and one polling reader.

    The reader retries if the writer was in the middle of writing.
    """

    def __init__(self, path: Path) -> None:
        """Open the board at `path`. If there is none, create one filled with zeros."""
        with path.open("a+b") as file:
            file.truncate(BODY.size + 2 * VERSION.size)
            self._map = mmap.mmap(file.fileno(), BODY.size + 2 * VERSION.size)
        self._version = 0

    def write(self, running: Running) -> None:
        """Publish the step that runs from now on."""
        self._version += 1
        work = running.work
        figures = (
            work.prefill_tokens, work.prefill_sequences, work.prefill_context_tokens, work.prefill_squared_tokens,
            work.decode_sequences, work.decode_kv_tokens,
        )  # fmt: skip
        version = VERSION.pack(self._version)
        self._map[:8] = version
        self._map[8:-8] = BODY.pack(running.number, running.start_unix_ns, running.pending_wait_ns, *figures)
        self._map[-8:] = version

    def read(self) -> Running | None:
        """Return the running step; None if the writer is writing."""
        for _ in range(READ_TRIES):
            after, body, before = self._map[-8:], self._map[8:-8], self._map[:8]  # in reverse order of writing
            if before == after:
                number, start_ns, wait_ns, tokens, sequences, context, squared, decodes, kv_tokens = BODY.unpack(body)
                work = StepWork(tokens, sequences, context, decodes, kv_tokens, squared)
                return Running(number, start_ns, wait_ns, work)
        return None

    def close(self) -> None:
        """Unmap the board, which must not be used afterwards. Idempotent."""
        self._map.close()


# The number of spans in the ring. A span that is not read in time is only counted.
RING: Final = 4_096
NUMBER_BYTES: Final = 8
Span = tuple[int, int]
"""(start, end) in Unix nanoseconds."""
NOWHEN: Final[Span] = (0, 0)


class SpanRing:
    """A ring of spans of time in mapped memory. Its first number is the count of spans, which is written last.

    A span is the time of a call inside vLLM that no message of vLLM mentions:

    - Dummy steps. The ranks of a data-parallel group run their steps in lockstep. A rank without work runs the model on
      made-up tokens (`execute_dummy_batch`) while another rank computes.
    - The encoding of images, which a step does before it computes tokens.
    """

    def __init__(self, path: Path) -> None:
        """Open the ring at `path`. If there is none, create one filled with zeros."""
        size = (1 + 2 * RING) * NUMBER_BYTES
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._map).cast("q")  # a number is written and read atomically
        self._read = 0

    def ended(self, start_ns: int, end_ns: int) -> None:
        count = self._numbers[0]
        at = _place(count)
        self._numbers[at], self._numbers[at + 1] = start_ns, end_ns
        self._numbers[0] = count + 1

    def take(self) -> tuple[Span, ...]:
        """Return the spans that ended since the last call, with `NOWHEN` for each one that was overwritten unread."""
        first, count = self._read, self._numbers[0]
        found = [self._span(number) for number in range(max(first, count - RING), count)]
        oldest = self._numbers[0] - RING + 1  # the oldest that the writer has not begun to overwrite
        known = found[max(oldest - (count - len(found)), 0) :]
        self._read = count
        return (*[NOWHEN] * (count - first - len(known)), *known)

    def close(self) -> None:
        """Unmap the ring, which must not be used afterwards. Idempotent."""
        self._numbers.release()
        self._map.close()

    def _span(self, number: int) -> Span:
        at = _place(number)
        return self._numbers[at], self._numbers[at + 1]


def _place(number: int) -> int:
    return 1 + 2 * (number % RING)


def count_in(engine_core: Any, steps: SpanRing) -> None:
    """Patch vLLM's EngineCore class to record each dummy step in `steps`. Call it once per process."""
    run = engine_core.execute_dummy_batch

    @functools.wraps(run)
    def counted(self: Any) -> None:
        start_ns = time.time_ns()
        run(self)
        steps.ended(start_ns, time.time_ns())

    engine_core.execute_dummy_batch = counted


class PendingNews:
    """The events since the last report, which the next report contains."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.pulling: list[str] = []
        self.pulled: list[Pulled] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.lost: list[str] = []
        self.trial_ns: int | None = None


class PendingBlocks:
    """The prefilled requests whose blocks are held for a receiver. Each is reported as released once."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._let_go: set[str] = set()
        """The requests whose blocks were freed before the connector reported them as sent."""

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def prefilled(self, name: str, news: PendingNews, *, kept: bool) -> None:
        """Record the end of a prefilled request. `kept` is true if the connector makes vLLM hold its blocks."""
        if kept:
            self._held.add(name)
        else:
            news.released.append(name)

    def freed(self, name: str, news: PendingNews) -> None:
        """Record that a request's blocks went back to the pool."""
        if name in self._held:
            self._held.discard(name)
            news.released.append(name)

    def let_go(self, name: str) -> None:
        """Record that a request's blocks are about to be freed, of which the connector does not learn."""
        self._let_go.add(name)

    def still_there(self, sent: set[str]) -> set[str]:
        """Return the requests in `sent`, which the connector has finished, whose blocks are not free yet."""
        gone = sent & self._let_go
        self._let_go -= gone
        return sent - gone


class Steps:
    """The steps in the order of their decisions.

    A step starts when it is decided, but not before the previous one has ended.
    """

    def __init__(self, board: Board, kv_wait: KvWait, encodes: SpanRing) -> None:
        self.in_flight: deque[tuple[StepWork, int]] = deque()
        """The work of each step in flight, with the time of its decision."""
        self._images: deque[int] = deque()  # the number of images that each step in flight encodes
        self.ended_ns = 0
        self.ended = 0
        self._board = board
        self._kv_wait = kv_wait
        self._encodes = encodes

    def decided(self, work: StepWork, now_ns: int, images: int = 0) -> None:
        self.in_flight.append((work, now_ns))
        self._images.append(images)
        self._kv_wait.stepping(True, now_ns)
        if len(self.in_flight) == 1:
            self._show()

    @property
    def running_since_ns(self) -> int:
        """The start of the oldest step in flight; 0 if there is none."""
        return max(self.in_flight[0][1], self.ended_ns) if self.in_flight else 0

    def end(self, now_ns: int) -> Step:
        """End the oldest step in flight now, and return it."""
        start_ns = self.running_since_ns
        work, _ = self.in_flight.popleft()
        images = self._images.popleft()
        step = step_of(work, start_ns, now_ns)
        if images:
            encode_ns = sum(end - start for start, end in self._encodes.take())
            step = msgspec.structs.replace(step, encoded_images=images, encode_ns=min(encode_ns, now_ns - start_ns))
        self.ended_ns = now_ns
        self.ended += 1
        self._kv_wait.stepping(bool(self.in_flight), now_ns)
        self._show()
        return step

    def _show(self) -> None:
        # A step that encodes images is reported as two steps, so it must not be announced as one.
        if not self.in_flight or self._images[0]:
            self._board.write(NOBODY)
            return
        pending_ns = self._kv_wait.ended[0][0] if self._kv_wait.ended else 0
        self._board.write(Running(self.ended + 1, self.running_since_ns, pending_ns, self.in_flight[0][0]))


def scheduled_work(parts: Iterable[tuple[int, int, int]]) -> StepWork:
    """Return the work of a step whose requests compute tokens [start, end) of `known` tokens each.

    A single last token costs as much as a decode and counts as one. This includes the last prompt token of a
    transferred prompt, which is computed again to sample from it.
    """
    prompts: list[tuple[int, int]] = []
    decodes = kv_tokens = 0
    for start, end, known in parts:
        if start and start >= known - 1:
            decodes += 1
            kv_tokens += end
        else:
            prompts.append((start, end))
    return chunks_work(prompts, StepWork(decode_sequences=decodes, decode_kv_tokens=kv_tokens))


BlockImage = tuple[str, int]
"""The hash in hex of an image with tokens in a block, and the position of its first token relative to the block."""


class Rehash:
    """A map from vLLM's hashes of blocks to Fulcrum's, as large as the set of reusable blocks in the engine.

    Fulcrum's hashes are chained from a root that the request passes as its cache salt. The event that stores a block
    names its parent, so each hash follows from the parent's.

    If two equal prompts are computed at once, two blocks have the same hash. The hash is removed once both blocks are
    gone.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._ours: dict[Hashable, tuple[bytes, int]] = {}
        """Fulcrum's hash and the position of the block's end, by vLLM's hash."""
        self._copies: Counter[Hashable] = Counter()
        """The number of further blocks with the same hash, by vLLM's hash."""
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def stored(
        self,
        theirs: Sequence[Hashable],
        parent: Hashable,
        salt: str,
        token_ids: Sequence[int],
        images: Sequence[Sequence[BlockImage]] = (),
    ) -> None:
        """Record stored blocks that follow `parent`; None starts a chain. `salt` is the root in hex.

        `images` lists the images of each block.
        """
        found = self._ours.get(parent) if parent is not None else _root(salt)
        if found is None:  # a chain that no other sequence can share
            return
        (root, first), block_tokens = found, self._block_size_tokens
        spans = _spans(images, first, block_tokens)
        hashes = block_hashes(root, token_ids, block_tokens, spans, first=first)
        for number, (their, our) in enumerate(zip(theirs, hashes, strict=False), 1):
            if their in self._ours:
                self._copies[their] += 1
                continue
            self._ours[their] = our, first + number * block_tokens
            self._removed.pop(our, None)
            self._stored[our] = None

    def removed(self, theirs: Sequence[Hashable]) -> None:
        """Record that blocks are no longer reusable."""
        for their in theirs:
            if self._copies[their] > 0:
                self._copies[their] -= 1
                continue
            del self._copies[their]
            our, _ = self._ours.pop(their, (None, 0))
            if our is not None and self._stored.pop(our, b"") == b"":
                self._removed[our] = None

    def cleared(self) -> None:
        self._copies.clear()
        self.removed(list(self._ours))

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes (stored, removed) since the last call."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return stored, removed


def _root(salt: str) -> tuple[bytes, int] | None:
    try:
        return (bytes.fromhex(salt), 0) if salt else None
    except ValueError:
        return None


def _spans(images: Sequence[Sequence[BlockImage]], first: int, block_tokens: int) -> list[ImageSpan]:
    """Return the spans of images in consecutive blocks, the first of which begins at token `first`.

    An image that reaches beyond these blocks ends with them.
    """
    ends: dict[tuple[str, int], int] = {}
    for index, found in enumerate(images):
        start = first + index * block_tokens
        for identifier, offset in found:
            ends[identifier, start + offset] = start + block_tokens
    return [ImageSpan(at, end - at, bytes.fromhex(identifier)) for (identifier, at), end in ends.items()]
