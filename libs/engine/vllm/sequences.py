"""The live sequences of a vLLM engine, the leases of finished ones, and the conversion of vLLM's messages to events."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest
from libs.engine.reports import (
    BlockEvents,
    EngineEvent,
    FinishReason,
    KvTransferReport,
    Logprob,
    SequenceOutput,
    StepReport,
)
from libs.engine.sequence import IMAGES_ELSEWHERE
from libs.engine.vllm.connectors import ConnectorSession
from libs.engine.vllm.step_reports import EngineReport, Running, Step, step_of
from libs.policy.step_time import StepWork


@dataclass(slots=True)
class LiveSequence:
    """The state of one sequence, from `submit` to its last output."""

    request: EngineRequest
    name: str
    """The request id in vLLM. Unlike `sequence_id`, it is never reused in this engine."""
    cached_tokens: int = 0
    loaded_tokens: int = 0
    """The number of tokens whose KV the connector loaded, from a store or another engine."""
    stored: bool = False
    """True if another engine has written the KV to a store."""
    kv_bytes: int = 0
    aborting: bool = False
    computed: bool = False
    """True once the prompt is computed."""
    unsent: bool = False
    """True while the images are read. EngineCore has not received the sequence yet."""

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def prompt_tokens_computed(self) -> int:
        """The number of prompt tokens computed here.

        A sequence whose KV was transferred computes only the last token, from which it samples the first new one. A
        sequence whose KV is in a store computes the tokens that the store lacks.
        """
        if self.request.kv is not None and not self.stored:
            return int(len(self.request.token_ids) == self.request.prompt_tokens)
        return max(self.request.prompt_tokens - self.cached_tokens - self.loaded_tokens, 0)

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprob, ...]) -> SequenceOutput:
        """Return the output of a step that does not end the sequence."""
        return SequenceOutput(self.sequence_id, token_ids, logprobs)

    def end(
        self,
        finish: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[Logprob, ...] = (),
        *,
        handle: KvHandle | None = None,
        detail: str = "",
        pooled: bytes = b"",
    ) -> SequenceOutput:
        """Return the final output of the sequence, with its totals."""
        return SequenceOutput(
            self.sequence_id,
            token_ids,
            logprobs,
            finish=finish,
            handle=handle,
            detail=detail,
            cached_tokens=min(self.cached_tokens, self.request.prompt_tokens),
            computed_prompt_tokens=self.prompt_tokens_computed,
            kv_bytes_received=self.kv_bytes,
            pooled=pooled,
        )

    def handle(self, identity: EngineIdentity, opaque: bytes, kv_layout: str, block_size_tokens: int) -> KvHandle:
        tokens = len(self.request.token_ids)
        blocks = -(-tokens // block_size_tokens)
        return KvHandle(identity.worker_id, identity.incarnation, identity.address, opaque, tokens, blocks, kv_layout)


class Sequences:
    """The live sequences by id (for the port) and name (for vLLM), and the leases of prefilled sequences."""

    def __init__(self) -> None:
        self._by_id: dict[int, LiveSequence] = {}
        self._by_name: dict[str, LiveSequence] = {}
        self._leases: dict[str, int] = {}
        """The ids of sequences whose blocks are held for a receiver, by name."""
        self._names = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def leases(self) -> int:
        """The number of sequences whose blocks are held for a receiver."""
        return len(self._leases)

    def new_name(self, request: EngineRequest) -> str:
        """Return an unused name for a sequence to be added."""
        self._names += 1
        return f"{self._names}-{request.request_id}"

    def add(self, request: EngineRequest, name: str, *, stored: bool = False) -> LiveSequence:
        """Add a sequence under a name from `new_name`."""
        live = LiveSequence(request, name, stored=stored)
        self._by_id[request.sequence_id] = live
        self._by_name[live.name] = live
        return live

    def by_id(self, sequence_id: int) -> LiveSequence | None:
        return self._by_id.get(sequence_id)

    def by_name(self, name: str) -> LiveSequence | None:
        return self._by_name.get(name)

    def remove(self, live: LiveSequence) -> None:
        """Remove a sequence after its last output."""
        del self._by_id[live.sequence_id]
        del self._by_name[live.name]

    def all(self) -> list[LiveSequence]:
        """Return all live sequences in order of arrival."""
        return list(self._by_id.values())

    def lease(self, live: LiveSequence) -> None:
        """Record that the sequence's blocks are held for a receiver."""
        self._leases[live.name] = live.sequence_id

    def leased_by(self, sequence_id: int) -> list[str]:
        """Return the names of sequences with this id whose blocks are held."""
        return [name for name, owner in self._leases.items() if owner == sequence_id]

    def leases_held(self) -> list[str]:
        """Return all names whose blocks are held."""
        return list(self._leases)

    def leased(self, name: str) -> bool:
        """Return whether the blocks of `name` are held."""
        return name in self._leases

    def lease_over(self, name: str) -> None:
        """Record that the blocks of `name` are no longer held."""
        self._leases.pop(name, None)


