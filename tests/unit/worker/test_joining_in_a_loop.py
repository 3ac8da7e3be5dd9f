"""Tests in virtual time of the decode admission guard under clients that send again once answered."""

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import Pace, TokenLine

MS = 1_000_000
MODEL = StepTimeModel(0, 0, 0, 36 * MS, 6 * MS, 0, 1.0, decode_matrix_ns=18 * MS)
"""Seven decode in 96 ms a step, eight in 102, nine in 108."""
TARGET_MS, TTFT_MS = 100, 5000
PROMPT_MS, TRANSFER_MS = 70, 20
ANSWERS = 128


@dataclass(eq=False)
class ClientRequest:
    """A sequence that comes from another worker and has its first token sampled here."""

    requested_ns: int
    tokens: int
    output_tokens: int = 0
    first_ns: int = 0
    last_ns: int = 0
    joined: bool = False
    held_since_ns: int = 0
    has_room = transferred = True
    yields = False
    kind = ""
    tpot_target_ns = TARGET_MS * MS

    @property
    def length(self) -> int:
        return 64 + self.output_tokens

    @property
    def computed(self) -> int:
        return self.length - 1

    @property
    def most_left(self) -> int:
        return self.tokens - self.output_tokens

    @property
    def first_token_due_ns(self) -> int:
        return 0 if self.first_ns else self.requested_ns + TTFT_MS * MS

    @property
    def line(self) -> TokenLine | None:
        return TokenLine(self.first_ns, self.tpot_target_ns, self.output_tokens - 1) if self.first_ns else None

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.requested_ns) / MS

    @property
    def tpot_ms(self) -> float:
        return (self.last_ns - self.first_ns) / (self.tokens - 1) / MS


def served(clients: int, seed: int) -> list[ClientRequest]:
    """Run `ANSWERS` requests, computing one prompt at a time, and return their outcome."""
    random, order = np.random.default_rng(seed), count()
    pace = Pace(512)
    pace.step_time = MODEL
    now_ns, prefill_ns = 1, 0
    coming: list[tuple[int, int, ClientRequest]] = []
    here: list[ClientRequest] = []
    ended: list[ClientRequest] = []

    def ask() -> None:
        nonlocal prefill_ns
        prefill_ns = max(prefill_ns, now_ns) + PROMPT_MS * MS
        heapq.heappush(
            coming, (prefill_ns + TRANSFER_MS * MS, next(order), ClientRequest(now_ns, int(random.integers(24, 41))))
        )

    for _ in range(clients):
        ask()
    while len(ended) < ANSWERS:
        while coming and coming[0][0] <= now_ns:
            here.append(heapq.heappop(coming)[2])
        if not here:
            now_ns = coming[0][0]
            continue
        decoding = pace.decodes(here, now_ns)
        now_ns += round(MODEL.decode_ns(StepWork(decode_sequences=len(decoding))) * random.uniform(0.95, 1.05))
        for each in decoding:
            each.joined = True
            each.output_tokens += 1
            each.first_ns = each.first_ns or now_ns
            if not each.most_left:
                each.last_ns = now_ns
                here.remove(each)
                ended.append(each)
                pace.note_end(each.output_tokens, each.kind)
                ask()
    return ended


def test_with_a_few_sequences_too_many_some_wait_and_nearly_all_meet_their_targets() -> None:
    for clients in (8, 10):
        found = [each for seed in range(3) for each in served(clients, seed)]
        good = [each.tpot_ms <= TARGET_MS and each.ttft_ms <= TTFT_MS for each in found]
        assert np.mean(good) >= 0.85, clients
        assert max(each.ttft_ms for each in found) < 3500


def test_with_far_too_many_sequences_hardly_any_waits_in_vain() -> None:
    for seed in range(3):
        waited_ms = [each.ttft_ms for each in served(14, seed)]
        assert np.quantile(waited_ms, 0.9) <= 600
