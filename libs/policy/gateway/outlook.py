"""The credits of one worker, and its expected load: its last report plus what this gateway has sent since."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from libs.policy.gateway.view import PlacedImage, WorkerView
from libs.policy.roles import Assigned, Phase, serves
from libs.policy.speed import Speed
from libs.policy.worker.pace import IN_HAND


@dataclass(slots=True)
class CreditBalance:
    """The credits of one kind that a gateway holds from one worker.

    `free` credits can be used, `reserved` ones belong to a request being sent, and `owed` ones have been recalled.
    """

    free: int = 0
    reserved: int = 0
    owed: int = 0
    spent: int = 0
    """The recalled credits that were already used; the worker waits for them until this number is reported."""

    def grant(self, count: int) -> None:
        self.free += count

    def recall(self, count: int) -> None:
        """Record that the worker recalls credits; reserved ones are returned only if they become free."""
        self.owed += count
        self._settle_recall()

    def use(self) -> None:
        self.free -= 1
        self._settle_recall()

    def reserve(self) -> None:
        self.free -= 1
        self.reserved += 1

    def release(self) -> None:
        self.reserved -= 1
        self.free += 1

    def use_reserved(self) -> None:
        self.reserved -= 1
        self._settle_recall()

    def give_back(self) -> int:
        """Remove the credits to return to the worker now, and return their number."""
        count = min(self.owed, self.free)
        self.free -= count
        self.owed -= count
        return count

    def take_spent(self) -> int:
        """Return the number of spent recalled credits to report, and reset it."""
        count, self.spent = self.spent, 0
        return count

    def _settle_recall(self) -> None:
        # If a recall crosses with a use, the worker settles it in the same way, unless it has granted another credit
        # since. Then only the reported `spent` answers the recall.
        over = max(self.owed - self.free - self.reserved, 0)
        self.owed -= over
        self.spent += over


SLOWNESS_WINDOW: Final = 12
"""The answers behind one correction; the window is emptied after each."""
SLOWNESS_TOLERANCE: Final = 1.3
"""The median ratio, or its inverse, beyond which a correction is made."""
MAX_SLOWNESS: Final = 8.0
# Shorter predictions measure the network rather than the worker.
LEAST_JUDGED_NS: Final = 20_000_000


class LoadReport(Protocol):
    """A worker's report of its own load, either a record or a protobuf message."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def waiting_prefill_tokens(self) -> int: ...

    @property
    def waiting_prefill_squares(self) -> int:
        """The sum over queued prompts of the squared length less the square of the part already computed."""
        ...

    @property
    def awaiting_kv(self) -> int:
        """The number of sequences whose KV is still being transferred."""
        ...

    @property
    def free_kv_blocks(self) -> int:
        """The KV blocks that the worker could allocate."""
        ...

    @property
    def images_encoded(self) -> int:
        """The images encoded since the worker's start, in `image_encode_ns`."""
        ...

    @property
    def image_encode_ns(self) -> int: ...

    @property
    def waiting_encode_ns(self) -> int:
        """The time that encoding the images of waiting prompts will take; 0 before any image was encoded."""
        ...


class DescribedCapabilities(Protocol):
    """The capabilities of a worker's engine that matter for binding."""

    @property
    def block_size_tokens(self) -> int: ...

    @property
    def kv_blocks(self) -> int:
        """The number of KV blocks; 0 if it is unbounded."""
        ...

    @property
    def streams_kv(self) -> bool:
        """Return whether blocks can be read while their prompt is being computed."""
        ...


class DescribedAssignment(Assigned, Protocol):
    """A worker's assignment, including the model that it serves."""

    @property
    def model(self) -> str: ...


class DescribedWorker(Protocol):
    """A worker's description of itself, as far as binding needs it."""

    id: str

    @property
    def assignment(self) -> DescribedAssignment: ...

    @property
    def capabilities(self) -> DescribedCapabilities: ...


@dataclass(slots=True)
class UnreportedLoad:
    """The load of a worker that has not reported one yet."""

    free_kv_blocks: int
    running: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    waiting_prefill_squares: int = 0
    awaiting_kv: int = 0
    images_encoded: int = 0
    image_encode_ns: int = 0
    waiting_encode_ns: int = 0


