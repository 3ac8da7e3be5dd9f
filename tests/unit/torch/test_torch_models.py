"""Tests of paged attention on small random models of several kinds, and of refused models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from libs.contracts.errors import KvLost, KvMismatch, StartupError  # noqa: E402
from libs.engine.config import EngineConfig  # noqa: E402
from libs.engine.kv_transfer import block_checksum  # noqa: E402
from libs.engine.port import EngineIdentity, SamplingParams  # noqa: E402
from libs.engine.runner import Batch, Chunk  # noqa: E402
from libs.engine.torch.model import FewRowsHead  # noqa: E402
from libs.engine.torch.runner import TorchRunner  # noqa: E402

IDENTITY = EngineIdentity("one", 1, "")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
GREEDY = SamplingParams(temperature=0.0, logprobs=True)
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Save a random model of a config class, and return its folder."""

    def save(config_class: str, **changes: Any) -> Path:
        torch.manual_seed(1)
        config = getattr(transformers, config_class)(**(SMALL | changes))
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


def ignore(_stage: str, _fraction: float) -> None:
    """A progress callback."""


def runner_of(folder: Path | None, **changes: Any) -> TorchRunner:
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "block_size_tokens": 4, "kv_memory_mb": 1}
    return TorchRunner(EngineConfig(folder, "small", **(settings | changes)))


def chunk(sequence_id: int, tokens: np.ndarray, start: int, end: int, table: np.ndarray) -> Chunk:
    history = tokens[:end].astype(np.int32)
    return Chunk(sequence_id, history[start:], start, table.astype(np.int32), True, GREEDY, history, end)


async def refusal(runner: TorchRunner) -> str:
    with pytest.raises(StartupError) as caught:
        await runner.load(IDENTITY, ignore)
    await runner.close()
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        ("LlamaConfig", {"num_key_value_heads": 2}),
        ("Qwen2Config", {"num_key_value_heads": 1}),
        ("Qwen3Config", {"num_key_value_heads": 4, "head_dim": 16}),
        ("GPT2Config", {"n_inner": 48}),
    ],
)
async def test_a_mixed_batch_equals_each_sequence_alone(make: Make, config_class: str, changes: dict[str, Any]):
    """Decodes of very different length and two prompt chunks, over scattered blocks, against the model's own sdpa."""
    folder = make(config_class, **changes)
    runner = runner_of(folder)
    capabilities = await runner.load(IDENTITY, ignore)
    rng = np.random.default_rng(3)
    order = rng.permutation(capabilities.kv_blocks)
    known = [40, 1, 3, 17, 11, 0]  # tokens with KV
    new = [1, 1, 1, 1, 9, 6]
    prompts = [rng.integers(3, 99, before + tokens) for before, tokens in zip(known, new, strict=True)]
    tables = [order[16 * i : 16 * i + 16] for i in range(len(prompts))]
    await runner.run(Batch(tuple(chunk(i, prompts[i], 0, known[i], tables[i]) for i in range(len(new)) if known[i])))
    last = Batch(tuple(chunk(i, prompts[i], known[i], len(prompts[i]), tables[i]) for i in range(len(new))))
    sampled = await runner.run(last)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        expected = reference(torch.from_numpy(prompt)[None]).logits[0, -1].detach().log_softmax(-1)
        assert sampled[i].token_id == int(expected.argmax())
        assert sampled[i].logprob is not None
        assert sampled[i].logprob.logprob == pytest.approx(float(expected.max()), abs=1e-4)
    await runner.close()


async def test_a_batch_without_samples_returns_nothing(make: Make):
    runner = runner_of(make("LlamaConfig"))
    await runner.load(IDENTITY, ignore)
    one = Chunk(1, np.ones(5, np.int32), 0, np.arange(2, dtype=np.int32), False, GREEDY, np.ones(5, np.int32), 5)
    assert await runner.run(Batch((one,))) == {}
    assert await runner.run(Batch(())) == {}
    await runner.close()


async def test_capabilities_describe_the_pool(make: Make):
    runner = runner_of(make("LlamaConfig", num_key_value_heads=2))
    found = await runner.load(IDENTITY, ignore)
    assert found.kv_block_bytes == 2 * 2 * 4 * 2 * 8 * 4  # layers, k and v, block, heads, head_dim, float32
    assert found.kv_blocks == 2**20 // found.kv_block_bytes
    assert (found.max_context_tokens, found.vocab_size) == (128, 99)
    assert found.kv_layout == "kv2/float32/2x4x2x2x8"
    assert (runner.name, runner.device, runner.eos_token_ids) == ("torch", "cpu", {2})
    await runner.close()


