"""Late answers in the lab by class and cause: too late for the first token, or for the tokens after it.

`python -m load.lab.late_answers chat-flood 8.38` runs held-out requests at a multiple of a workload's rate. The
workload is one of bench_lab.py, or a trace such as `chat-flood:rate=6,seconds=60`. Shares of GPU time tell whether KV
transfers or idle workers are part of it.
"""

import argparse
from collections import Counter
from typing import Final

from rich.table import Table

from libs.lab.experiment import Experiment, run
from libs.lab.policies import policy_named
from libs.lab.slo import is_good
from libs.lab.study import quiet, scaled
from load.lab.bench_lab import EIGHT, HELD_OUT_SEED, Base, Cell
from load.measure import show, titled_table

SLO: Final = "ttft=max(2s,3x),tpot=50ms"


def main() -> None:
    options = _arguments()
    quiet()
    workloads = {options.workload: EIGHT.get(options.workload, options.workload)}
    base = Base(options.workers, "llama-3.1-70b", "h100", SLO, workloads, 1, held_out=True)
    for policy in options.policies.split(","):
        drawn = base.experiment(Cell(options.workload, policy), options.seed)
        show(_late(scaled(drawn, options.rate, "superpose"), policy))


def _late(experiment: Experiment, policy: str) -> Table:
    report, result = run(experiment, policy_named(policy, experiment.workers))
    requests: Counter[str] = Counter()
    work: Counter[str] = Counter()
    first: Counter[str] = Counter()
    later: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    arrivals = experiment.trace.requests
    first_ns = arrivals[0].arrival_ns + experiment.warm_up_s * 1e9
    last_ns = arrivals[-1].arrival_ns - experiment.tail_s * 1e9
    for answer in result.answers:
        request = answer.request
        if not first_ns <= request.arrival_ns <= last_ns:
            continue
        ideal_ns = round(experiment.work.ns(request.input_tokens, request.output_tokens))
        requests[request.service_class] += 1
        work[request.service_class] += ideal_ns
        if is_good(answer):
            continue
        lost[request.service_class] += ideal_ns
        no_first = not answer.tokens or answer.ttft_ns > answer.ttft_limit_ns
        (first if no_first else later)[request.service_class] += 1
    spent, seconds = report.gpu_seconds, sum(report.gpu_seconds.values())
    shares = ", ".join(f"{name} {each / seconds:.1%}" for name, each in spent.items())
    good, good_work = report.score.slo_attainment, report.score.work_attainment
    title = f"{policy}: {good:.1%} of requests good, {good_work:.1%} of work; {report.role_moves} moves; {shares}"
    columns = ("class", "requests", "late for the first token", "late after it", "share of all work lost")
    table = titled_table(title, *columns)
    for name, count in sorted(requests.items()):
        parts = first[name] / count, later[name] / count, lost[name] / work.total()
        table.add_row(name, f"{count}", *(f"{part:.1%}" for part in parts))
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help="a workload of bench_lab.py, or a trace")
    parser.add_argument("rate", type=float, help="a multiple of the workload's own rate")
    parser.add_argument("--policies", default="fulcrum-auto,aggregated+order+guard")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--workers", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
