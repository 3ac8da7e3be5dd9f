"""The live sequences of a vLLM engine and the leases of finished ones. Pure."""

from dataclasses import dataclass

from libs.engine.kv_port import KvHandle
from libs.engine.port import EngineIdentity, EngineRequest
from libs.engine.reports import FinishReason, Logprob, SequenceOutput


@dataclass(slots=True)
class LiveSequence:
    """The state of one sequence, from `submit` to its last output."""

    request: EngineRequest
    name: str
    """Its request id in vLLM, which unlike `sequence_id` is never reused in this engine."""
    cached_tokens: int = 0
    loaded_tokens: int = 0
    """Tokens whose KV came by the KV connector, from a store or another engine."""
    stored: bool = False
    """Whether another engine has left its KV in a store."""
    kv_bytes: int = 0
    aborting: bool = False

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def prompt_tokens_computed(self) -> int:
        """Number of prompt tokens computed here.

        A sequence whose KV was transferred computes only the last, from which the first token is sampled. One whose
        KV is in a store computes whatever the store lacks.
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
        )

    def handle(self, identity: EngineIdentity, opaque: bytes, kv_layout: str, block_size_tokens: int) -> KvHandle:
        """Return the handle of a computed prompt's blocks."""
        tokens = len(self.request.token_ids)
        blocks = -(-tokens // block_size_tokens)
        return KvHandle(identity.worker_id, identity.incarnation, identity.address, opaque, tokens, blocks, kv_layout)


class Sequences:
    """LiveSequence sequences by id, for the port, and by name, for vLLM; also the leases of prefilled ones."""

    def __init__(self) -> None:
        self._by_id: dict[int, LiveSequence] = {}
        self._by_name: dict[str, LiveSequence] = {}
        self._leases: dict[str, int] = {}
        """Names of sequences whose blocks are held for others, with their ids."""
        self._names = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def leases(self) -> int:
        """Number of handles whose blocks are held here."""
        return len(self._leases)

    def new_name(self, request: EngineRequest) -> str:
        """Return an unused name for a sequence that may be added."""
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
        """Remove a sequence that has had its last output."""
        del self._by_id[live.sequence_id]
        del self._by_name[live.name]

    def all(self) -> list[LiveSequence]:
        """Return all live sequences in order of arrival."""
        return list(self._by_id.values())

    def lease(self, live: LiveSequence) -> None:
        """Record that its blocks are held for a receiver."""
        self._leases[live.name] = live.sequence_id

    def leased_by(self, sequence_id: int) -> list[str]:
        """Return the names of sequences with this id whose blocks are held."""
        return [name for name, owner in self._leases.items() if owner == sequence_id]

    def leases_held(self) -> list[str]:
        """Return all names whose blocks are held."""
        return list(self._leases)

    def leased(self, name: str) -> bool:
        """Return whether the blocks that `name` left are held."""
        return name in self._leases

    def lease_over(self, name: str) -> None:
        """Record that the blocks of `name` are not held any more."""
        self._leases.pop(name, None)
