"""The answer of `fulcrum lab compare --gpus-needed`: how many GPUs each policy needs, and whether to disaggregate."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.cli.lab.compare import COLORS, unless_interrupted
from libs.cli.lab.runs import RunOptions, about, noting, rounded
from libs.cli.page import html_page
from libs.contracts.errors import InvalidRequest
from libs.lab.experiment import Experiment
from libs.lab.needs import (
    DesignAnswer,
    Need,
    as_record,
    compare_at_winner,
    decide,
    find_needs,
    rank,
    reasons,
    split_words,
)
from libs.lab.policies import ALL, OFFLINE, bare_name, has_hindsight, policy_named
from libs.lab.search import CLASS_FLOOR, WANTED, Measure
from libs.lab.study import quiet, without_split
from libs.lab.traces.describe import describe

MEASURE_WORDS: Final = {"requests": "of requests", "work": "of work", "both": "of requests and of work"}
CLASS_WIDE: Final = ' class="wide"'
CSS: Final = """<style>.bar{display:flex;height:1.1em;min-width:2px}.bar i{display:block;height:100%}
.answer{font-size:1.35em;font-weight:600;margin:.4em 0 .6em}.wide{width:38%}.key i{display:inline-block;width:.8em;
height:.8em;margin:0 .3em 0 .9em}.wide,.wide+td,.wide+th{text-align:left}</style>"""


@dataclass(frozen=True, slots=True)
class Outcome:
    experiment: Experiment
    answer: DesignAnswer
    needs: Sequence[Need]
    """The needs of all policies, the best policy first."""
    reasons: Sequence[str]
    measure: Measure

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of one worker."""
        return self.experiment.hardware.profile.gpus

    @property
    def standard(self) -> str:
        """Return the share of requests that must meet the SLO, and the SLO, in words."""
        return f"{WANTED:.0%} {MEASURE_WORDS[self.measure]} in time: {self.experiment.slo.text}"


def answer_needs(
    options: RunOptions, policies: str, *, most: int, measure: Measure, html: Path | None, jobs: int, as_json: bool
) -> None:
    """Print the needs of each policy, under the sentence that answers whether to disaggregate.

    Needs found before Ctrl-C are printed and written too.
    """
    names = list(dict.fromkeys(map(without_split, ALL if policies == "all" else policies.split(","))))
    needs: list[Need] = []
    interrupted = False
    quiet()
    with noting() as notes:
        experiment = options.experiment()
        _check(experiment, names, most, html)
        explained: list[str] = []
        try:
            found = find_needs(experiment, names, jobs or os.cpu_count() or 1, notes.doing, most=most, measure=measure)
            for _, need in unless_interrupted(found):
                needs.append(need)
                notes.done(f"{len(needs)} of {len(names)}: {need.policy} needs {need.workers or 'more'} workers")
            answer = decide(needs, experiment.hardware.profile.gpus, most)
            explained = reasons(experiment, answer, compare_at_winner(experiment, answer, notes.doing))
        except KeyboardInterrupt:
            interrupted = True
            answer = decide(needs, experiment.hardware.profile.gpus, most)
            explained = [f"Interrupted: {len(needs)} of {len(names)} policies are compared."]
    outcome = Outcome(experiment, answer, sorted(needs, key=rank), explained, measure)
    if html is not None:
        _write(html, needs_page(outcome))
    if as_json:
        print(json.dumps(_record(outcome, interrupted=interrupted)))
    else:
        _show(outcome, html)
    if interrupted:
        sys.exit(130)


def _check(experiment: Experiment, names: Sequence[str], most: int, html: Path | None) -> None:
    """Raise InvalidRequest before minutes of computation rather than after."""
    if experiment.losses:
        raise InvalidRequest("--lose names workers of one cluster, and other sizes are tried here: leave it out")
    for name in names:
        if bare_name(name)[0] == OFFLINE:
            raise InvalidRequest(
                f"{OFFLINE} knows the trace in advance, so no cluster can run it: leave it out of --policies"
            )
        if not has_hindsight(name):
            policy_named(name, most)
    if html is not None and not html.parent.is_dir():
        raise InvalidRequest(f"cannot write {html}: there is no folder {html.parent}")


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None


def _record(outcome: Outcome, *, interrupted: bool) -> dict[str, Any]:
    experiment = outcome.experiment
    record: dict[str, Any] = rounded(
        {
            "trace": experiment.trace.name,
            "profile": experiment.hardware.profile.name,
            "gpus_per_worker": outcome.gpus,
            "slo": experiment.slo.text,
            "measure": outcome.measure,
            "policies": [as_record(need, outcome.gpus) for need in outcome.needs],
        }
    )
    answer = {"verdict": outcome.answer.verdict, "answer": outcome.answer.sentence, "reasons": list(outcome.reasons)}
    return {**answer, "interrupted": interrupted, **record}


def _assumption(experiment: Experiment) -> str:
    if experiment.hardware.mixed_measured and experiment.interference is None:
        return ""
    return (
        f"Interference of prompts beside decodes is {experiment.step_time.interference:g}, an assumption that can "
        "change the answer: try --interference 0 and 1."
    )