async def test_blocks_are_read_and_written_in_the_given_order(make: Make):
    runner = runner_of(make("LlamaConfig"))
    size = (await runner.load(IDENTITY, ignore)).kv_block_bytes
    noise = memoryview(np.random.default_rng(0).bytes(3 * size))
    data = [noise[:size], noise[size : 2 * size], noise[2 * size :]]
    checksums = [*map(block_checksum, data)]
    runner.write_blocks(np.array([9, 2, 5], np.int32), data, checksums)
    assert [*runner.read_blocks(np.array([9, 2, 5], np.int32))] == data
    assert runner.read_blocks(np.array([5], np.int32)) == (data[2],)
    for wrong in (data, [noise[:5]]):
        with pytest.raises(KvMismatch):
            runner.write_blocks(np.array([1], np.int32), wrong, checksums[: len(wrong)])
    for reported in ([], [checksums[1]]):
        with pytest.raises(KvLost):
            runner.write_blocks(np.array([5], np.int32), data[:1], reported)
    assert not any(runner.read_blocks(np.array([5], np.int32))[0])  # nothing that is not finite stays in the pool
    await runner.close()


async def test_progress_reports_every_stage_to_its_end(make: Make):
    seen: list[tuple[str, float]] = []
    runner = runner_of(make("LlamaConfig"))
    await runner.load(IDENTITY, lambda stage, fraction: seen.append((stage, fraction)))
    stages = ["importing torch", "loading weights", "allocating KV", "warming up"]
    assert [stage for stage, fraction in seen if fraction == 1.0] == stages
    await runner.close()


async def test_close_can_be_repeated_and_needs_no_load():
    runner = runner_of(None)
    await runner.close()
    await runner.close()


@pytest.mark.parametrize(
    ("config_class", "changes", "named"),
    [
        ("MistralConfig", {"sliding_window": 8}, "sliding_window"),
        ("Gemma2Config", {"head_dim": 8}, "sliding_attention"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
async def test_models_that_cannot_be_paged_are_refused(
    make: Make, config_class: str, changes: dict[str, Any], named: str
):
    assert named in await refusal(runner_of(make(config_class, **changes)))


async def test_a_layer_without_kv_is_refused(make: Make):
    """A state-space layer would run and forget: the pool shows that it wrote nothing."""
    folder = make("LlamaConfig")
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.zeros_(weights.model.layers[1].self_attn.v_proj.weight)
    weights.save_pretrained(folder)
    assert "layer 1 " in await refusal(runner_of(folder))


async def test_an_invalid_folder_or_setting_is_named(make: Make, tmp_path: Path):
    assert str(tmp_path / "absent") in await refusal(runner_of(tmp_path / "absent"))
    assert "model path" in await refusal(runner_of(None))
    folder = make("LlamaConfig")
    assert "kv_memory_mb=0" in await refusal(runner_of(folder, kv_memory_mb=0))
    assert "lower it" in await refusal(runner_of(folder, kv_memory_mb=10**9))
    assert "device=tpu" in await refusal(runner_of(folder, device="tpu"))
    assert "device=cuda:63" in await refusal(runner_of(folder, device="cuda:63"))


async def test_missing_or_broken_weights_are_named(make: Make):
    folder = make("LlamaConfig")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "lack model.layers.2." in await refusal(runner_of(folder))
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    assert "cannot load the model" in await refusal(runner_of(folder))


@pytest.mark.parametrize("rows", [1, 3, 4, 32, 33])
def test_the_head_gives_the_same_result_for_any_number_of_rows(rows: int):
    """oneDNN takes over for some: only the order of sums may differ."""
    linear = torch.nn.Linear(48, 999)
    hidden = torch.randn(1, rows, 48)
    assert torch.allclose(FewRowsHead(linear)(hidden), linear(hidden), atol=1e-5)


async def test_an_unknown_dtype_is_refused(make: Make):
    assert "use auto, float32 or bfloat16" in await refusal(runner_of(make("LlamaConfig"), dtype="int4"))
