"""The scheduler's state between reports: events not yet reported and steps in flight. Pure, without vLLM."""

from collections import deque
from collections.abc import Iterable

from libs.engine.kv.blocks import KvWait
from libs.engine.vllm.scheduling.running_step import NOBODY, Board, Running
from libs.engine.vllm.scheduling.step_report import Pulled, Step, step_of
from libs.policy.step_time import StepWork, chunks_work


class PendingNews:
    """Events since the last report, as the next report carries them."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.pulling: list[str] = []
        self.pulled: list[Pulled] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.trial_ns: int | None = None


class PendingBlocks:
    """Prefilled requests whose blocks wait for a receiver. Each is reported as released once, when the wait ends."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._let_go: set[str] = set()
        """Requests whose blocks were freed before the connector was informed."""

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def prefilled(self, name: str, news: PendingNews, *, kept: bool) -> None:
        """Record that a prefilled request has ended. `kept` says whether vLLM holds its blocks, which depends on the
        connector.
        """
        if kept:
            self._held.add(name)
        else:
            news.released.append(name)

    def freed(self, name: str, news: PendingNews) -> None:
        """Record that the blocks of a request went back to the pool."""
        if name in self._held:
            self._held.discard(name)
            news.released.append(name)

    def let_go(self, name: str) -> None:
        """Record that its blocks are about to be freed without the connector's knowledge."""
        self._let_go.add(name)

    def still_there(self, sent: set[str]) -> set[str]:
        """Return the requests in `sent`, which the connector has finished, whose blocks are not free yet."""
        gone = sent & self._let_go
        self._let_go -= gone
        return sent - gone


class Steps:
    """Steps in the order of their decisions. A step begins when it is decided, but not before the last has ended."""

    def __init__(self, board: Board, kv_wait: KvWait) -> None:
        self.in_flight: deque[tuple[StepWork, int]] = deque()
        """The work of each step in flight, and the time of its decision."""
        self.ended_ns = 0
        self.ended = 0
        self._board = board
        self._kv_wait = kv_wait

    def decided(self, work: StepWork, now_ns: int) -> None:
        """Append a step that was just decided."""
        self.in_flight.append((work, now_ns))
        self._kv_wait.stepping(True, now_ns)
        if len(self.in_flight) == 1:
            self._show()

    @property
    def running_since_ns(self) -> int:
        """Start of the oldest step in flight; 0 if there is none."""
        return max(self.in_flight[0][1], self.ended_ns) if self.in_flight else 0

    def end(self, now_ns: int) -> Step:
        """End the oldest step in flight now, and return it."""
        start_ns = self.running_since_ns
        work, _ = self.in_flight.popleft()
        step = step_of(work, start_ns, now_ns)
        self.ended_ns = now_ns
        self.ended += 1
        self._kv_wait.stepping(bool(self.in_flight), now_ns)
        self._show()
        return step

    def _show(self) -> None:
        if not self.in_flight:
            self._board.write(NOBODY)
            return
        pending_ns = self._kv_wait.ended[0][0] if self._kv_wait.ended else 0
        self._board.write(Running(self.ended + 1, self.running_since_ns, pending_ns, self.in_flight[0][0]))


def scheduled_work(parts: Iterable[tuple[int, int, int]]) -> StepWork:
    """Return the work of a step whose requests each compute tokens [start, end) of `known`, prompt and output.

    A single last token costs as much as a decode and counts as one. This includes the last prompt token, which a
    request with transferred KV computes again to sample from it.
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
