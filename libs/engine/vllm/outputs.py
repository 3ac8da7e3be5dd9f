"""Translation of vLLM's messages into the port's events: the results of a step, and the state after it."""

from collections.abc import Callable
from typing import Any

from libs.engine.port import Capabilities, EngineIdentity, EnginePhase
from libs.engine.reports import BlockEvents, EngineEvent, FinishReason, KvTransferReport, SequenceOutput, StepReport
from libs.engine.vllm.connectors import ConnectorSession
from libs.engine.vllm.scheduling.running_step import Running
from libs.engine.vllm.scheduling.step_report import EngineReport, Step, step_of
from libs.engine.vllm.sequences import LiveSequence, Sequences


class OutputReader:
    """A reader of EngineCore's outputs, which keeps the table of live sequences up to date."""

    def __init__(
        self,
        sequences: Sequences,
        capabilities: Capabilities,
        identity: EngineIdentity,
        handing: ConnectorSession,
        *,
        lease_ns: int,
        release: Callable[[str], None],
    ) -> None:
        """Read outputs for `sequences`. vLLM holds blocks that are left for `lease_ns`; `release` frees those of a
        name.
        """
        self._sequences = sequences
        self._capabilities = capabilities
        self._identity = identity
        self._handing = handing
        self._lease_ns = lease_ns
        self._release = release

    def event(self, outputs: Any, report: EngineReport | None) -> EngineEvent:
        """Return the event of one message, with the report that it carries."""
        found: list[SequenceOutput] = []
        transfers: tuple[KvTransferReport, ...] = ()
        if report is not None:  # before the outputs, whose ends report what was transferred
            pulling = (self._sequences.by_name(name) for name in report.pulling)
            found += [SequenceOutput(live.sequence_id, pulling=True) for live in pulling if live is not None]
            transfers = self._transfers(report)
        found += [output for each in outputs.outputs if (output := self._output(each, report)) is not None]
        if report is None:
            return EngineEvent(tuple(found))
        aborted = [live for name in report.aborted if (live := self._sequences.by_name(name)) is not None]
        found += [self._end(live, FinishReason.ABORTED) for live in aborted]
        for name in report.released:
            self._sequences.lease_over(name)
        return EngineEvent(
            tuple(found),
            step_report(report.step, report) if report.step is not None else None,
            tuple((start, end) for start, end in report.kv_waits),
            transfers,
            BlockEvents(tuple(report.stored), tuple(report.removed)),
        )

    def _output(self, output: Any, report: EngineReport | None) -> SequenceOutput | None:
        from libs.engine.vllm import wire  # noqa: PLC0415 - it imports vLLM, which takes seconds

        live = self._sequences.by_name(output.request_id)
        if live is None:
            return None
        if (stats := output.prefill_stats) is not None:
            live.cached_tokens, live.loaded_tokens = stats.num_local_cached_tokens, stats.num_external_cached_tokens
            if live.stored:
                live.kv_bytes = self._capabilities.kv_bytes(live.loaded_tokens)
        token_ids, logprobs = tuple(output.new_token_ids), wire.logprobs_of(output)
        if output.finish_reason is None:
            return live.tokens(token_ids, logprobs)
        finish = wire.FINISHED.get(output.finish_reason)
        if finish is None:
            lost = live.request.kv is not None
            detail = "kv_lost: the blocks did not come" if lost else f"vLLM ended it: {output.finish_reason}"
            return self._end(live, FinishReason.KV_LOST if lost else FinishReason.FAILED, detail=detail)
        if live.request.phase is not EnginePhase.PREFILL:
            return self._end(live, finish, token_ids=token_ids, logprobs=logprobs)
        parameters = self._handing.left(live.name, output.kv_transfer_params)
        if parameters is None:
            return self._end(live, FinishReason.FAILED, detail="vLLM's KV connector gave no parameters")
        if self._handing.connector.holds:
            self._sequences.lease(live)
            if live.aborting:  # the abort reached vLLM too late, and nobody will ever pull the blocks
                self._release(live.name)
        if live.aborting:
            return self._end(live, FinishReason.ABORTED)
        # The token that vLLM sampled is dropped: the decode side samples it.
        assert report is not None  # a step has ended; its message may be read much later
        opaque = wire.pack_handover(wire.Handover(parameters, report.now_ns + self._lease_ns))
        capabilities = self._capabilities
        handle = live.handle(self._identity, opaque, capabilities.kv_layout, capabilities.block_size_tokens)
        return self._end(live, FinishReason.PREFILLED, handle=handle)

    def _end(self, live: LiveSequence, finish: FinishReason, **how: Any) -> SequenceOutput:
        self._sequences.remove(live)
        return live.end(finish, **how)

    def _transfers(self, report: EngineReport) -> tuple[KvTransferReport, ...]:
        transfers = []
        for pulled in report.pulled:
            live = self._sequences.by_name(pulled.request_id)
            if live is None or live.request.kv is None:
                continue
            live.kv_bytes = self._capabilities.kv_bytes(pulled.tokens)
            transfers.append(
                KvTransferReport(
                    request_id=live.request.request_id,
                    from_worker_id=live.request.kv.worker_id,
                    blocks=-(-pulled.tokens // self._capabilities.block_size_tokens),
                    data_bytes=live.kv_bytes,
                    start_unix_ns=pulled.start_ns,
                    end_unix_ns=pulled.end_ns,
                    prompt_tokens=live.request.prompt_tokens,
                    prompt_tokens_computed=live.prompt_tokens_computed,
                )
            )
        return tuple(transfers)


def announcement(running: Running, report: EngineReport) -> StepReport:
    """Return the report of a step that still runs."""
    return step_report(step_of(running.work, running.start_unix_ns, 0), report)


def step_report(step: Step, report: EngineReport) -> StepReport:
    """Return the report of a step, with the depths from the engine's report."""
    return StepReport(
        start_unix_ns=step.start_ns,
        end_unix_ns=step.end_ns,
        prefill_tokens=step.prefill_tokens,
        prefill_sequences=step.prefill_sequences,
        prefill_context_tokens=step.prefill_context_tokens,
        decode_sequences=step.decode_sequences,
        decode_kv_tokens=step.decode_kv_tokens,
        waiting=report.waiting,
        waiting_prefill_tokens=report.waiting_prefill_tokens,
        prefill_squared_tokens=step.prefill_squared_tokens,
    )
