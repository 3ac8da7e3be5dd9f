"""How a CPU is told from others."""

import platform
from pathlib import Path

from libs.engine.torch.device import cpu_name


def test_a_cpu_is_named_as_the_kernel_names_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel\t\t: 6\nmodel name\t: A  CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: B\n")
    assert cpu_name(info) == "A CPU @ 2 GHz"


def test_where_the_kernel_names_none_it_is_the_architecture(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 50\n")
    assert cpu_name(tmp_path / "cpuinfo") == cpu_name(tmp_path / "none") == platform.machine()
