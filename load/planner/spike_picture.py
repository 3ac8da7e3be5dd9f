"""What bench_spike saw, as a picture: a column a policy; TTFT, TPOT, what waits, and roles over time, moves marked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

COLOURS: Final = {"prefill": "#1f77b4", "decode": "#2ca02c", "with prompts": "#bcbd22"}
PANELS: Final = ("TTFT, s", "TPOT, ms", "prompts wait,\ns of one GPU", "workers")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write an SVG. `rows` are those of one story, with their timelines."""
    figure, axes = pyplot.subplots(
        len(PANELS), len(rows), figsize=(4.6 * len(rows), 7.5), sharex=True, sharey="row", squeeze=False
    )
    for column, row in enumerate(rows):
        line = row["timeline"]
        ttft, tpot, waits, workers = axes[:, column]
        times = [each[0] for each in line["requests"]]
        ttft.plot(times, [each[1] / 1e3 for each in line["requests"]], ".", markersize=3, color="#444444")
        tpot.plot(times, [each[2] for each in line["requests"]], ".", markersize=3, color="#444444")
        looks = [each for each in line["looks"] if 0 <= each[0] <= max(times) + 5]
        at_s = [each[0] for each in looks]
        waits.plot(at_s, [each[4] / 1e3 for each in looks], color="#d62728", linewidth=1)
        counts = ([each[1] for each in looks], [each[2] - each[3] for each in looks], [each[3] for each in looks])
        workers.stackplot(at_s, *counts, labels=list(COLOURS), colors=list(COLOURS.values()), step="post")
        for changed_s, action, *_ in line["changes"]:
            if action != "role_moved":
                for panel in (ttft, tpot, waits, workers):
                    panel.axvline(changed_s, color="#9467bd", linewidth=0.8, alpha=0.6)
        ttft.set_title(f"{row['policy']}: {row['good']:.1%} good, TTFT p99 {row['ttft_ms']['p99'] / 1e3:.1f} s")
        workers.set_xlabel("s")
    for panel, title in zip(axes[:, 0], PANELS, strict=True):
        panel.set_ylabel(title)
    axes[-1, -1].legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
