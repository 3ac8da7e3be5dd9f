"""Alert conditions of whole pools and of the links between their workers.

They cover imbalance, growing queues, time lost to KV transfers, and links far slower than others.
"""

from collections.abc import Container, Iterator, Sequence
from typing import Final

from libs.policy.alerts.queues import QueueLog
from libs.policy.alerts.rules import AlertLimits, Condition, Labels, Name
from libs.policy.alerts.snapshot import PhasePool
from libs.policy.grade import Grade
from libs.policy.metrics.kv_links import SLOW_LINK, SOUND_LINK, JudgedLink, KvLink, judge
from libs.policy.verdict.causes import amount

OTHER = {"prefill": "decode", "decode": "prefill"}
MAX_NAMED: Final = 4
SOUND: Final = "KV comes over no link at a fraction of the speed of others"


def pool_conditions(
    pools: list[PhasePool], queues: QueueLog, limits: AlertLimits, judged: Container[str] = ()
) -> Iterator[Condition]:
    """Judge every pool, with the queue depths up to now.

    `judged` holds models whose causes the verdict names; they get no imbalance or KV transfer condition here.
    """
    known = {(pool.model, pool.phase): pool for pool in pools}
    for pool in pools:
        other = known.get((pool.model, OTHER[pool.phase]))
        waiting = queues.mean((pool.model, pool.phase), limits.window_ns)
        if other is not None and pool.model not in judged:
            yield _imbalance(pool, other, waiting, limits)
        yield _queue(pool, waiting, queues.growth_per_minute((pool.model, pool.phase)), limits)
        if pool.phase == "decode" and pool.model not in judged:
            yield _kv_wait(pool, limits)


def _imbalance(starved: PhasePool, other: PhasePool, waiting: float, limits: AlertLimits) -> Condition:
    """Grade whether one phase is overloaded while the other is idle."""
    labels = _labels(starved)
    if not (starved.covered_ns and other.covered_ns):
        return Condition(Name.IMBALANCE, labels, None, "telemetry does not cover it")
    busy = starved.busy_ns / starved.covered_ns
    idle = 1 - (other.busy_ns + other.kv_wait_ns) / other.covered_ns
    known = starved.waiting is not None
    # A queue that is empty for a moment must not end the alert.
    queued = Grade.FIRE if (known and waiting >= 1) or starved.full else Grade.HOLD
    grade = min(limits.busy.grade(busy), limits.idle.grade(idle), queued)
    at_hand = f"all {starved.places} places taken" if starved.full else f"{amount(waiting)} {starved.unit} queued"
    reason = f"{starved.phase} {busy:.0%} busy with {at_hand}, {other.phase} {other.busy_ns / other.covered_ns:.0%}"
    if grade is Grade.FIRE:
        reason += f": {advice(starved, other)}"
    return Condition(Name.IMBALANCE, labels, grade, reason)


def advice(starved: PhasePool, other: PhasePool) -> str:
    """Return the effect of moving workers, estimated from how busy both pools are; telemetry must cover both."""
    if other.workers == 1:
        return f"its only {other.phase} worker cannot move; as mixed it would take prompts too"
    work, lent = (pool.busy_ns / pool.covered_ns * pool.workers for pool in (starved, other))
    # Moving `even` workers would make both pools equally busy at the same work.
    even = (work * other.workers - lent * starved.workers) / (work + lent)
    count = min(max(int(even), 1), other.workers - 1)
    return (
        f"moving {count} of {other.workers} {other.phase} workers gives {starved.phase} "
        f"{count / starved.workers:.0%} more and leaves {other.phase} {min(lent / (other.workers - count), 1):.0%} busy"
    )


def _queue(pool: PhasePool, waiting: float, growth_per_minute: float | None, limits: AlertLimits) -> Condition:
    """Grade whether the queue is long and grows in a minute by as much as makes it long."""
    if pool.waiting is None:
        return Condition(Name.QUEUE_GROWING, _labels(pool), None, "telemetry does not cover it")
    long = max(pool.gpus, 1) * (limits.queue_tokens if pool.phase == "prefill" else limits.queue_sequences)
    reason = f"{amount(waiting)} {pool.unit} wait for {pool.phase} on {pool.gpus} GPUs"
    if growth_per_minute is None:  # as after a silence, in which a long queue may have grown
        grade = Grade.CLEAR if waiting < long / 2 else Grade.HOLD
        return Condition(Name.QUEUE_GROWING, _labels(pool), grade, reason)
    if waiting < long / 2 or growth_per_minute < long / 10:
        grade = Grade.CLEAR
    else:
        grade = Grade.FIRE if waiting >= long and growth_per_minute >= long else Grade.HOLD
    reason += f", {'+' if growth_per_minute >= 0 else '-'}{amount(abs(growth_per_minute))} a minute"
    return Condition(Name.QUEUE_GROWING, _labels(pool), grade, reason)


def _kv_wait(pool: PhasePool, limits: AlertLimits) -> Condition:
    labels: Labels = (("model", pool.model),)
    if not pool.covered_ns:
        return Condition(Name.KV_TRANSFER_BOUND, labels, None, "telemetry does not cover it")
    share = pool.kv_wait_ns / pool.covered_ns
    reason = f"decode workers wait for KV blocks {share:.0%} of the time, {pool.busy_ns / pool.covered_ns:.0%} busy"
    return Condition(Name.KV_TRANSFER_BOUND, labels, limits.kv_wait.grade(share), reason)


def _labels(pool: PhasePool) -> Labels:
    return (("model", pool.model), ("phase", pool.phase))


def link_conditions(links: Sequence[KvLink]) -> Iterator[Condition]:
    """Yield one condition for each model with comparable links.

    A bad network card or route shows in many pairs at once, so there is no alert per pair.
    """
    judged = judge(links)
    for model in sorted({each.link.model for each in judged}):
        own = [each for each in judged if each.link.model == model]
        slow = [each for each in own if each.share < SLOW_LINK]
        if not slow:
            grade = Grade.HOLD if own[0].share < SOUND_LINK else Grade.CLEAR
            yield Condition(Name.KV_LINK_SLOW, (("model", model),), grade, SOUND)
            continue
        yield Condition(Name.KV_LINK_SLOW, (("model", model),), Grade.FIRE, _slow_links(slow), command="fulcrum doctor")


def _slow_links(slow: Sequence[JudgedLink]) -> str:
    named = ", ".join(
        f"{each.link.source} to {each.link.target} at {each.link.gb_per_s or 0.0:.2g} GB/s" for each in slow[:MAX_NAMED]
    )
    more = f" and over {len(slow) - MAX_NAMED} more" if len(slow) > MAX_NAMED else ""
    link = slow[0].link
    way = "by shared memory" if link.shared_memory else "within a node" if link.one_node else "by the network"
    return f"KV comes from {named}{more}, where others {way} reach {slow[0].fastest_gb_per_s:.3g}: look at the link"
