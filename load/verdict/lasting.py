"""A load that goes on: ten minutes in balance, in which nothing may be named, and two of overload, which must stay
named as that. In virtual time."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from load.chaos.suite import SuiteSpec, VirtualSuite, run_virtual
from load.verdict.drawn import draw_suite
from load.verdict.judge import CALM
from load.verdict.situations import WORKERS, Planted, Situations, arrivals
from load.verdict.virtual import POLL_S

LASTS_S: Final = {"busy": 600.0, "too_small": 120.0}
"""By situation."""
OK, TOO_MANY = 200, 429
NAMED_WITHIN_S: Final = 20.0
"""What is planted is named by then, or never."""


@dataclass(slots=True)
class Lasted:
    """What was said over one load."""

    name: str
    seed: int
    split: str
    said_s: dict[str, float] = field(default_factory=dict)
    """How long each verdict stood, from when the planted one was first named; in balance, from the beginning."""
    changes: list[tuple[float, str]] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    answered: int = 0
    refused: int = 0
    sentence: str = ""
    """The first that was wrong."""

    @property
    def right_s(self) -> float:
        """How long it was right."""
        right = CALM if self.name == "busy" else frozenset({self.name})
        return sum(long_s for code, long_s in self.said_s.items() if code in right)


def run_lasting(name: str, seed: int, *, lasts_s: float = 0.0) -> Lasted:
    """A suite with a device drawn by the seed, under one load. `lasts_s`: in place of what is usual."""
    drawn = draw_suite(seed, little_kv=False)
    planted = Situations(drawn.device, seed * 1_000).of(name)
    spec = SuiteSpec(
        roles=["prefill"] * planted.prefill + ["decode"] * planted.decode,
        worker=drawn.worker(), gateway=drawn.targets(), planner=drawn.planner(), metrics=drawn.targets(),
    )  # fmt: skip

    async def play(suite: VirtualSuite) -> Lasted:
        return await _play(suite, planted, seed, lasts_s or LASTS_S[name])

    return run_virtual(spec, seed, play)


async def _play(suite: VirtualSuite, planted: Planted, seed: int, lasts_s: float) -> Lasted:
    found = Lasted(planted.name, seed, f"{planted.prefill}P+{WORKERS - planted.prefill}D")
    right = CALM if planted.name == "busy" else planted.wanted
    suite.play(list(arrivals(planted.load, seed, lasts_s)))
    fired, began_s, named = suite.alerts(), suite.now_s, planted.name == "busy"
    said_s, alerts = defaultdict[str, float](float), set[str]()
    while suite.now_s < began_s + lasts_s:
        await asyncio.sleep(POLL_S)
        verdict = suite.status()["verdict"]
        code, at_s = str(verdict["code"]), suite.now_s - began_s
        named = named or code in right or at_s > NAMED_WITHIN_S
        if not named:
            continue
        if not found.changes or found.changes[-1][1] != code:
            found.changes.append((round(at_s, 1), code))
        if code not in right and not found.sentence:
            found.sentence = verdict["sentence"]
        said_s[code] += POLL_S
        alerts |= suite.alerts() - fired
    found.said_s = {code: round(long_s, 1) for code, long_s in said_s.items()}
    found.alerts = sorted(alerts)
    found.answered = sum(each.status == OK and each.done for each in suite.asked)
    found.refused = sum(each.status == TOO_MANY for each in suite.asked)
    return found
