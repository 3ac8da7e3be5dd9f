"""Published peaks of NVIDIA GPUs: dense tensor-core bfloat16 (else float16) and memory bandwidth. Pure.

The figures are from NVIDIA's data sheet of each product. If a sheet states figures with sparsity only, half of them
are taken.
"""

import re
from types import MappingProxyType
from typing import Final

PEAKS: Final = MappingProxyType(
    {
        # words that the device's name must have: (TFLOP/s, TB/s); more words are more exact
        ("B200",): (2250.0, 8.0),
        ("GB200",): (2500.0, 8.0),
        ("GH200",): (989.4, 4.0),
        ("H200",): (989.4, 4.8),
        ("H200", "NVL"): (835.5, 4.8),
        ("H100",): (989.4, 3.35),
        ("H100", "PCIE"): (756.0, 2.0),
        ("H100", "NVL"): (835.5, 3.9),
        ("H800",): (989.4, 3.35),
        ("H20",): (148.0, 4.0),
        ("A100", "80GB"): (312.0, 2.039),
        ("A100", "80GB", "PCIE"): (312.0, 1.935),
        ("A100",): (312.0, 1.555),
        ("A800",): (312.0, 2.039),
        ("A10",): (125.0, 0.6),
        ("A10G",): (70.0, 0.6),
        ("A30",): (165.0, 0.933),
        ("A40",): (149.7, 0.696),
        ("L4",): (121.0, 0.3),
        ("L40",): (181.0, 0.864),
        ("L40S",): (362.0, 0.864),
        ("V100",): (125.0, 0.9),
        ("T4",): (65.0, 0.32),
    }
)


def gpu_peaks(name: str) -> tuple[float, float]:
    """Return (FLOP/s, bytes/s) of a GPU by the name that its driver reports; zeros if it is unknown."""
    words = set(re.split(r"[\s\-_]+", name.upper()))
    known = [key for key in PEAKS if words.issuperset(key)]
    if not known:
        return 0.0, 0.0
    tera_flops, tera_bytes = PEAKS[max(known, key=len)]
    return tera_flops * 1e12, tera_bytes * 1e12