def _show(outcome: Outcome, html: Path | None) -> None:
    console = make_console()
    console.print(Text(outcome.answer.sentence, "bold"))
    for each in (*outcome.reasons, outcome.standard):
        console.print(Text(each, "dim"))
    console.print()
    console.print(about(outcome.experiment.trace))
    gpus = outcome.gpus
    shown = plain_table(
        "policy", "GPUs", "split", "good", "work good", "TTFT p90", "TPOT p90", left=("policy", "split")
    )
    for need in outcome.needs:
        score = need.report.score
        shown.add_row(
            need.policy,
            str(need.workers * gpus) if need.workers else f">{max(need.tried) * gpus}",
            split_words(need, gpus),
            f"{score.slo_attainment:.1%}",
            f"{score.work_attainment:.1%}",
            f"{score.ttft_s.get('p90', 0):.2f} s",
            f"{score.tpot_s.get('p90', 0) * 1e3:.1f} ms",
        )
    console.print(shown)
    if note := _assumption(outcome.experiment):
        console.print(Text(f"\n{note}", "dim"))
    if html is not None:
        console.print(f"\nThe page is {html}")


# ---------------------------------------------------------------- the page


def needs_page(outcome: Outcome) -> str:
    """Return one page with the answer, its reasons, and a bar of GPUs for each policy."""
    experiment, answer, needs, gpus = outcome.experiment, outcome.answer, outcome.needs, outcome.gpus
    found = describe(experiment.trace)
    notes = "".join(
        f'<p class="dim">{escape(note)}</p>' for note in (*experiment.trace.notes, _assumption(experiment)) if note
    )
    widest = max((need.workers or max(need.tried) for need in needs), default=1)
    rows = "".join(_row(need, gpus, widest, best=need is answer.winner) for need in needs)
    tried = "".join(_tried(need, gpus) for need in needs)
    titles = ("policy", "GPUs", "", "split", "good", "work good", "TTFT p90", "TPOT p90")
    heads = "".join(f"<th{'' if each else CLASS_WIDE}>{each}</th>" for each in titles)
    key = "".join(
        f'<i style="background:{COLORS[name]}"></i>{words}'
        for name, words in (
            ("prefill", "prefill"),
            ("decode", "decode"),
            ("kv_wait", "both phases"),
            ("idle", "not enough"),
        )
    )
    return html_page(
        f"GPUs needed by {experiment.trace.name}",
        f"""{CSS}<h1>GPUs needed by {escape(experiment.trace.name)}</h1>
<p class="answer">{escape(answer.sentence)}</p>{"".join(f"<p>{escape(each)}</p>" for each in outcome.reasons)}
<p class="dim">{len(experiment.trace.requests):,} requests in {found["duration_s"]:,.0f} s on
{escape(experiment.hardware.profile.name)}, {gpus} GPU{"s" if gpus > 1 else ""} a worker;
{escape(outcome.standard)}. One seed: a difference of one worker can be chance.</p>{notes}
<h2>GPUs that keep the SLO</h2><p class="key dim">{key}</p>
<div class="scroll"><table><thead><tr>{heads}</tr>
</thead><tbody>{rows}</tbody></table></div>
<h2>Good share by number of GPUs tried</h2>
<p class="dim">A class of requests is starved if less than {CLASS_FLOOR:.0%} of it is in time.</p>
<div class="scroll"><table><tbody>{tried}</tbody></table></div>""",
    )


def _row(need: Need, gpus: int, widest: int, *, best: bool) -> str:
    score = need.report.score
    prefill, others = need.split
    both = "decode" if need.design == "disaggregated" else "kv_wait"
    parts = ((prefill, "prefill"), (others, both)) if need.workers else ((prefill + others, "idle"),)
    bar = "".join(
        f'<i style="width:{100 * count / widest:.1f}%;background:{COLORS[name]}"></i>' for count, name in parts if count
    )
    mark = ' class="best"' if best else ""
    count = f"{need.workers * gpus}" if need.workers else f"&gt;{max(need.tried) * gpus}"
    cells = (
        f"{score.slo_attainment:.1%}",
        f"{score.work_attainment:.1%}",
        f"{score.ttft_s.get('p90', 0):.2f} s",
        f"{score.tpot_s.get('p90', 0) * 1e3:.1f} ms",
    )
    return (
        f"<tr{mark}><td>{escape(need.policy)}</td><td>{count}</td>"
        f'<td class="wide"><div class="bar">{bar}</div></td><td>{escape(split_words(need, gpus))}</td>'
        f"{''.join(f'<td>{each}</td>' for each in cells)}</tr>"
    )


def _tried(need: Need, gpus: int) -> str:
    shares = ", ".join(
        f"{workers * gpus}: {f'{good:.1%}' if good else 'a class starved'}"
        for workers, good in sorted(need.tried.items())
    )
    return f'<tr><td>{escape(need.policy)}</td><td style="text-align:left">{shares}</td></tr>'
