"""Tests of waits for a CPU as Linux counts them, of one thread and of a process and its children."""

from pathlib import Path

import pytest

from libs.runtime.linux import MAX_THREADS, CpuWaitReader, run_delay_ns

MS = 1_000_000


@pytest.mark.parametrize(
    ("text", "delay_ns"),
    [
        ("1179084309 955674637 307\n", 955_674_637),
        ("5000 0 1\n", 0),
        ("0 0 0\n", None),
        ("", None),
        ("955674637\n", None),
        ("1 2 3 4\n", None),
        ("1 -2 3\n", None),
        ("1 many 3\n", None),
        ("1 ٣ 3\n", None),
    ],
)
def test_a_threads_delay_is_the_second_of_three_numbers_and_other_text_is_unknown(
    text: str, delay_ns: int | None
) -> None:
    assert run_delay_ns(text) == delay_ns


class Proc:
    """A folder in the form of /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reader = CpuWaitReader(folder, pid=10)

    def thread(self, pid: int, thread: int, delay_ms: int | None, children: str = "") -> None:
        own = self.folder / str(pid) / "task" / str(thread)
        own.mkdir(parents=True, exist_ok=True)
        (own / "schedstat").write_text("nonsense" if delay_ms is None else f"1 {delay_ms * MS} 1\n")
        (own / "children").write_text(children)

    def relist(self) -> None:
        self.reader.follow(self.reader.threads())


@pytest.fixture
def proc(tmp_path: Path):
    made = Proc(tmp_path)
    yield made
    made.reader.close()


def test_the_thread_with_the_longest_wait_counts_and_each_wait_counts_once(proc: Proc) -> None:
    proc.thread(10, 10, 100)
    proc.thread(10, 11, 500)
    assert proc.reader.take() is None, "no thread is known"
    proc.relist()
    proc.thread(10, 10, 130)
    proc.thread(10, 11, 520)
    assert proc.reader.take() == 30 * MS
    assert proc.reader.take() == 0


def test_threads_of_child_processes_count(proc: Proc) -> None:
    proc.thread(10, 10, 0)
    proc.thread(10, 12, 0, children="20 ")
    proc.thread(20, 20, 0, children="30 ")
    proc.thread(30, 30, 0)
    proc.relist()
    proc.thread(30, 30, 40)
    assert proc.reader.take() == 40 * MS


def test_a_thread_that_starts_later_counts_from_then_on(proc: Proc) -> None:
    proc.thread(10, 10, 0)
    proc.relist()
    proc.thread(10, 11, 900)
    proc.relist()
    assert proc.reader.take() == 0
    proc.thread(10, 11, 905)
    assert proc.reader.take() == 5 * MS


def test_an_unusable_kernel_report_means_unknown(proc: Proc, tmp_path: Path) -> None:
    proc.thread(10, 10, None)
    proc.relist()
    assert proc.reader.take() is None
    away = CpuWaitReader(tmp_path / "no-proc", pid=10)
    away.follow(away.threads())
    assert away.take() is None


def test_main_threads_are_read_first_and_the_number_of_threads_is_bounded(proc: Proc) -> None:
    for thread in range(10, 11 + MAX_THREADS):
        proc.thread(10, thread, 0, children="900" if thread == 10 else "")
    proc.thread(900, 900, 0)
    threads = proc.reader.threads()
    assert len(threads) == MAX_THREADS
    assert threads[:2] == [(10, 10), (900, 900)]


def test_a_process_reads_its_own_threads() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel counts no waits")
    reader = CpuWaitReader()
    reader.follow(reader.threads())
    assert (reader.take() or 0) >= 0
    reader.close()