@dataclass(slots=True)
class ImageTotals:
    """The totals of images since the start, as in EngineLoad."""

    used: int = 0
    encoded: int = 0
    encode_ns: int = 0

    def waiting_ns(self, sequences: Iterable[LiveSequence]) -> int:
        """Return the predicted time to encode the images of uncomputed prompts.

        Only EngineCore has the cache of embeddings, so the past share of cached images is assumed.
        """
        if not self.used:
            return 0
        images = (each for live in sequences if not live.computed for each in live.request.images)
        return self.encode_ns * len({each.span.digest for each in images if each.data}) // self.used


class OutputReader:
    """A reader of EngineCore's outputs that updates the table of live sequences."""

    def __init__(
        self,
        sequences: Sequences,
        capabilities: Capabilities,
        identity: EngineIdentity,
        handing: ConnectorSession,
        *,
        lease_ns: int,
        release: Callable[[str], None],
        images: ImageTotals,
    ) -> None:
        """Create a reader that updates `sequences` and the totals in `images`.

        `lease_ns` is the time for which vLLM holds blocks for a receiver. `release` frees the blocks of a name.
        """
        self._sequences = sequences
        self._capabilities = capabilities
        self._identity = identity
        self._handing = handing
        self._lease_ns = lease_ns
        self._release = release
        self._images = images

    def encoding(self, report: EngineReport | None) -> EngineEvent:
        """Return the encoding of images as a separate step, which precedes the rest of vLLM's step."""
        step = report.step if report is not None else None
        if step is None or not step.encode_ns:
            return EngineEvent()
        assert report is not None
        self._images.encoded += step.encoded_images
        self._images.encode_ns += step.encode_ns
        encoded = step_report(step_of(StepWork(), step.start_ns, step.start_ns + step.encode_ns), report)
        return EngineEvent(step=replace(encoded, encoded_images=step.encoded_images))

    def event(self, outputs: Any, report: EngineReport | None) -> EngineEvent:
        found: list[SequenceOutput] = []
        transfers: tuple[KvTransferReport, ...] = ()
        if report is not None:  # first, because outputs report the transferred tokens
            pulling = (self._sequences.by_name(name) for name in report.pulling)
            found += [SequenceOutput(live.sequence_id, pulling=True) for live in pulling if live is not None]
            transfers = self._transfers(report)
        found += [output for each in outputs.outputs if (output := self._output(each, report)) is not None]
        if report is None:
            return EngineEvent(tuple(found))
        aborted = [live for name in report.aborted if (live := self._sequences.by_name(name)) is not None]
        found += [self._end(live, FinishReason.ABORTED) for live in aborted]
        lost = [live for name in report.lost if (live := self._sequences.by_name(name)) is not None]
        found += [self._end(live, FinishReason.KV_LOST, detail=IMAGES_ELSEWHERE) for live in lost]
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
            live.computed = True
            live.cached_tokens, live.loaded_tokens = stats.num_local_cached_tokens, stats.num_external_cached_tokens
            computed = (each for each in live.request.images if each.data and each.span.first >= live.cached_tokens)
            self._images.used += sum(1 for _ in computed)
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
        if live.request.pooling is not None:
            return self._end(live, finish, pooled=wire.vector_of(output))
        if live.request.phase is not EnginePhase.PREFILL:
            return self._end(live, finish, token_ids=token_ids, logprobs=logprobs)
        parameters = self._handing.left(live.name, output.kv_transfer_params)
        if parameters is None:
            return self._end(live, FinishReason.FAILED, detail="vLLM's KV connector gave no parameters")
        if self._handing.connector.holds:
            self._sequences.lease(live)
            if live.aborting:  # the abort reached vLLM too late, and nobody will pull the blocks
                self._release(live.name)
        if live.aborting:
            return self._end(live, FinishReason.ABORTED)
        # The token that vLLM sampled is dropped, because the decode side samples it.
        assert report is not None  # a step has ended, although its message may be read much later
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
    return step_report(step_of(running.work, running.start_unix_ns, 0), report)


def step_report(step: Step, report: EngineReport) -> StepReport:
    """Return the report of a step after its encoding, with the depths of the engine's report."""
    return StepReport(
        start_unix_ns=step.start_ns + step.encode_ns,
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
