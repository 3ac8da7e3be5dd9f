"""Which running sequences a worker that leaves decode offers to others. Sync; time is passed in.

One rule for every way out, to prefill, to standby and to the end of the process: what is gone sooner by moving than by
ending is offered to its gateway, once for each role that is left. It runs on until a place is found for it, and to its
end where none is. Where the engine moves no KV of running sequences, moving is being computed again elsewhere.
"""

from collections import OrderedDict

from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities
from libs.engine.reports import EngineEvent
from libs.policy.speed import Speed
from libs.policy.worker.moving import MoveTime, Staying, sooner_moved, sooner_recomputed
from libs.worker.hosted import HostedSequence

MAX_TRACKED = 1024
"""Blocks on their way out whose time is taken; of more, the oldest tell nothing."""


class MoveOffers:
    """What staying and moving cost on this worker, learned from what it does."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._staying = Staying()
        self.moving = MoveTime()
        """How long moves from here have taken."""
        self._gone: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """(bytes, Unix ns at which they were sealed) by handle."""
        self.moved = 0
        """Sequences handed over so far."""

    def offers(self, sequence: HostedSequence, speed: Speed, waited_s: float) -> bool:
        """Whether a sequence that decodes, in a role that was left `waited_s` ago, is to go elsewhere if it can."""
        if not sequence.decodes or sequence.offered:
            return False
        capabilities = self._capabilities
        if not capabilities.moves_running_kv:  # asked again until it goes: only time tells
            if not (capabilities.seeds_by_position or sequence.request.sampling.follows_from_tokens):
                return False  # it would draw other tokens there
            recompute_s = speed.prompt_ns(sequence.tokens, sequence.tokens**2) / 1e9
            left = sequence.most_tokens_left
            sequence.offered = sooner_recomputed(left, recompute_s, waited_s, self._staying)
            return sequence.offered
        sequence.offered = True
        kv_bytes = -(-sequence.tokens // capabilities.block_size_tokens) * capabilities.kv_block_bytes
        return sooner_moved(sequence.most_tokens_left, kv_bytes, self._staying, self.moving)

    def stepped(self, event: EngineEvent) -> None:
        """Learn from an engine's step."""
        step = event.step
        if step is not None and step.end_unix_ns and step.decode_sequences:
            self._staying = self._staying.stepped((step.end_unix_ns - step.start_unix_ns) / 1e9)

    def ended(self, output_tokens: int) -> None:
        """An answer has ended here by itself."""
        self._staying = self._staying.ended(output_tokens)

    def left(self, handle: KvHandle, now_ns: int) -> None:
        """A sequence has been handed over: its blocks wait for whoever takes them."""
        self.moved += 1
        self._gone[handle.opaque] = (handle.blocks * self._capabilities.kv_block_bytes, now_ns)
        if len(self._gone) > MAX_TRACKED:
            self._gone.popitem(last=False)

    def taken(self, opaque: bytes, now_ns: int) -> None:
        """The blocks have arrived; those that never do say nothing of how long a move takes."""
        kv_bytes, sealed_ns = self._gone.pop(opaque, (0, 0))
        if kv_bytes:
            self.moving.observe(kv_bytes, max(now_ns - sealed_ns, 0) / 1e9)
