"""Plot the ratio of prefill to decode over a day: plot_ratio.py REQUESTS.csv RATIO.svg [PREFILL_RATE DECODE_RATE]

The rates are tokens per GPU-second in each phase. Without them the ratio is of tokens, with them of GPU time.
"""

import csv
import sys
from collections import defaultdict
from datetime import datetime
from pathlib import Path

from matplotlib.figure import Figure

BINS_A_DAY = 96  # of 15 minutes


def hour_of(time: str) -> float:
    """Return the hour of the day of Unix seconds, or of a timestamp such as 2026-01-31 12:00:00.25."""
    if time.replace(".", "", 1).isdigit():
        return float(time) / 3600 % 24
    moment = datetime.fromisoformat(time[:26])
    return moment.hour + moment.minute / 60


source, target, *rates = sys.argv[1:]
prefill_rate, decode_rate = map(float, rates or (1, 1))
prefill: dict[int, float] = defaultdict(float)
decode: dict[int, float] = defaultdict(float)
with Path(source).open(newline="") as file:
    for time, prompt, output in csv.reader(row for row in file if row[0].isdigit()):
        number = int(hour_of(time) * BINS_A_DAY / 24)
        prefill[number] += int(prompt) / prefill_rate
        decode[number] += int(output) / decode_rate
ratios = {number: prefill[number] / decode[number] for number in sorted(prefill) if decode[number]}
axes = (figure := Figure(figsize=(10, 3.6), layout="constrained")).subplots()
axes.step([number * 24 / BINS_A_DAY for number in ratios], list(ratios.values()), where="post")
axes.set(xlabel="hour of day", ylabel="prefill : decode", xlim=(0, 24))
figure.savefig(target)
low, high = min(ratios.values(), default=0), max(ratios.values(), default=0)
print(f"{sum(prefill.values()) / (sum(decode.values()) or 1):.2f} over all, {low:.2f} to {high:.2f}")
