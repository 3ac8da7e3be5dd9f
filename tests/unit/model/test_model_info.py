"""Tests of what is read from a model's folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from libs.contracts.errors import StartupError
from libs.model.info import Embedding, load_model_info
from libs.model.prepare import FILES, OTHER_FILES

CONFIG = {"max_position_embeddings": 2048, "vocab_size": 1000, "eos_token_id": 7, "hidden_size": 8}


def make_folder(folder: Path, config: dict[str, object] = CONFIG, weights: bytes = b"w" * 300_000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_builtin_model_needs_no_files() -> None:
    info = load_model_info("builtin:sim")
    assert (info.name, info.path, info.max_context_tokens, info.vocab_size) == ("sim", None, 8192, 260)
    assert info.eos_token_ids == {257, 259}


def test_a_folder_gives_context_vocabulary_and_name(tmp_path: Path) -> None:
    info = load_model_info(make_folder(tmp_path / "tiny"))
    assert (info.name, info.max_context_tokens, info.vocab_size) == ("tiny", 2048, 1000)
    assert info.eos_token_ids == {7}
    assert load_model_info(tmp_path / "tiny", "other").name == "other"


def test_generation_config_sets_the_end_tokens(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load_model_info(folder).eos_token_ids == {2, 5}


def test_revision_is_equal_for_copies_and_differs_for_other_weights_of_equal_size(tmp_path: Path) -> None:
    first = load_model_info(make_folder(tmp_path / "a")).revision
    copy = make_folder(tmp_path / "b", {"transformers_version": "9", **dict(reversed(CONFIG.items()))})
    assert load_model_info(copy).revision == first
    tuned = make_folder(tmp_path / "c", weights=b"w" * 150_000 + b"x" + b"w" * 149_999)
    assert load_model_info(tuned).revision != first
    assert load_model_info(make_folder(tmp_path / "d", {**CONFIG, "hidden_size": 9})).revision != first


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_one_line_that_names_it(tmp_path: Path, missing: str) -> None:
    folder = make_folder(tmp_path / "tiny")
    (folder / missing).unlink()
    with pytest.raises(StartupError) as caught:
        load_model_info(folder)
    assert missing.removeprefix("model") in caught.value.message
    assert "\n" not in caught.value.message


def test_a_shard_that_was_not_downloaded_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    (folder / "model.safetensors").rename(folder / shards[0])
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"layer.{number}": shard for number, shard in enumerate(shards)}})
    )
    with pytest.raises(StartupError, match=f"lacks {shards[1]} and 1 more: download the model again"):
        load_model_info(folder)
    for shard in shards[1:]:
        (folder / shard).write_bytes(b"w")
    assert load_model_info(folder).vocab_size == 1000


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab_size": 3}', '{"vocab_size": 3, "n_positions": 4}'])
def test_an_invalid_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = make_folder(tmp_path / "tiny")
    (folder / "config.json").write_text(text)
    with pytest.raises(StartupError):
        load_model_info(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no-such"):
        load_model_info(tmp_path / "no-such")


def test_weights_stored_in_two_formats_are_fetched_once() -> None:
    there = ["model-1.safetensors", "config.json", "original/model.safetensors", "original/config.json", "model.bin"]
    fetched = filter_repo_objects(there, allow_patterns=list(FILES), ignore_patterns=list(OTHER_FILES))
    assert list(fetched) == ["model-1.safetensors", "config.json"]


def st_folder(folder: Path, pooling: dict[str, Any], *modules: str) -> Path:
    """A folder with Sentence Transformers' files; `modules` beside the first two."""
    make_folder(folder)
    listed = [("", "Transformer"), ("1_Pooling", "Pooling"), *(("", each) for each in modules)]
    types = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in listed]
    (folder / "modules.json").write_text(json.dumps(types))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "chosen"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
    ],
)
def test_a_sentence_transformers_folder_names_its_pooling(tmp_path: Path, pooling: dict[str, Any], chosen: str) -> None:
    found = load_model_info(st_folder(tmp_path, pooling)).embedding
    assert (found.pooling, found.normalizes, found.size, found.unserved) == (chosen, False, 8, "")


