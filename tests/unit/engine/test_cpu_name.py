"""Tests of how a CPU is identified."""

import platform
from pathlib import Path

from libs.engine.torch.device import cpu_name


def test_a_cpu_has_the_name_that_the_kernel_reports(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel\t\t: 6\nmodel name\t: A  CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: B\n")
    assert cpu_name(info) == "A CPU @ 2 GHz"


def test_a_cpu_without_a_name_is_named_by_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 50\n")
    assert cpu_name(tmp_path / "cpuinfo") == cpu_name(tmp_path / "none") == platform.machine()
