"""What the scheduler keeps for its next report: what has happened, which steps are under way. Pure, without vLLM."""

from collections import deque
from collections.abc import Iterable

from libs.engine.kv.wait import KvWait
from libs.engine.vllm.scheduling.running_step import NOBODY, Board, Running
from libs.engine.vllm.scheduling.step_report import Pulled, Step, step_of
from libs.policy.step_time import StepWork, chunks_work


class PendingNews:
    """What has happened since the last report."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.pulling: list[str] = []
        self.pulled: list[Pulled] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.trial_ns: int | None = None


class PendingBlocks:
    """Prefilled requests whose blocks wait for a receiver; each is reported as released once, when the wait ends."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._let_go: set[str] = set()
        """Of them, those whose blocks were freed before the connector knew."""

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def prefilled(self, name: str, news: PendingNews, *, kept: bool) -> None:
        """One has ended, and vLLM has kept its blocks or not: connectors need not say which."""
        if kept:
            self._held.add(name)
        else:
            news.released.append(name)

    def freed(self, name: str, news: PendingNews) -> None:
        """The blocks of a request went back to the pool."""
        if name in self._held:
            self._held.discard(name)
            news.released.append(name)

    def let_go(self, name: str) -> None:
        """Its blocks are about to be freed, and the connector does not know."""
        self._let_go.add(name)

    def still_there(self, sent: set[str]) -> set[str]:
        """Requests that the connector has done with, and whose blocks are not free yet."""
        gone = sent & self._let_go
        self._let_go -= gone
        return sent - gone


class Steps:
    """Steps in the order of their decisions. One begins when it is decided, but not before the last has ended."""

    def __init__(self, board: Board, kv_wait: KvWait) -> None:
        self.in_flight: deque[tuple[StepWork, int]] = deque()
        """What each computes, and when it was decided."""
        self.ended_ns = 0
        self.ended = 0
        """How many have ended."""
        self._board = board
        self._kv_wait = kv_wait

    def decided(self, work: StepWork, now_ns: int) -> None:
        """A step is on its way."""
        self.in_flight.append((work, now_ns))
        self._kv_wait.stepping(True, now_ns)
        if len(self.in_flight) == 1:
            self._show()

    @property
    def running_since_ns(self) -> int:
        """Begin of the oldest step under way; 0: there is none."""
        return max(self.in_flight[0][1], self.ended_ns) if self.in_flight else 0

    def end(self, now_ns: int) -> Step:
        """The oldest one has ended now."""
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
    """Work of requests that compute their tokens [start, end) of `known` ones, prompt and output, in one step.

    A single last token costs what a decode costs and counts as one: also the last prompt token, which a request whose
    KV came from elsewhere computes again to sample from it.
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
