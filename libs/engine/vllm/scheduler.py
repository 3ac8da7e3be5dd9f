"""vLLM's scheduler with a prompt budget, and with a report of each step. It runs in the EngineCore process.

Written against vLLM 0.32 (`SUPPORTED`): the scheduler is no public interface of vLLM's, so another version is refused
at the start rather than misread. What it overrides, and nothing else, is between the two rules below.

A step is what lies between the scheduler's decision and the moment its output is there. With async scheduling the next
step is decided while one runs, so a step begins no earlier than the one before has ended: steps never overlap.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import KV_FETCH_COMPLETED_WAITING, KV_FETCH_IN_PROGRESS, SchedulerStats
from vllm.v1.request import Request, RequestStatus

from libs.engine.kv_wait import KvWait
from libs.engine.vllm.rehash import Rehash
from libs.engine.vllm.report import (
    COMMAND_KEY,
    REPORT_KEY,
    Command,
    Pulled,
    Report,
    Step,
    decode_command,
    encode,
)
from libs.engine.vllm.work import scheduled_work
from libs.perfmodel import StepWork

SUPPORTED = "0.32."
QUIET_NS = 20_000_000
"""While nothing happens but the engine polls for KV, a report goes out so often."""


class _Books:
    """What has happened since the last report."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.pulling: list[str] = []
        self.pulled: list[Pulled] = []
        self.aborted: list[str] = []
        self.released: list[str] = []


