"""Which running sequences a worker that leaves decode offers for hand-over. Synchronous; callers pass the time.

One rule covers prefill, standby and shutdown: a sequence that a hand-over removes sooner than its own end is
offered to its gateway, once for each role that is left. It runs on until another worker has room, or to its end if
none has. If the engine cannot hand over the KV of running sequences, the other worker recomputes it.
"""

from collections import OrderedDict

from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities
from libs.engine.reports import EngineEvent
from libs.policy.speed import Speed
from libs.policy.worker.handing_over import HandOverTime, Staying, sooner_handed_over, sooner_recomputed
from libs.worker.hosted import HostedSequence

# Hand-overs that are timed at once; beyond it the oldest are not measured.
MAX_TRACKED = 1024


class HandOverCosts:
    """The costs of keeping and of handing over sequences, learned on this worker."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._staying = Staying()
        self.time = HandOverTime()
        """How long hand-overs from this worker have taken."""
        self._gone: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Pairs of (bytes, Unix ns of sealing) by handle."""
        self.count = 0
        """Number of sequences handed over so far."""

    def worth(self, sequence: HostedSequence, speed: Speed, waited_s: float) -> bool:
        """Return whether to hand over a decoding sequence whose role was left `waited_s` ago."""
        if not sequence.decodes or sequence.weighed:
            return False
        capabilities = self._capabilities
        if not capabilities.hands_over_running_kv:  # asked again until it goes: only time tells
            if not (capabilities.seeds_by_position or sequence.request.sampling.follows_from_tokens):
                return False  # it would draw other tokens there
            recompute_s = speed.prompt_ns(sequence.tokens, sequence.tokens**2) / 1e9
            left = sequence.most_tokens_left
            sequence.weighed = sooner_recomputed(left, recompute_s, waited_s, self._staying)
            return sequence.weighed
        sequence.weighed = True
        kv_bytes = capabilities.kv_bytes(sequence.tokens)
        return sooner_handed_over(sequence.most_tokens_left, kv_bytes, self._staying, self.time)

    def stepped(self, event: EngineEvent) -> None:
        """Learn the duration of decode steps from an engine event."""
        step = event.step
        if step is not None and step.end_unix_ns and step.decode_sequences:
            self._staying = self._staying.stepped((step.end_unix_ns - step.start_unix_ns) / 1e9)

    def ended(self, output_tokens: int) -> None:
        """Learn the length of an answer that ended here by itself."""
        self._staying = self._staying.ended(output_tokens)

    def handed_over(self, handle: KvHandle, now_ns: int) -> None:
        """Start timing a hand-over, whose blocks now await their receiver."""
        self.count += 1
        self._gone[handle.opaque] = (self._capabilities.kv_bytes(handle.tokens), now_ns)
        if len(self._gone) > MAX_TRACKED:
            self._gone.popitem(last=False)

    def taken_over(self, opaque: bytes, now_ns: int) -> None:
        """Stop timing a hand-over. Blocks that never arrive are not measured."""
        kv_bytes, sealed_ns = self._gone.pop(opaque, (0, 0))
        if kv_bytes:
            self.time.observe(kv_bytes, max(now_ns - sealed_ns, 0) / 1e9)