def test_a_model_without_pooling_files_uses_the_last_token_and_normalises(tmp_path: Path) -> None:
    assert load_model_info(make_folder(tmp_path)).embedding == Embedding(pooling="last", normalizes=True, size=8)


@pytest.mark.parametrize(
    ("pooling", "modules"),
    [
        ({"pooling_mode": "cls"}, ("Normalize",)),
        ({"pooling_mode_max_tokens": True}, ()),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, ()),
        ({"pooling_mode": "mean"}, ("Dense",)),
    ],
)
def test_an_unsupported_pooling_is_named(tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...]) -> None:
    assert load_model_info(st_folder(tmp_path, pooling, *modules)).embedding.unserved


def test_vectors_are_shortened_only_if_the_model_was_trained_for_it(tmp_path: Path) -> None:
    plain = load_model_info(st_folder(tmp_path, {"pooling_mode": "mean"}, "Normalize")).embedding
    assert plain.normalizes and plain.fault(4) and not plain.fault(8) and not plain.fault(None)
    any_size, some_sizes = replace(plain, shortens=True), replace(plain, shortens=True, sizes=frozenset({4}))
    assert not any_size.fault(3) and any_size.fault(9)
    assert not some_sizes.fault(4) and some_sizes.fault(3) and not some_sizes.fault(8)


ENCODER = {
    "model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 514, "vocab_size": 9,
    "hidden_size": 8,
}  # fmt: skip
CROSS_ENCODER = {**ENCODER, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def encoder_folder(folder: Path, config: dict[str, Any], pooling: dict[str, Any], *modules: str) -> Path:
    st_folder(folder, pooling, *modules)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_encoder_generates_nothing_and_its_context_is_all_prompt(tmp_path: Path) -> None:
    info = load_model_info(make_folder(tmp_path / "a", ENCODER))
    assert (info.encodes, info.eos_token_ids) == (True, frozenset())
    assert (info.max_context_tokens, info.request_tokens) == (514, 515)
    assert info.embedding == Embedding("mean", normalizes=False, size=8)
    padded = load_model_info(make_folder(tmp_path / "b", {**ENCODER, "model_type": "roberta", "pad_token_id": 1}))
    assert padded.max_context_tokens == 512
    small = make_folder(tmp_path / "c", ENCODER)
    (small / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    assert load_model_info(small).max_context_tokens == 256
    # Sentence Transformers 6 leaves the length to the tokenizer's file, which older files state beside their own.
    (small / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 200}))
    assert load_model_info(small).max_context_tokens == 256
    (small / "sentence_bert_config.json").write_text("{}")
    assert load_model_info(small).max_context_tokens == 200
    (small / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": None}))
    assert load_model_info(small).max_context_tokens == 200
    (small / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    assert load_model_info(small).max_context_tokens == 514
    decoder = load_model_info(make_folder(tmp_path / "d", {**ENCODER, "is_decoder": True, "eos_token_id": 1}))
    assert not decoder.encodes and decoder.request_tokens == decoder.max_context_tokens == 514


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, {"pooling_mode": "cls"}]
)
def test_an_encoder_pools_its_first_token_if_its_files_say_so(tmp_path: Path, pooling: dict[str, Any]) -> None:
    found = load_model_info(encoder_folder(tmp_path, ENCODER, pooling, "Normalize")).embedding
    assert (found.pooling, found.normalizes, found.unserved) == ("cls", True, "")


def test_a_prompt_that_the_files_name_by_default_precedes_each_text(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    cases: list[tuple[dict[str, Any], str, bool]] = [
        ({}, "query: ", False),
        ({"include_prompt": True}, "query: ", False),
        ({"include_prompt": False}, "", True),
    ]
    for place, (pooling, prompt, unserved) in enumerate(cases):
        folder = encoder_folder(tmp_path / str(place), ENCODER, {"pooling_mode": "mean", **pooling})
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        found = load_model_info(folder).embedding
        assert bool(found.unserved) is unserved
        assert unserved or found.prompt == prompt
    (folder / "config_sentence_transformers.json").write_text(json.dumps({**prompts, "default_prompt_name": None}))
    assert (load_model_info(folder).embedding.prompt, load_model_info(folder).embedding.unserved) == ("", "")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 4}))
    assert "truncate_dim" in load_model_info(folder).embedding.unserved


