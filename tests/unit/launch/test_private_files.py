"""Tests that files with prompts, answers, tokens or KV are private to their user under any umask."""

import datetime
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from libs.contracts.errors import StartupError, StoreUnavailable
from libs.engine.kv_shared_pool import PoolFile
from libs.filestore.local import LocalFiles
from libs.keys.store import FileKeys
from libs.launch.processes.local import ProcessLauncher
from libs.launch.processes.port import ChildSpec
from libs.runtime.net.authority import issue
from libs.runtime.paths import create_private, private_folder
from services.metrics.history import HistoryFile


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Set the widest umask, since nothing may rely on it."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of the folder and all in it, by name."""
    found = {".": folder, **{str(path.relative_to(folder)): path for path in folder.rglob("*")}}
    return {name: stat.S_IMODE(path.stat().st_mode) for name, path in found.items()}


def assert_closed(folder: Path) -> None:
    found = modes(folder)
    wrong = {name: oct(mode) for name, mode in found.items() if mode & 0o077}
    assert len(found) > 1 and not wrong


async def test_files_drafts_and_metadata_are_private(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files", max_bytes=10_000)
    async with files.draft("file-1", max_bytes=1_000) as draft:
        await draft.write(b"a prompt")
        assert_closed(tmp_path / "files")
        await draft.keep(name="lines.jsonl", purpose="batch")
    assert_closed(tmp_path / "files")
    assert {"file-1/content", "file-1/info.json"} <= modes(tmp_path / "files").keys()


async def test_a_store_that_others_could_read_has_an_unchanged_mode_and_private_contents(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir(mode=0o755)
    with capture_logs() as logs:
        files = LocalFiles(folder, max_bytes=10_000)
    async with files.draft("file-1", max_bytes=1_000) as draft:
        await draft.write(b"a prompt")
        await draft.keep(name="lines.jsonl", purpose="batch")
    assert {name: oct(mode) for name, mode in modes(folder).items() if mode & 0o077} == {".": "0o755"}
    assert [(entry["folder"], entry["log_level"]) for entry in logs] == [(str(folder), "warning")]


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o1777])
def test_an_existing_folder_that_others_can_enter_is_refused_and_never_changed(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    with pytest.raises(PermissionError, match=rf"mode {mode:04o}.* mode 0700 is wanted"):
        private_folder(shared)
    with capture_logs() as logs:
        private_folder(shared, allowed=0o077)
    assert stat.S_IMODE(shared.stat().st_mode) == mode
    assert [entry["log_level"] for entry in logs] == ["warning"]


async def test_keys_in_a_folder_of_others_are_refused_and_its_mode_is_unchanged(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    etc.mkdir(mode=0o755)
    keys = FileKeys(etc / "keys.json")
    with pytest.raises(StoreUnavailable, match="mode 0700 is wanted"):
        await keys.change(lambda book: book)
    assert stat.S_IMODE(etc.stat().st_mode) == 0o755
    assert list(etc.iterdir()) == []
    own = FileKeys(etc / "fulcrum" / "keys.json")
    await own.change(lambda book: book)
    assert_closed(etc / "fulcrum")


def test_a_folder_of_certificates_may_be_readable_to_others_but_not_writable(
    tmp_path: Path,
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    folder = tmp_path / "tls"
    folder.mkdir(mode=0o755)
    issue(folder, "local", now=now, names=["localhost"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    open_to_others = {path.name for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) & 0o077}
    assert open_to_others == {"ca.pem"}
    folder.chmod(0o777)
    with pytest.raises(StartupError, match="mode 0700 is wanted"):
        issue(folder, "local", now=now, names=["localhost"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777


def test_a_file_named_as_history_by_mistake_has_an_unchanged_mode(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0\n")
    path.chmod(0o644)
    HistoryFile(path, "local", ()).close()
    (aside,) = tmp_path.glob("passwd.unreadable-*")
    assert stat.S_IMODE(aside.stat().st_mode) == 0o644


def test_a_file_that_others_could_read_is_private_after_a_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"longer than before")
    path.chmod(0o644)
    with create_private(path) as file:
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"new"


@pytest.mark.system
async def test_logs_are_private_even_in_a_folder_that_is_not(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir(mode=0o755)
    child = await ProcessLauncher(logs).start(ChildSpec("probe", ("python", "-c", "pass"), {}))
    await child.wait()
    assert {name: oct(mode) for name, mode in modes(logs).items()} == {".": "0o755", "probe.log": "0o600"}


def test_the_history_file_and_its_folder_are_private(tmp_path: Path) -> None:
    path = tmp_path / "history" / "history.sqlite"
    HistoryFile(path, "local", ()).close()
    path.chmod(0o644)
    history = HistoryFile(path, "local", ())
    assert_closed(path.parent)
    assert len(list(path.parent.iterdir())) > 1  # while it is open, what SQLite writes beside it
    history.close()


def test_shared_memory_of_workers_is_private(tmp_path: Path) -> None:
    pool = PoolFile(tmp_path, "fulcrum-kv-w-1", blocks=1, block_bytes=4096)
    assert stat.S_IMODE((tmp_path / "fulcrum-kv-w-1").stat().st_mode) == 0o600
    pool.close()