class _Reporting(Scheduler):  # type: ignore[misc]
    """What both schedulers below share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config
        self._chunk: int = settings["fulcrum_prefill_chunk"]
        self._budget = self._chunk
        self._in_flight: deque[tuple[StepWork, int]] = deque()
        self._last_end_ns = 0
        self._kv_wait = KvWait()
        self._fetching: dict[str, tuple[int, int]] = {}
        """(tokens, since when) of requests whose KV is on its way; (0, 0) until it is asked for."""
        self._held: set[str] = set()
        """Prefilled requests whose blocks wait for a receiver."""
        self._let_go: set[str] = set()
        """Of them, those whose blocks were freed before the connector knew."""
        self._taken = self._preemptions = self._recomputed = 0
        self._books = _Books()
        self._told: tuple[int, ...] = ()
        self._told_ns = 0
        self._rehash = Rehash(self.block_size)
        self.kv_event_publisher = _Publisher(self._rehash)

    # ------------------------------------------------------------------ what vLLM calls

    def add_request(self, request: Request) -> None:
        """Queue a request, or obey a command that looks like one."""
        command = (request.sampling_params.extra_args or {}).get(COMMAND_KEY)
        if command is not None:
            self._obey(decode_command(command))
            return
        self._taken += 1
        super().add_request(request)
        if _transfers(request):
            self._fetching[request.request_id] = (0, 0)
            self._note_awaiting(time.time_ns())

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The next step: every decode, then prompts within the budget."""
        held = self._limit()
        try:
            output = super().schedule(throttle_prefills)
        finally:
            for request in held:
                self.waiting.add_request(request)
        now_ns = time.time_ns()
        if output.total_num_scheduled_tokens:
            self._in_flight.append((self._work(output.num_scheduled_tokens), now_ns))
            self._kv_wait.stepping(True, now_ns)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The step has ended."""
        if scheduler_output.total_num_scheduled_tokens:
            now_ns = time.time_ns()
            work, decided_ns = self._in_flight.popleft()
            self._books.step = _step(work, max(decided_ns, self._last_end_ns), now_ns)
            self._last_end_ns = now_ns
            self._kv_wait.stepping(bool(self._in_flight), now_ns)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *_args: Any, **_kwargs: Any) -> SchedulerStats | None:
        """The report in place of vLLM's statistics; None where there is nothing to tell."""
        report = self._report(time.time_ns())
        return None if report is None else SchedulerStats(kv_connector_stats={REPORT_KEY: encode(report)})

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        """End requests, and say so of aborted ones: vLLM itself gives no word of them."""
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status is RequestStatus.FINISHED_ABORTED:
            self._books.aborted += [request.request_id for request in finished]
        return finished

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        result = super()._free_request(request, delay_free_blocks)
        if result[0] is not None and request.request_id in self.requests:
            self._held.add(request.request_id)
        self._fetched(request.request_id)
        return result

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        if request.request_id in self._held:
            self._held.discard(request.request_id)
            self._books.released.append(request.request_id)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._preemptions += 1
        self._recomputed += request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)

    def _set_kv_fetch_stage(self, request: Request, stage: str | None) -> None:
        super()._set_kv_fetch_stage(request, stage)
        now_ns = time.time_ns()
        if stage == KV_FETCH_IN_PROGRESS:
            self._fetching[request.request_id] = (request.num_computed_tokens, now_ns)
            self._books.pulling.append(request.request_id)
        elif stage == KV_FETCH_COMPLETED_WAITING:
            tokens, since_ns = self._fetching.get(request.request_id, (0, now_ns))
            self._books.pulled.append(Pulled(request.request_id, tokens, since_ns, now_ns))
            self._fetched(request.request_id)

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        """Without the requests that were let go before: their blocks are long free."""
        sent = kv_connector_output.finished_sending
        if sent and self._let_go:
            kv_connector_output.finished_sending = sent - self._let_go
            self._let_go -= sent
        super()._update_from_kv_xfer_finished(kv_connector_output)

    # ------------------------------------------------------------------ our own

    def _obey(self, command: Command) -> None:
        if command.prefill_budget is not None:
            self._budget = command.prefill_budget
        if command.prefill_chunk is not None:
            self._chunk = command.prefill_chunk
        for request_id in command.release:
            request = self.requests.get(request_id)
            if request is not None and request_id in self._held:
                self._let_go.add(request_id)
                self._free_blocks(request)
                self.finished_req_ids.add(request_id)  # so that a step, and with it a report, follows

    def _limit(self) -> list[Request]:
        """Set the tokens of the next step, decodes first; the prompts that it may not even begin are taken aside."""
        if any(request.is_prefill_chunk for request in self.running):
            self.running.sort(key=lambda request: request.is_prefill_chunk)
        prompt_tokens = max(min(self._budget, self._chunk), 0)
        decodes = sum(not request.is_prefill_chunk for request in self.running)
        transfers = len(self._fetching) + len(self.kv_holding_waiting)
        again = any(request.num_preemptions for request in (*self.waiting, *self.running[decodes:]))
        allowed = decodes * (1 + self.num_spec_tokens) + transfers + max(prompt_tokens, self._chunk if again else 0)
        self.max_num_scheduled_tokens = min(allowed, self.scheduler_config.max_num_batched_tokens)
        if prompt_tokens:
            return []
        held = [request for request in self.waiting if not request.num_preemptions and not _transfers(request)]
        self.waiting.remove_requests(held)
        return held

    def _work(self, scheduled: dict[str, int]) -> StepWork:
        """Of a step whose tokens vLLM has counted as computed already."""
        requests = ((self.requests[request_id], tokens) for request_id, tokens in scheduled.items())
        return scheduled_work(
            (request.num_computed_tokens - tokens, request.num_computed_tokens, request.num_tokens)
            for request, tokens in requests
        )

    def _fetched(self, request_id: str) -> None:
        if self._fetching.pop(request_id, None) is not None:
            self._note_awaiting(time.time_ns())

    def _note_awaiting(self, now_ns: int) -> None:
        self._kv_wait.awaiting(bool(self._fetching), now_ns)

    def _report(self, now_ns: int) -> Report | None:
        prompts = [request for request in self.waiting if request.request_id not in self._fetching]
        partly = [request for request in self.running if request.is_prefill_chunk]
        depths = (
            self._taken,
            len(self.running),
            len(prompts),
            sum(request.num_tokens - request.num_computed_tokens for request in (*prompts, *partly)),
            sum(request.num_tokens**2 - request.num_computed_tokens**2 for request in (*prompts, *partly)),
            len(self._fetching),
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
            self._preemptions,
            self._recomputed,
        )
        stored, removed = self._rehash.take()
        books, waits = self._books, self._kv_wait.take_ended()
        news = (books.step, waits, books.pulling, books.pulled, books.aborted, books.released, stored, removed)
        if not any(news) and depths == self._told and now_ns - self._told_ns < QUIET_NS:
            return None
        self._books, self._told, self._told_ns = _Books(), depths, now_ns
        return Report(now_ns, *depths, self._kv_wait.since_ns, books.step, list(waits), *news[2:])


class _Publisher:
    """Takes vLLM's KV events in place of sending them."""

    def __init__(self, rehash: Rehash) -> None:
        self._rehash = rehash

    def publish(self, batch: Any) -> None:
        """Of one step."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                salt = str((event.extra_keys or [None])[0] and event.extra_keys[0][-1])
                self._rehash.stored(event.block_hashes, event.parent_block_hash, salt, event.token_ids)
            elif isinstance(event, BlockRemoved):
                self._rehash.removed(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._rehash.cleared()

    def get_publisher_config(self) -> None:
        """Nobody can subscribe."""

    def shutdown(self) -> None:
        """Nothing is open."""


class StepScheduler(_Reporting):
    """Where vLLM schedules a step once the one before has ended."""


class AsyncStepScheduler(_Reporting, AsyncScheduler):  # type: ignore[misc]
    """Where vLLM schedules a step while the one before runs."""


def _transfers(request: Request) -> bool:
    """Whether the request's KV is to come from another engine."""
    params = request.kv_transfer_params
    return bool(params and (params.get("do_remote_prefill") or params.get("_remote_blocks_processed")))


def _step(work: StepWork, start_ns: int, end_ns: int) -> Step:
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