def test_an_unsupported_part_of_an_encoder_is_named(tmp_path: Path) -> None:
    several = encoder_folder(tmp_path / "several", ENCODER, {"pooling_mode": ["cls", "mean"]})
    assert "several ways" in load_model_info(several).embedding.unserved
    last = encoder_folder(tmp_path / "a", ENCODER, {"pooling_mode": "lasttoken"})
    assert "lasttoken" in load_model_info(last).embedding.unserved
    lower = encoder_folder(tmp_path / "b", ENCODER, {"pooling_mode": "mean"})
    (lower / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert "do_lower_case" in load_model_info(lower).embedding.unserved


@pytest.mark.parametrize(
    ("named", "sigmoid", "unserved"),
    [
        ({}, True, ""),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False, ""),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True, ""),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, True, "activation Tanh"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, True, "3 labels"),
        ({"id2label": None}, True, "2 labels"),
    ],
)
def test_a_cross_encoders_config_names_its_head(
    tmp_path: Path, named: dict[str, Any], sigmoid: bool, unserved: str
) -> None:
    found = load_model_info(make_folder(tmp_path, {**CROSS_ENCODER, **named})).embedding
    assert (found.pooling, found.size, found.normalizes, found.sigmoid) == ("score", 1, False, sigmoid)
    assert unserved in found.unserved and bool(unserved) is bool(found.unserved)


DENSE = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


def dense_folder(folder: Path, dense: dict[str, Any], modules: tuple[str, ...]) -> Path:
    """An encoder with these modules behind its pooling, each of them Dense with these settings if not Normalize."""
    encoder_folder(folder, ENCODER, {"pooling_mode": "mean"})
    listed = json.loads((folder / "modules.json").read_text())
    for place, name in enumerate(modules, 2):
        listed.append({"path": f"{place}_{name}", "type": f"sentence_transformers.models.{name}"})
        (folder / f"{place}_{name}").mkdir()
        (folder / f"{place}_{name}" / "config.json").write_text(json.dumps(dense))
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize("outside", ["../2_Dense", "/2_Dense"])
def test_a_module_outside_the_models_folder_is_refused(tmp_path: Path, outside: str) -> None:
    folder = dense_folder(tmp_path / "model", DENSE, ("Dense",))
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(DENSE))
    listed = (folder / "modules.json").read_text().replace("2_Dense", outside)
    (folder / "modules.json").write_text(listed)
    with pytest.raises(StartupError, match="outside"):
        load_model_info(folder)


def test_a_dense_layer_gives_an_encoders_vectors_its_size(tmp_path: Path) -> None:
    found = load_model_info(dense_folder(tmp_path, DENSE, ("Dense", "Normalize"))).embedding
    assert (found.size, found.normalizes, found.unserved) == (4, True, "")
    assert [(each.folder.name, each.activation) for each in found.dense] == [("2_Dense", "Tanh")]


@pytest.mark.parametrize(
    ("change", "modules", "reason"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softplus"}, ("Dense",), "the activation Softplus"),
        ({"in_features": 9}, ("Dense",), "takes vectors of 9, and they have 8"),
        ({}, ("Dense", "Dense"), "takes vectors of 8, and they have 4"),
        ({}, ("Normalize", "Dense"), "not in the order"),
        ({"out_features": None}, ("Dense",), "names no sizes"),
        ({"module_input_name": "token_embeddings"}, ("Dense",), "does not map vectors"),
    ],
)
def test_a_dense_layer_that_is_not_computed_is_named(
    tmp_path: Path, change: dict[str, Any], modules: tuple[str, ...], reason: str
) -> None:
    assert reason in load_model_info(dense_folder(tmp_path, {**DENSE, **change}, modules)).embedding.unserved


@pytest.mark.parametrize(("name", "sigmoid"), [("linear.Identity", False), ("activation.Sigmoid", True)])
def test_a_cross_encoders_activation_stands_in_the_files_of_later_releases(
    tmp_path: Path, name: str, sigmoid: bool
) -> None:
    make_folder(tmp_path, CROSS_ENCODER)
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"activation_fn": f"torch.nn.modules.{name}"})
    )
    assert load_model_info(tmp_path).embedding.sigmoid is sigmoid