@dataclass(frozen=True, slots=True)
class SubmitLoad:
    """The load that one submit adds to a worker, estimated by its gateway."""

    prompt_tokens: int = 0
    """The prompt tokens to compute on the worker."""
    squares: int = 0
    """The prompt's length squared less the square of the part cached on the worker."""
    kv_tokens: int = 0
    """The tokens whose KV the worker will hold and does not hold yet."""
    decodes: bool = False
    """True if the worker also decodes the sequence."""
    images: int = 0
    """The images to encode on the worker."""

    @classmethod
    def of(cls, tokens: int, cached: Mapping[str, int], worker_id: str, phase: int, images: int = 0) -> "SubmitLoad":
        """Return the load of a submit of `tokens` tokens, with `images` to encode.

        `cached` is the number of leading tokens each worker is believed to hold, by worker id.
        """
        held = min(cached.get(worker_id, 0), tokens)
        if phase == Phase.DECODE:
            return cls(kv_tokens=tokens - held, decodes=True)
        decodes = phase == Phase.BOTH
        return cls(tokens - held, tokens**2 - held**2, tokens - held, decodes=decodes, images=images)


class Slowness:
    """The correction of one worker's reported speed by the answers it actually gives.

    The reported speed can be wrong: a throttled device, a noisy neighbour on the host, an outdated fit. If a worker's
    answers are consistently and clearly later than predicted, it is treated as that much slower until its answers are
    faster again. Small errors are ignored, because predictions scatter and every correction shifts work.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        """The actual time as a multiple of the time its reported speed predicts."""
        self._ratios: deque[float] = deque(maxlen=SLOWNESS_WINDOW)

    def answered(self, predicted_ns: float, actual_ns: float) -> bool:
        """Record an answer predicted with `factor` included, and return whether `factor` changed."""
        if predicted_ns < LEAST_JUDGED_NS:
            return False
        self._ratios.append(actual_ns / predicted_ns)
        if len(self._ratios) < SLOWNESS_WINDOW:
            return False
        median = sorted(self._ratios)[SLOWNESS_WINDOW // 2]
        if 1 / SLOWNESS_TOLERANCE <= median <= SLOWNESS_TOLERANCE or (median < 1 and self.factor == 1.0):
            return False
        self._ratios.clear()
        before, self.factor = self.factor, min(max(self.factor * median, 1.0), MAX_SLOWNESS)
        return self.factor != before


RECENT_IMAGES: Final = 64
"""The maximum number of images whose embeddings a worker is believed to keep. For a 7B LLaVA they take 300 MB."""


class WorkerOutlook:
    """The expected load and speed of one worker.

    A submit is counted from when it is sent until the worker's own report includes it, or until it has ended.
    """

    def __init__(self, device: str, speed: Speed, kv_blocks: int, tpot_ns: float = 0.0) -> None:
        """Create an outlook with a speed that applies until the worker reports its own.

        `tpot_ns` is the latency target assumed for its decodes; 0 means none.
        """
        self._paced_step_ns = tpot_ns * (1 - IN_HAND)
        self.device = device
        self.speed = speed
        self.slowness = Slowness()
        # Number of the gateway's last binding that went to this worker.
        self.turn = 0
        self._load: LoadReport = UnreportedLoad(kv_blocks)
        self._reported_unix_ns = 0
        self._submits = 0
        self._unseen: dict[int, tuple[int, SubmitLoad]] = {}
        self._prompt_tokens = 0
        self._squares = 0
        self._kv_tokens = 0
        self._decodes = 0
        self._arriving_tokens = 0
        self._images = 0
        self.image_ns = 0.0
        """The time that the worker takes to encode one image; 0 while unknown."""
        self._recent_images: OrderedDict[bytes, None] = OrderedDict()
        self._reserved = 0
        self._reserved_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens that wait on the worker or are being sent there."""
        return self._load.waiting_prefill_tokens + self._prompt_tokens

    def begins_at_once(self, tokens: int) -> bool:
        """Return whether the worker would compute a whole prompt of `tokens` tokens in its next step.

        A decode worker holds memory for a prompt from its submit on, so one that waits its turn is submitted there
        only once it begins.
        """
        return self.prompt_tokens + tokens <= self.speed.chunk_tokens

    def sent(self, sequence_id: int, sent: SubmitLoad) -> None:
        """Count a submit as soon as it is sent to the worker."""
        self._submits += 1
        self._unseen[sequence_id] = self._submits, sent
        self._count(sent, 1)

    def take_images(self, images: Iterable[PlacedImage], cached_tokens: int) -> int:
        """Record a prompt's images before it is sent, and return the number that the worker has to encode."""
        count = 0
        for image in images:
            if image.end > cached_tokens:
                count += image.digest not in self._recent_images
                self._recent_images[image.digest] = None
                self._recent_images.move_to_end(image.digest)
        while len(self._recent_images) > RECENT_IMAGES:
            self._recent_images.popitem(last=False)
        return count

    def ended(self, sequence_id: int) -> None:
        """Stop counting a submit whose answers the gateway no longer reads."""
        found = self._unseen.pop(sequence_id, None)
        if found is not None:
            self._count(found[1], -1)

    def reserved(self, tokens: int, times: int = 1) -> None:
        """Count an expected decode of `tokens` tokens; `times` of -1 removes it when it arrives or is cancelled."""
        self._reserved += times
        self._reserved_tokens += times * tokens

    def on_load_report(self, load: LoadReport, submits_taken: int, now_ns: int) -> None:
        """Replace the worker's load by its report, which includes its first `submits_taken` submits."""
        self._load = load
        self._reported_unix_ns = now_ns
        if load.images_encoded:
            self.image_ns = load.image_encode_ns / load.images_encoded
        for sequence_id, (number, _) in list(self._unseen.items()):
            if number > submits_taken:
                break
            self.ended(sequence_id)

    def view(
        self,
        worker: DescribedWorker,
        kv_kind: str,
        *,
        prefill_credits: int,
        decode_credits: int,
        prompts: int = 0,
        batch_prompts: int = 0,
    ) -> WorkerView:
        load, capabilities, assignment = self._load, worker.capabilities, worker.assignment
        takes_prefill, takes_decode = serves(assignment, Phase.PREFILL), serves(assignment, Phase.DECODE)
        takes_both = serves(assignment, Phase.BOTH)
        block_size = capabilities.block_size_tokens
        kv_tokens = max(capabilities.kv_blocks - load.free_kv_blocks, 0) * block_size
        decodes = load.running + self._decodes + self._reserved if takes_decode else 0
        speed, slowness = self.speed, self.slowness.factor
        if slowness > 1:
            speed = replace(speed, step_time=speed.step_time.scaled(slowness))
        if takes_both:
            chunk_tokens = min(speed.chunk_tokens, assignment.budget_tokens)
            speed = replace(speed, chunk_tokens=chunk_tokens, paced_step_ns=self._paced_step_ns)
        beside_ns = speed.decode_ns(decodes, kv_tokens)
        coming = self._kv_tokens + self._reserved_tokens
        arriving = load.awaiting_kv * kv_tokens // max(load.running + load.awaiting_kv, 1) if load.awaiting_kv else 0
        free_kv_tokens = load.free_kv_blocks * block_size - coming if capabilities.kv_blocks else math.inf
        return WorkerView(
            id=worker.id,
            model=assignment.model,
            kv_kind=kv_kind,
            takes_prefill=takes_prefill,
            takes_decode=takes_decode,
            takes_both=takes_both,
            prefill_credits=prefill_credits,
            decode_credits=decode_credits,
            load=load.running + load.waiting + load.awaiting_kv + len(self._unseen) + self._reserved,
            turn=self.turn,
            speed=speed,
            reported_backlog_ns=speed.prompt_ns(
                load.waiting_prefill_tokens, load.waiting_prefill_squares, beside_ns, decodes
            )
            + load.waiting_encode_ns * slowness,
            reported_unix_ns=self._reported_unix_ns,
            unseen_ns=speed.prompt_ns(self._prompt_tokens, self._squares, beside_ns, decodes)
            + self._images * self.image_ns * slowness,
            prompt_tokens=load.waiting_prefill_tokens + self._prompt_tokens,
            decode_sequences=decodes,
            kv_tokens=kv_tokens,
            arriving_kv_tokens=arriving + self._arriving_tokens + self._reserved_tokens,
            free_kv_tokens=free_kv_tokens,
            streams_kv=capabilities.streams_kv,
            prompts=prompts,
            batch_prompts=batch_prompts,
            image_ns=self.image_ns * slowness,
            recent_images=self._recent_images.keys(),
        )

    def _count(self, sent: SubmitLoad, times: int) -> None:
        self._prompt_tokens += times * sent.prompt_tokens
        self._squares += times * sent.squares
        self._kv_tokens += times * sent.kv_tokens
        self._decodes += times * sent.decodes
        self._images += times * sent.images
        if not sent.prompt_tokens:
            self._arriving_tokens += times * sent.kv_tokens


def lend_speeds(outlooks: Iterable[WorkerOutlook]) -> None:
    """Give workers without a measured speed, or time to encode an image, the values of a measured worker on the same
    device.

    A guess beside measured workers would look like another device and attract all work or none.
    """
    everyone = list(outlooks)
    known = {outlook.device: outlook.speed for outlook in everyone if outlook.speed.measured}
    images = {outlook.device: outlook.image_ns for outlook in everyone if outlook.image_ns}
    for outlook in everyone:
        if not outlook.speed.measured and outlook.device in known:
            chunk_tokens = outlook.speed.chunk_tokens
            outlook.speed = replace(known[outlook.device], chunk_tokens=chunk_tokens, measured=False)
        outlook.image_ns = outlook.image_ns or images.get(outlook.device, 0.0)
