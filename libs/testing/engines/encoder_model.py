"""Small encoders and cross-encoders with random weights of published architectures, and a WordPiece tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

SEED: Final = 7
POSITIONS: Final = 64
SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS: Final = ("red", "fox", "slow", "dog", "runs", "over", "the", "hill", "a", "##es", "##s", "##ing")
_SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0, "max_position_embeddings": POSITIONS,
}  # fmt: skip
_OWN_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    # Its positions begin after the padding token's id, as for RoBERTa.
    "mpnet": {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 1},
    "roberta": {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "modernbert": {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "local_attention": 8},
}


def write_random_encoder(
    folder: Path,
    model_type: str = "bert",
    *,
    labels: int = 0,
    pooling: str = "",
    normalizes: bool = False,
    dense: Sequence[tuple[int, bool, str]] = (),
) -> Path:
    """Write a model of this type, as a cross-encoder if it has `labels`, else with files that name its pooling.

    Without `pooling` there are no files of Sentence Transformers. `dense` has the size, the bias, and the activation of
    each layer behind the pooling.
    """
    torch.manual_seed(SEED)
    shape = {**_SHAPE, **_OWN_SHAPES.get(model_type, {})}
    config = AutoConfig.for_model(model_type, **shape, **({"num_labels": labels} if labels else {}))
    model = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config)
    with torch.no_grad():  # random weights as they are drawn give every text nearly the same vector
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    word_piece_tokenizer().save(str(folder / "tokenizer.json"))
    if pooling:
        modules = ["Transformer", "Pooling", *["Dense"] * len(dense), *(["Normalize"] if normalizes else [])]
        listed = [
            {"idx": place, "name": str(place), "path": f"{place}_{name}" if place else "", "type": f"x.{name}"}
            for place, name in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    inputs = shape["hidden_size"]
    for place, (outputs, bias, activation) in enumerate(dense, 2):
        _write_dense(folder / f"{place}_Dense", inputs, outputs, bias=bias, activation=activation)
        inputs = outputs
    return folder


def _write_dense(folder: Path, inputs: int, outputs: int, *, bias: bool, activation: str) -> None:
    folder.mkdir()
    config = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(config))
    linear = torch.nn.Linear(inputs, outputs, bias=bias)
    save_file({f"linear.{name}": each for name, each in linear.state_dict().items()}, folder / "model.safetensors")


def word_piece_tokenizer() -> Tokenizer:
    """Return a tokenizer as BERT's, of a few words, that would cut and pad as those in published folders do."""
    vocabulary = {word: place for place, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def plain_tokenizer(model: Path) -> Tokenizer:
    """Return the tokenizer in a folder, which neither cuts nor pads."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def dense_output(model: Path, vector: torch.Tensor) -> torch.Tensor:
    """Return what the modules Dense in a folder make of a pooled vector, by torch's functions."""
    for folder in sorted(model.glob("*_Dense")):
        config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        found = weights["linear.weight"] @ vector + weights.get("linear.bias", 0)
        name = config["activation_function"].rsplit(".", 1)[-1]
        vector = {"Tanh": torch.tanh, "Identity": torch.clone, "GELU": torch.nn.functional.gelu}[name](found)
    return vector


def vectors(model: Path, texts: list[str]) -> list[list[float]]:
    """Return the normalised first token's state of each text, by transformers."""
    network, tokenizer = AutoModel.from_pretrained(model, dtype=torch.float32).eval(), plain_tokenizer(model)
    with torch.inference_mode():
        states = [network(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, 0] for text in texts]
    return [(state / state.norm()).tolist() for state in states]


def scores(model: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """Return the sigmoid of the head's output for each pair of texts, by transformers."""
    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    found, tokenizer = [], plain_tokenizer(model)
    for pair in pairs:
        encoded = tokenizer.encode(*pair)
        assert 1 in encoded.type_ids
        with torch.inference_mode():
            output = network(
                input_ids=torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])
            ).logits
        found.append(float(output.sigmoid()[0, 0]))
    return found
