"""vLLM's scheduler with a prompt budget and a report of each step, in the EngineCore process.

It is written against the versions of vLLM in `SUPPORTED`. The scheduler is no public interface of vLLM, so the engine
refuses to start with any other version. The section `overrides` contains all overridden methods and nothing else.

A step lasts from the scheduler's decision until its output is available. With async scheduling, the next step is
decided while one runs. A step therefore begins no earlier than the previous one has ended, and steps never overlap.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import KV_FETCH_COMPLETED_WAITING, KV_FETCH_IN_PROGRESS, SchedulerStats
from vllm.v1.request import Request, RequestStatus

from libs.engine.kv_blocks import KvWait
from libs.engine.vllm.guides import follow_generated, serve_guides
from libs.engine.vllm.handover import PullLeases
from libs.engine.vllm.kv_groups import (
    Rehasher,
    embedding_bytes,
    external_tokens,
    is_for_others,
    lacks_images,
    transfers,
    whole_context_group,
    write_kv_facts,
)
from libs.engine.vllm.pacing import PacedRequest, Queues, TrialStep, begins_ns, beyond_slots, plan_step
from libs.engine.vllm.plugin import BOARD_FILE, DUMMIES_FILE, ENCODES_FILE, FOLDER_VARIABLE, KV_FILE
from libs.engine.vllm.step_reports import (
    COMMAND_KEY,
    LEASE_KEY,
    PACE_KEY,
    REPORT_KEY,
    TRIAL_KEY,
    Board,
    Command,
    EngineReport,
    PendingBlocks,
    PendingNews,
    Pulled,
    Rehash,
    SpanRing,
    Steps,
    count_in,
    decode_command,
    encode,
    scheduled_work,
)
from libs.policy.step_time import StepWork
from libs.policy.worker.pace import Pace

SUPPORTED = ("0.32.", "0.33.")
# The interval between reports while the engine only polls for KV.
QUIET_NS = 20_000_000
# The name in vLLM's additional configuration. The value is part of the key of vLLM's compile cache, so it must not
# change with each start.
CHUNK_SETTING = "fulcrum_prefill_chunk"

ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _count_dummy_steps(path: Path) -> None:
    # EngineCore, in whose process this runs, runs dummy steps without its scheduler.
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it imports schedulers

    count_in(EngineCore, SpanRing(path))


class _Reporting(Scheduler):  # type: ignore[misc]
    """The common part of both schedulers below."""

    running: list[Request]
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        serve_guides(self.structured_output_manager)
        settings = self.vllm_config.additional_config
        self._pace = Pace(settings[CHUNK_SETTING])
        self._paced: dict[str, PacedRequest] = {}
        self._kv_wait = KvWait()
        folder = Path(os.environ[FOLDER_VARIABLE])
        write_kv_facts(folder / KV_FILE, self.vllm_config, self.kv_cache_config)
        self._steps = Steps(Board(folder / BOARD_FILE), self._kv_wait, SpanRing(folder / ENCODES_FILE))
        _count_dummy_steps(folder / DUMMIES_FILE)
        self._trial = TrialStep()
        self._fetching: dict[str, tuple[int, int]] = {}
        """(tokens, start) of requests that wait for their KV, by request id; (0, 0) until it is requested."""
        self._held = PendingBlocks()
        self._leases = PullLeases(_lease_s(self.vllm_config))
        self._stalled = False
        """True if the previous step computed nothing although requests were set aside."""
        self._long_prefill_tokens = self.scheduler_config.long_prefill_token_threshold
        """The upper bound of one prompt's tokens in a step, as the operator configured it; 0 for none."""
        self._taken = self._preemptions = self._recomputed = 0
        self._embedding_bytes = embedding_bytes(self.vllm_config)
        self._news = PendingNews()
        self._reported: tuple[int, ...] = ()
        self._reported_ns = 0
        self._rehash = Rehash(self.block_size)
        self.kv_event_publisher = Rehasher(self._rehash, whole_context_group(self.kv_cache_config.kv_cache_groups))

    # ------------------------------------------------------------------ overrides

    def add_request(self, request: Request) -> None:
        """Queue a request, or carry out the command that it contains."""
        extra = _extra(request)
        if (command := extra.get(COMMAND_KEY)) is not None:
            self._obey(decode_command(command))
        elif (prompts := extra.get(TRIAL_KEY)) is not None:
            if self._trial.add(request, prompts):
                for each in self._trial.requests:
                    super().add_request(each)
        else:
            self._taken += 1
            if request.use_structured_output:
                follow_generated(request, self.structured_output_manager)
            super().add_request(request)
            transferred = transfers(request)
            paced = PacedRequest(
                request, transferred=transferred, tokens_a_step=1 + self.num_spec_tokens, **extra[PACE_KEY]
            )
            self._paced[request.request_id] = paced
            self._pace.note_prompt(paced, time.time_ns())
            if transferred:
                self._fetching[request.request_id] = (0, 0)
                if (held_until_ns := extra.get(LEASE_KEY)) is not None:
                    self._leases.begin(request.request_id, held_until_ns, time.time_ns())
                self._note_awaiting(time.time_ns())

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Compose the next step: every decode, then prompts within the budget and running TPOT targets."""
        now_ns = time.time_ns()
        self._leases.turn(now_ns)
        measures = self._trial.due
        aside = self._measure(now_ns) if measures else self._limit(now_ns)
        with self._aside(aside | self._without_slot(aside)):
            output = super().schedule(throttle_prefills)
        if self._news.lost:
            self.finish_requests(self._news.lost, RequestStatus.FINISHED_ERROR)
        self._stalled = bool(aside) and not output.total_num_scheduled_tokens
        if output.total_num_scheduled_tokens:
            images = sum(map(len, output.scheduled_encoder_inputs.values()))
            self._steps.decided(self._work(output.num_scheduled_tokens), time.time_ns(), images)
        if measures and self._trial.requests and output.total_num_scheduled_tokens != self._trial.tokens:
            self._give_up_trial()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """End the oldest step in flight, and note its times and those of its requests."""
        self._fail_late_pulls(model_runner_output.kv_connector_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return super().update_from_output(scheduler_output, model_runner_output)
        now_ns = time.time_ns()
        step = self._news.step = self._steps.end(now_ns)
        if self._trial.is_of(scheduler_output.num_scheduled_tokens):
            self._news.trial_ns = step.end_ns - step.start_ns
            self._trial.over()
        paced = [self._paced.get(name) for name in scheduler_output.num_scheduled_tokens]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for each in paced:
            if each is not None:
                each.stepped(now_ns)
        return outputs

    def make_stats(self, *_args: Any, **_kwargs: Any) -> SchedulerStats | None:
        """Return the report in place of vLLM's statistics; None if there is nothing to report."""
        report = self._report(time.time_ns())
        return None if report is None else SchedulerStats(kv_connector_stats={REPORT_KEY: encode(report)})

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        """End requests. Report aborted ones, which vLLM itself does not report."""
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status is RequestStatus.FINISHED_ABORTED:
            self._news.aborted += [request.request_id for request in finished]
        return finished

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        result = super()._free_request(request, delay_free_blocks)
        if is_for_others(request):
            self._held.prefilled(request.request_id, self._news, kept=request.request_id in self.requests)
        if request.status in ANSWERED and request.pooling_params is None:
            paced = self._paced.get(request.request_id)
            self._pace.note_end(request.num_output_tokens, paced.kind if paced else "")
        self._paced.pop(request.request_id, None)
        self._fetched(request.request_id)
        return result

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._held.freed(request.request_id, self._news)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._preemptions += 1
        self._recomputed += request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)
        if lacks_images(request):
            self._news.lost.append(request.request_id)

    def _set_kv_fetch_stage(self, request: Request, stage: str | None) -> None:
        super()._set_kv_fetch_stage(request, stage)
        now_ns = time.time_ns()
        if stage == KV_FETCH_IN_PROGRESS:
            self._fetching[request.request_id] = (external_tokens(request), now_ns)
            self._news.pulling.append(request.request_id)
        elif stage == KV_FETCH_COMPLETED_WAITING:
            tokens, since_ns = self._fetching.get(request.request_id, (0, now_ns))
            self._news.pulled.append(Pulled(request.request_id, tokens, since_ns, now_ns))
            self._fetched(request.request_id)

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        # Exclude requests that were released before, because their blocks are free already.
        sent = kv_connector_output.finished_sending
        if sent:
            kv_connector_output.finished_sending = self._held.still_there(sent)
        super()._update_from_kv_xfer_finished(kv_connector_output)

    # ------------------------------------------------------------------ inner parts

    def _obey(self, command: Command) -> None:
        if command.prefill_budget is not None:
            self._pace.budget_tokens = command.prefill_budget
        if command.prefill_chunk is not None:
            self._pace.chunk_tokens = command.prefill_chunk
        if command.step_time is not None:
            self._pace.step_time = command.step_time
        for request_id in command.release:
            request = self.requests.get(request_id)
            if request is not None and request_id in self._held:
                self._held.let_go(request_id)
                self._free_blocks(request)
                self.finished_req_ids.add(request_id)  # so that a step, and with it a report, follows

    def _limit(self, now_ns: int) -> set[Request]:
        """Bound the next step and move decodes to the front. Return the requests that the step leaves out."""
        if any(request.is_prefill_chunk for request in self.running):
            self.running.sort(key=self._order)
        tokens_each, begin_ns = 1 + self.num_spec_tokens, self._begins_ns(now_ns)
        plan = plan_step(
            self._pace, self._queues(), tokens_each=tokens_each, block_size_tokens=self.block_size, now_ns=begin_ns
        )
        self._bound(plan.tokens, plan.each)
        return {each.request for each in plan.aside}

    def _begins_ns(self, now_ns: int) -> int:
        return begins_ns(self._pace.step_time, self._steps.in_flight, self._steps.ended_ns, now_ns)

    def _bound(self, tokens: int, each: int = 0) -> None:
        """Bound the next step's tokens, and the tokens of each request in it; 0 for no bound per request."""
        most_tokens = self.scheduler_config.max_num_batched_tokens
        if not self.scheduler_config.enable_chunked_prefill:
            # A mean is computed over whole prompts. A prompt longer than the bound would wait forever.
            self.max_num_scheduled_tokens = most_tokens
            return
        self.max_num_scheduled_tokens = min(tokens, most_tokens)
        bounds = [bound for bound in (each, self._long_prefill_tokens) if bound]
        self.scheduler_config.long_prefill_token_threshold = min(bounds, default=0)

    def _queues(self) -> Queues:
        running = [
            (request, self._paced[request.request_id]) for request in self.running if self._is_from_client(request)
        ]
        waiting = [request for request in self.waiting if self._is_from_client(request)]
        groups = len(self.kv_cache_config.kv_cache_groups) or 1
        return Queues(
            decodes=[each for request, each in running if not request.is_prefill_chunk and not each.ends_under_way],
            arrived=[self._paced[each.request_id] for each in self.kv_holding_waiting if self._has_come(each)],
            partly=[each for request, each in running if request.is_prefill_chunk and not self._comes_back(request)],
            prompts=[self._paced[r.request_id] for r in waiting if not self._comes_back(r) and not transfers(r)],
            pulls=sum(transfers(request) for request in waiting),
            lost=[each for request, each in running if request.is_prefill_chunk and self._comes_back(request)],
            preempted=[self._paced[request.request_id] for request in waiting if self._comes_back(request)],
            free_places=self.max_num_active_reqs - len(self.running),
            free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks() // groups,
            stalled=self._stalled,
        )

    def _comes_back(self, request: Request) -> bool:
        """Return whether the request has had KV before: it was preempted here, or another engine stored its KV."""
        return request.num_preemptions > 0 or self._paced[request.request_id].stored

    def _order(self, request: Request) -> tuple[bool, bool, int]:
        """Return the sort key that puts decodes first, then recomputation, then prompts."""
        back = self._is_from_client(request) and self._comes_back(request)
        return request.is_prefill_chunk, not back, request.priority

    def _is_from_client(self, request: Request) -> bool:
        """Return whether the request comes from a client and is no part of a measurement."""
        return request.request_id in self._paced

    def _has_come(self, request: Request) -> bool:
        waits = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return not waits or request.request_id in self.finished_recving_kv_req_ids

    def _measure(self, now_ns: int) -> set[Request]:
        """Reserve the next step for the measurement, and return all other requests.

        If there is no room for it, or if decodes cannot wait, abort the measurement and limit the step as usual.
        """
        trial, free = self._trial, self.kv_cache_manager.block_pool.get_num_free_blocks()
        blocks = sum(-(-request.num_tokens // self.block_size) for request in trial.requests)
        places = self.max_num_active_reqs - len(self.running)
        most_tokens = self.scheduler_config.max_num_batched_tokens
        has_time = self._pace.has_time_for_trial(trial.tokens, self._queues().decodes, self._begins_ns(now_ns))
        if not has_time or blocks > free or len(trial.requests) > places or trial.tokens > most_tokens:
            self._give_up_trial()
            return self._limit(now_ns)
        self._bound(trial.tokens)
        trial.begun()
        mine = set(trial.requests)
        return {each for each in (*self.running, *self.waiting, *self.kv_holding_waiting) if each not in mine}

    def _give_up_trial(self) -> None:
        """Abort a measurement for which there is no room or time."""
        self.finish_requests(self._trial.names, RequestStatus.FINISHED_ABORTED)
        self._news.trial_ns = 0
        self._trial.over()

    @contextlib.contextmanager
    def _aside(self, requests: set[Request]) -> Iterator[None]:
        """Hide these requests from the step that is decided in this context. Running ones keep their slots."""
        if not requests:
            yield
            return
        queues = [(queue, [each for each in queue if each in requests]) for queue in self._waiting_queues]
        running = [request for request in self.running if request in requests]
        places = self.max_num_active_reqs
        for queue, held in queues:
            queue.remove_requests(held)
        if running:
            self.running = [request for request in self.running if request not in requests]
            self.max_num_active_reqs = places - len(running)
        try:
            yield
        finally:
            self.max_num_active_reqs = places
            self.running += running
            for queue, held in queues:
                for request in held:
                    queue.add_request(request)

    def _without_slot(self, aside: set[Request]) -> set[Request]:
        """Return the waiting requests whose adapter gets no slot beside the adapters of all running requests.

        vLLM counts only the adapters of requests that it sees, and fails once too many run.
        """
        if self.lora_config is None or not any(_adapter(each) for each in self.running if each in aside):
            return set()
        waiting = [*self.kv_holding_waiting, *self.waiting]
        beyond = beyond_slots(map(_adapter, self.running), map(_adapter, waiting), self.lora_config.max_loras)
        return {each for each in waiting if _adapter(each) in beyond}

    @property
    def _waiting_queues(self) -> tuple[Any, Any]:
        return self.waiting, self.kv_holding_waiting

    def _work(self, scheduled: dict[str, int]) -> StepWork:
        """Return the work of a step whose tokens vLLM already counts as computed."""
        requests = ((self.requests[request_id], tokens) for request_id, tokens in scheduled.items())
        return scheduled_work(
            (request.num_computed_tokens - tokens, request.num_computed_tokens, request.num_tokens)
            for request, tokens in requests
        )

    def _fail_late_pulls(self, kv_connector_output: Any) -> None:
        """Mark pulls as failed that ended when the source may have reused the blocks."""
        for request_id in (kv_connector_output and kv_connector_output.finished_recving) or ():
            if not self._leases.ended(request_id, time.time_ns()):
                kv_connector_output.failed_recving.add(request_id)

    def _fetched(self, request_id: str) -> None:
        # This call only removes the request. The result for time 0 has no meaning.
        self._leases.ended(request_id, 0)
        if self._fetching.pop(request_id, None) is not None:
            self._note_awaiting(time.time_ns())

    def _note_awaiting(self, now_ns: int) -> None:
        self._kv_wait.awaiting(bool(self._fetching), now_ns)

    def _report(self, now_ns: int) -> EngineReport | None:
        prompts = [
            each for each in self.waiting if each.request_id not in self._fetching and self._is_from_client(each)
        ]
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
        news, waits = self._news, self._kv_wait.take_ended()
        changes = (news.step, waits, news.pulling, news.pulled, news.aborted, news.released, stored, removed, news.lost)
        quiet = depths == self._reported and now_ns - self._reported_ns < QUIET_NS
        if not any(changes) and news.trial_ns is None and quiet:
            return None
        self._news, self._reported, self._reported_ns = PendingNews(), depths, now_ns
        return EngineReport(
            now_ns,
            *depths,
            self._kv_wait.since_ns,
            self._steps.running_since_ns,
            self._steps.ended,
            news.step,
            list(waits),
            *changes[2:-1],
            news.trial_ns,
            news.lost,
            (self.encoder_cache_manager.cache_size - self.encoder_cache_manager.num_free_slots) * self._embedding_bytes,
        )


class StepScheduler(_Reporting):
    """A scheduler that decides a step once the previous one has ended."""


class AsyncStepScheduler(_Reporting, AsyncScheduler):  # type: ignore[misc]
    """A scheduler that decides a step while the previous one runs."""


def _extra(request: Request) -> dict[str, Any]:
    """Return the worker's own entries in a request, beside vLLM's parameters."""
    if request.pooling_params is not None:
        return request.pooling_params.extra_kwargs or {}
    return request.sampling_params.extra_args or {}


def _adapter(request: Request) -> int:
    """Return the number of a request's adapter; 0 for none."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


def _lease_s(config: Any) -> int:
    """Return NIXL's lease in seconds; 0 for other connectors, whose requests have no lease."""
    transfer = config.kv_transfer_config
    return int(transfer.get_from_extra_config("kv_lease_duration", 0)) if transfer is not None else 0
