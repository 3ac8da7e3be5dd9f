"""Which running sequences a worker that leaves decode wants to hand over. Sync; time is passed in.

One rule for every way out, to prefill, to standby and to the end of the process: a sequence that is gone sooner by a
hand-over than by its end is named to its gateway, once for each role that is left. It runs on until another worker has
a place to take it over, and to its end where none has. Where the engine hands over no KV of running sequences, another
worker computes them again.
"""

from collections import OrderedDict

from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities
from libs.engine.reports import EngineEvent
from libs.policy.speed import Speed
from libs.policy.worker.handing_over import HandOverTime, Staying, sooner_handed_over, sooner_recomputed
from libs.worker.hosted import HostedSequence

MAX_TRACKED = 1024
"""Blocks on their way out whose time is taken; of more, the oldest tell nothing."""


class HandOverCosts:
    """What staying and handing over cost on this worker, learned from what it does."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._staying = Staying()
        self.time = HandOverTime()
        """How long hand-overs from here have taken."""
        self._gone: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """(bytes, Unix ns at which they were sealed) by handle."""
        self.count = 0
        """Sequences handed over so far."""

    def worth(self, sequence: HostedSequence, speed: Speed, waited_s: float) -> bool:
        """Whether to hand over a sequence that decodes, in a role that was left `waited_s` ago."""
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
        """Learn from an engine's step."""
        step = event.step
        if step is not None and step.end_unix_ns and step.decode_sequences:
            self._staying = self._staying.stepped((step.end_unix_ns - step.start_unix_ns) / 1e9)

    def ended(self, output_tokens: int) -> None:
        """An answer has ended here by itself."""
        self._staying = self._staying.ended(output_tokens)

    def handed_over(self, handle: KvHandle, now_ns: int) -> None:
        """A sequence has been handed over: its blocks wait for the worker that takes over."""
        self.count += 1
        self._gone[handle.opaque] = (self._capabilities.kv_bytes(handle.tokens), now_ns)
        if len(self._gone) > MAX_TRACKED:
            self._gone.popitem(last=False)

    def taken_over(self, opaque: bytes, now_ns: int) -> None:
        """The blocks have arrived; those that never do say nothing of how long a hand-over takes."""
        kv_bytes, sealed_ns = self._gone.pop(opaque, (0, 0))
        if kv_bytes:
            self.time.observe(kv_bytes, max(now_ns - sealed_ns, 0) / 1e9)
