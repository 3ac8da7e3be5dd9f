"""Tests of LoRA adapters in one batch: each sequence is computed as by a model of its own."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, SamplingParams
from libs.engine.runner import Batch, Chunk
from libs.engine.torch.model import Adapters
from libs.engine.torch.runner import TorchRunner
from libs.testing.engines.adapters import merged_tokens, write_adapter
from libs.testing.engines.real_model import write_random_llama

pytestmark = pytest.mark.torch

TOKENS = 12
_NONE: Mapping[str, Path] = MappingProxyType({})
PROMPT = np.array([5, 9, 17, 200, 31, 8], np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("model"), eos_token_id=258)


async def started(model: Path, adapters: Mapping[str, Path], most: int = 8) -> TorchRunner:
    config = EngineConfig(
        model, "m", device="cpu", threads=1, kv_memory_mb=8, dtype="float32", adapters=adapters, max_adapters=most
    )
    runner = TorchRunner(config)
    await runner.load(EngineIdentity("one", 1, ""), lambda _stage, _fraction: None)
    return runner


async def answers(
    runner: TorchRunner, adapters: tuple[str, ...], sources: Mapping[str, Path] = _NONE
) -> list[list[int]]:
    """Return greedy tokens of the same prompt under each adapter, side by side in every step; `sources`: folders
    that come with the sequences."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, min_tokens=TOKENS)
    tokens = [list(PROMPT) for _ in adapters]
    for _ in range(TOKENS):
        chunks = []
        for number, (name, so_far) in enumerate(zip(adapters, tokens, strict=True)):
            history = np.array(so_far, np.int32)
            start = 0 if len(history) == len(PROMPT) else len(history) - 1
            table = np.arange(number * 4, number * 4 + 4, dtype=np.int32)
            own = (history[start:], start, table, True, params, history, len(PROMPT))
            chunks.append(Chunk(number, *own, adapter=name, adapter_source=str(sources.get(name, ""))))
        sampled = await runner.run(Batch(tuple(chunks)))
        for number, so_far in enumerate(tokens):
            assert not sampled[number].fault
            so_far.append(sampled[number].token_id)
    return [so_far[len(PROMPT) :] for so_far in tokens]


async def test_sequences_of_several_adapters_share_a_step(model: Path, tmp_path: Path) -> None:
    folders = {name: write_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("sql", "chat"))}
    runner = await started(model, folders)
    found = await answers(runner, ("sql", "", "chat", "sql"))
    await runner.close()
    truth = {name: merged_tokens(model, folders.get(name), PROMPT, TOKENS) for name in ("sql", "", "chat")}
    assert found == [truth["sql"], truth[""], truth["chat"], truth["sql"]]
    assert len({tuple(each) for each in truth.values()}) == 3, "adapters that change nothing show nothing"


async def test_adapters_come_and_go_while_the_engine_runs(model: Path, tmp_path: Path) -> None:
    names = ("sql", "chat", "code")
    folders = {name: write_adapter(tmp_path / name, model, seed) for seed, name in enumerate(names)}
    runner = await started(model, {}, most=1)
    truth = {name: merged_tokens(model, folders.get(name), PROMPT, TOKENS) for name in (*names, "")}
    assert await answers(runner, ("",)) == [truth[""]]
    assert await answers(runner, ("sql", ""), folders) == [truth["sql"], truth[""]]
    assert await answers(runner, ("chat", "code"), folders) == [truth["chat"], truth["code"]], "more than fit the cache"
    assert await answers(runner, ("sql",), folders) == [truth["sql"]], "it had to go, and is read again"
    table, params = np.arange(4, dtype=np.int32), SamplingParams(temperature=0.0)
    lost = Chunk(1, PROMPT, 0, table, True, params, PROMPT, len(PROMPT), adapter="lost", adapter_source="/nowhere")
    assert "/nowhere" in (await runner.run(Batch((lost,))))[1].fault
    assert await answers(runner, ("",)) == [truth[""]]
    await runner.close()


def test_adapters_are_cached_as_memory_allows_and_the_least_recently_used_is_evicted(
    model: Path, tmp_path: Path
) -> None:
    names = ("a", "b", "c")
    folders = {name: write_adapter(tmp_path / name, model, seed) for seed, name in enumerate(names)}
    adapters = Adapters(AutoModelForCausalLM.from_pretrained(model), folders, most=2)

    def use(*wanted: str) -> tuple[str, ...]:
        chunks = [
            Chunk(at, PROMPT, 0, PROMPT, False, SamplingParams(), PROMPT, len(PROMPT), adapter=name)
            for at, name in enumerate(wanted)
        ]
        assert not adapters.use(chunks)
        return adapters.kept

    assert use("a") == ("a",)
    assert use("b", "a") == ("b", "a")
    assert use("c") == ("a", "c")
    assert use("a", "b", "c") == ("a", "b", "c"), "a step has all that it needs"
    assert use("") == ("b", "c")


async def test_an_unreadable_adapter_fails_only_its_own_sequences(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql", model, 1)
    runner = await started(model, {"sql": folder})
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    params = SamplingParams(temperature=0.0)
    table = np.arange(4, dtype=np.int32)
    broken = Chunk(1, PROMPT, 0, table, True, params, PROMPT, len(PROMPT), adapter="sql")
    whole = Chunk(2, PROMPT, 0, table + 4, True, params, PROMPT, len(PROMPT))
    sampled = await runner.run(Batch((broken, whole)))
    await runner.close()
    assert "adapter 'sql'" in sampled[1].fault and not sampled[2].fault
    assert sampled[2].token_id == merged_tokens(model, None, PROMPT, 1)[0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "IA3"}, "plain LoRA"),
        ({"r": None}, "read"),
    ],
)
async def test_an_adapter_of_an_unsupported_kind_is_refused_at_the_start(
    model: Path, tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    folder = write_adapter(tmp_path / "odd", model, 1, **config)
    with pytest.raises(StartupError, match=reason):
        await started(model, {"odd": folder})
