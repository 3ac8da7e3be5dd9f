"""Alert conditions of links between workers that carry KV at a fraction of the speed of others."""

from collections.abc import Iterator, Sequence
from typing import Final

from libs.policy.alerts.rules import Condition, Name
from libs.policy.grade import Grade
from libs.policy.metrics.kv_links import SLOW_LINK, SOUND_LINK, JudgedLink, KvLink, judge

MAX_NAMED: Final = 4
SOUND: Final = "KV comes over no link at a fraction of the speed of others"


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
        yield Condition(Name.KV_LINK_SLOW, (("model", model),), Grade.FIRE, _sentence(slow), command="fulcrum doctor")


def _sentence(slow: Sequence[JudgedLink]) -> str:
    named = ", ".join(
        f"{each.link.source} to {each.link.target} at {each.link.gb_per_s or 0.0:.2g} GB/s" for each in slow[:MAX_NAMED]
    )
    more = f" and over {len(slow) - MAX_NAMED} more" if len(slow) > MAX_NAMED else ""
    link = slow[0].link
    way = "by shared memory" if link.shared_memory else "within a node" if link.one_node else "by the network"
    return f"KV comes from {named}{more}, where others {way} reach {slow[0].fastest_gb_per_s:.3g}: look at the link"
