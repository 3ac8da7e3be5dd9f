"""Tests of encoders on the torch engine: vectors and scores equal transformers' in any batch."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from libs.contracts.errors import KvMismatch, StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity, Pooling, SamplingParams
from libs.engine.runner import Batch, Chunk, Sampled
from libs.engine.torch.encoder import MAX_PADDING, groups_of
from libs.engine.torch.runner import TorchRunner
from libs.model.info import ENCODERS, load_model_info
from libs.testing.engines.encoder_model import POSITIONS, dense_output, write_random_encoder

pytestmark = pytest.mark.torch

LENGTHS = (POSITIONS, 9, 30, 2, 8)
GREEDY = SamplingParams(temperature=0.0)
TYPES = sorted(ENCODERS - {"camembert"})  # it is RoBERTa under another name


def prompts() -> list[NDArray[np.int32]]:
    random = np.random.default_rng(4)
    return [random.integers(2, 16, length, dtype=np.int32) for length in LENGTHS]


def compute(folder: Path, pooling: Pooling, second_from: int = 0) -> list[Sampled]:
    """Return the results of one step with a prompt of each of `LENGTHS`."""

    async def run() -> list[Sampled]:
        runner = TorchRunner(EngineConfig(folder, "encoder", device="cpu", threads=1))
        capabilities = await runner.load(EngineIdentity("one", 1, ""), lambda _stage, _fraction: None)
        assert pooling in capabilities.pools and capabilities.whole_prompts and not capabilities.generates
        table = np.arange(8, dtype=np.int32)
        chunks = [
            Chunk(place, ids, 0, table, True, GREEDY, ids, len(ids), pooling=pooling, second_from=second_from)
            for place, ids in enumerate(prompts())
        ]
        found = await runner.run(Batch(tuple(chunks)))
        assert runner.read_blocks(table) == ()
        with pytest.raises(KvMismatch):
            runner.write_blocks(table[:1], [memoryview(b"kv")], [0])
        await runner.close()
        return [found[place] for place in range(len(LENGTHS))]

    return asyncio.run(run())


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS])
def test_vectors_of_one_step_equal_those_of_each_prompt_alone(
    tmp_path: Path, model_type: str, pooling: Pooling
) -> None:
    folder = write_random_encoder(tmp_path, model_type)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for ids, sampled in zip(prompts(), compute(folder, pooling), strict=True):
        with torch.inference_mode():
            states = model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        expected = states.sum(dim=0) if pooling is Pooling.MEAN else states[0]
        assert sampled.pooled == pytest.approx(expected.numpy(), abs=1e-4 * len(ids))
        assert np.linalg.norm(expected.numpy()) > 0.1


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS])
@pytest.mark.parametrize("stored", ["model.safetensors", "pytorch_model.bin"])
def test_a_pooled_vector_passes_the_layers_behind_it(tmp_path: Path, pooling: Pooling, stored: str) -> None:
    dense = [(24, True, "torch.nn.modules.activation.Tanh"), (16, False, "torch.nn.modules.linear.Identity")]
    name = "mean_tokens" if pooling is Pooling.MEAN else "cls_token"
    folder = write_random_encoder(tmp_path, pooling=name, dense=dense, normalizes=True)
    info = load_model_info(folder)
    assert (info.embedding.size, info.embedding.normalizes, info.embedding.unserved) == (16, True, "")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for ids in prompts():
        with torch.inference_mode():
            states = model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        vector = states.mean(dim=0) if pooling is Pooling.MEAN else states[0]
        # The core divides a mean by the number of tokens.
        expected.append(dense_output(folder, vector) * (len(ids) if pooling is Pooling.MEAN else 1))
    if stored != "model.safetensors":
        for file in tmp_path.glob("*_Dense/model.safetensors"):
            torch.save(load_file(file), file.with_name(stored))
            file.unlink()
    for ids, vector, sampled in zip(prompts(), expected, compute(folder, pooling), strict=True):
        assert sampled.pooled == pytest.approx(vector.numpy(), abs=1e-4 * len(ids))
        assert np.linalg.norm(vector.numpy()) > 0.1


def test_layers_that_do_not_fit_their_files_are_refused(tmp_path: Path) -> None:
    folder = write_random_encoder(tmp_path, pooling="mean_tokens", dense=[(24, True, "torch.nn.Tanh")])
    save_file({"linear.weight": torch.ones(24, 31)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(StartupError, match="cannot read the module Dense in "):
        compute(folder, Pooling.MEAN)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
def test_scores_of_pairs_equal_those_of_the_head(tmp_path: Path, model_type: str) -> None:
    folder = write_random_encoder(tmp_path, model_type, labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for second_from in (0, 1):
        for ids, sampled in zip(prompts(), compute(folder, Pooling.SCORE, second_from), strict=True):
            types = torch.full((1, len(ids)), 0 if model_type == "roberta" else second_from)
            types[0, :second_from] = 0
            with torch.inference_mode():
                inputs = {"input_ids": torch.from_numpy(ids.astype(np.int64))[None], "token_type_ids": types}
                expected = model(**inputs).logits[0]
            assert sampled.pooled == pytest.approx(expected.numpy(), abs=1e-4)


def test_a_cross_encoder_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = write_random_encoder(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"BertModel"', '"BertForSequenceClassification"'))
    text = config.read_text().rstrip().removesuffix("}")
    config.write_text(text + ', "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}')
    with pytest.raises(StartupError, match="lack classifier"):
        compute(folder, Pooling.SCORE)


@given(st.lists(st.integers(1, 600), max_size=40))
def test_rows_are_padded_within_the_bound(lengths: list[int]) -> None:
    groups = groups_of(lengths)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[place] for place in group)
        assert longest * len(group) <= MAX_PADDING * sum(lengths[place] for place in group)
