"""The properties of a model that can be read without loading it, and the built-in model of the sim engine.

They are the context length, the vocabulary, recommended sampling defaults (generation_config.json), the embedding of
texts (modules.json), the form of images, and the identity of the weights.
"""

import json
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from libs.contracts.errors import StartupError
from libs.model.files import read_any_json, read_json, read_json_if_there
from libs.model.vision import Vision, load_vision

BUILTIN_SIM: Final = "builtin:sim"
SIM_NAME: Final = "sim"
SIM_MAX_CONTEXT_TOKENS: Final = 8192
SIM_VOCAB_SIZE: Final = 260
SIM_BOS, SIM_EOS, SIM_IM_START, SIM_IM_END = 256, 257, 258, 259
# In the order of their ids, from 256 on. Ids 0..255 are the bytes.
SIM_SPECIAL_TOKENS: Final = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")

CHATML_TEMPLATE: Final = (
    "{% if tools %}"
    "{{ '<|im_start|>system\nTools:\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    '{{ \'Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or () %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary (GPT-2's mapping).

    Printable bytes map to themselves. All others map to the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def sim_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer without merges, one token per byte."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SIM_SPECIAL_TOKENS])
    return tokenizer


_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's sampling defaults, under the API's names. The default values are the API's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_defaults(generation_config: dict[str, Any], path: Path) -> SamplingDefaults:
    """Return the defaults in a generation_config.json. Raise StartupError that names an invalid field."""
    advised = {
        field.name: generation_config[field.name]
        for field in fields(SamplingDefaults)
        if generation_config.get(field.name) is not None
    }
    for name, value in advised.items():
        low, high = _RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise StartupError(f"{path}: {name} is {value!r}, not a number from {low} to {high}")
    if generation_config.get("do_sample") is False:
        advised["temperature"] = 0.0
    if advised.get("top_p") == 0:
        del advised["top_p"]  # in some files, this value means "off"
    return SamplingDefaults(**advised)


SIM_VECTOR_SIZE: Final = 64
_POOLINGS: Final[dict[str, Literal["last", "mean"]]] = {
    "lasttoken": "last", "pooling_mode_lasttoken": "last", "mean": "mean", "pooling_mode_mean_tokens": "mean",
}  # fmt: skip
_CLS_POOLINGS: Final = frozenset({"cls", "pooling_mode_cls_token"})
_SERVED_MODULES: Final = frozenset({"Transformer", "Pooling", "Dense", "Normalize"})
ACTIVATIONS: Final = frozenset({"Identity", "Tanh", "ReLU", "Sigmoid", "GELU"})
"""The activations of torch that a module Dense may have."""
_VECTOR: Final = "sentence_embedding"
ENCODERS: Final = frozenset(
    {"bert", "camembert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta"}
)
"""The model types in config.json whose tokens attend to later ones."""
# Encoders that number positions from the padding token's id plus one, which costs them that many positions.
_PADDED_POSITIONS: Final = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
_CROSS_ENCODER: Final = "ForSequenceClassification"
_SIGMOIDS: Final = {"Sigmoid": True, "Identity": False}


def is_encoder(config: dict[str, Any]) -> bool:
    """Return whether a config.json belongs to an encoder.

    An encoder computes vectors or scores and generates nothing.
    """
    return config.get("model_type") in ENCODERS and not config.get("is_decoder")


def is_cross_encoder(config: dict[str, Any]) -> bool:
    """Return whether a config.json belongs to an encoder with a head over pairs of texts."""
    named = config.get("architectures") or [""]
    return is_encoder(config) and str(named[0]).endswith(_CROSS_ENCODER)


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer after the pooling: a matrix [outputs, inputs], an optional bias, and an activation."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """The name of the activation, one of `ACTIVATIONS`."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The method that makes a vector of a text, from the files of Sentence Transformers.

    Without these files, a model that generates uses the last token's state and normalises it, as in vLLM. An encoder
    uses the mean, as in Sentence Transformers.
    """

    pooling: Literal["last", "mean", "cls", "score"] = "last"
    """The pooling method. "score" stands for a cross-encoder's single output."""
    normalizes: bool = True
    size: int = SIM_VECTOR_SIZE
    """The length of a vector; 0 if unknown."""
    shortens: bool = False
    """True if the beginning of a vector is also a vector, which requires special training (Matryoshka)."""
    sizes: frozenset[int] = frozenset()
    """The lengths to which vectors can be shortened; empty for all lengths below `size`."""
    unserved: str = ""
    """The reason why the model's vectors are not supported; empty if they are."""
    listed: bool = False
    """True if the folder has files of Sentence Transformers."""
    dense: tuple[Dense, ...] = ()
    """The layers that process a pooled vector, in order."""
    sigmoid: bool = False
    """True if a cross-encoder's score is the sigmoid of its output."""
    prompt: str = ""
    """The text that Sentence Transformers puts before every text; empty if the files give no default."""

    def fault(self, dimensions: int | None) -> str:
        """Return the reason why vectors cannot have this length; empty if they can. None is the model's own length."""
        if dimensions is None or dimensions == self.size:
            return ""
        if not self.shortens:
            return f"its vectors have {self.size}, and it was not trained for shorter ones"
        if self.sizes and dimensions not in self.sizes:
            return f"its vectors can have {', '.join(map(str, sorted({*self.sizes, self.size})))}"
        return f"its vectors have {self.size} at most" if dimensions > self.size else ""


def load_embedding(folder: Path, config: dict[str, Any]) -> Embedding:
    """Read the embedding from a model's folder, whose config.json is `config`. Raise StartupError for invalid JSON."""
    if is_cross_encoder(config):
        return _load_score(folder, config)
    encodes = is_encoder(config)
    text_config = config.get("text_config") or config
    size = text_config.get("hidden_size", text_config.get("dim"))  # DistilBERT's name of the size
    sizes = config.get("matryoshka_dimensions") or []
    own = Embedding(
        pooling="mean" if encodes else "last",
        normalizes=not encodes,
        size=size if isinstance(size, int) else 0,
        shortens=bool(config.get("is_matryoshka") or sizes),
        sizes=frozenset(each for each in sizes if isinstance(each, int)),
    )
    listed = read_any_json(folder / "modules.json") if (folder / "modules.json").is_file() else None
    if not isinstance(listed, list):
        return own
    order = [
        (str(each.get("type", "")).rsplit(".", 1)[-1], str(each.get("path", "")))
        for each in listed
        if isinstance(each, dict)
    ]
    if outside := [path for _, path in order if not (folder / path).resolve().is_relative_to(folder.resolve())]:
        raise StartupError(f"{folder / 'modules.json'} names the folder {outside[0]!r}, which is outside the model's")
    modules = dict(order)
    dense = [_load_dense(folder / path) for name, path in order if encodes and name == "Dense"]
    pooling = read_json(folder / modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    # Later releases name one mode or list several. Earlier ones have a flag for each mode.
    named = pooling.get("pooling_mode")
    if isinstance(named, str | list):
        modes = [str(mode) for mode in ([named] if isinstance(named, str) else named)]
    else:
        modes = [key for key, value in pooling.items() if value is True and key.startswith("pooling_mode_")]
    served = _poolings(encodes=encodes)
    known = _SERVED_MODULES if encodes else _SERVED_MODULES - {"Dense"}
    odd = [name for name in modules if name not in known] + [mode for mode in modes if mode not in served]
    unserved = f"it has {odd[0]}" if odd else "it pools in several ways" if len(modes) > 1 else ""
    unserved = unserved or _dense_fault(dense, [name for name, _ in order], own.size)
    if encodes and _sentence_config(folder).get("do_lower_case"):
        unserved = unserved or "its files have each text put into lower case (do_lower_case)"
    stated = _stated(folder)
    if stated.get("truncate_dim"):
        unserved = unserved or f"its files cut vectors to {stated['truncate_dim']} numbers (truncate_dim)"
    prompt = _default_prompt(stated)
    if prompt and pooling.get("include_prompt") is False:
        unserved = unserved or "its pooling leaves out the prompt that its files put before each text"
    chosen = served[modes[0]] if modes and not unserved else own.pooling
    layers = () if unserved else tuple(each for each in dense if isinstance(each, Dense))
    size = layers[-1].outputs if layers else own.size
    normalizes = "Normalize" in modules
    found = replace(own, pooling=chosen, normalizes=normalizes, size=size, dense=layers, prompt=prompt)
    return replace(found, unserved=unserved, listed=True)


def _load_dense(folder: Path) -> Dense | str:
    """Return the layer in a folder, or the reason why it is not supported."""
    config = read_json(folder / "config.json")
    sizes = config.get("in_features"), config.get("out_features")
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return "its module Dense names no sizes"
    # Sentence Transformers uses Tanh if no activation is named.
    activation = str(config.get("activation_function") or "Tanh").rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        return f"its module Dense has the activation {activation}"
    if config.get("module_input_name", _VECTOR) != _VECTOR or config.get("module_output_name") not in {None, _VECTOR}:
        return "its module Dense does not map vectors"
    return Dense(folder, *sizes, bias=bool(config.get("bias", True)), activation=activation)  # type: ignore[arg-type]


def _dense_fault(dense: list[Dense | str], order: list[str], size: int) -> str:
    """Return the reason why a pooled vector cannot pass through these layers; empty if it can."""
    if not dense:
        return ""
    if order != ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"][: "Normalize" in order]]:
        return "its modules are not in the order Transformer, Pooling, Dense, Normalize"
    for layer in dense:
        if isinstance(layer, str):
            return layer
        if size and layer.inputs != size:
            return f"its module Dense takes vectors of {layer.inputs}, and they have {size}"
        size = layer.outputs
    return ""


def _poolings(*, encodes: bool) -> dict[str, Literal["last", "mean", "cls"]]:
    """Return the supported poolings by their names in files."""
    if not encodes:
        return {**_POOLINGS}
    means = {name: pooling for name, pooling in _POOLINGS.items() if pooling == "mean"}
    return {**means, **dict.fromkeys(_CLS_POOLINGS, "cls")}


def _load_score(folder: Path, config: dict[str, Any]) -> Embedding:
    """Return the scoring of a cross-encoder.

    Its activation is in one of three places, of which the newest is read first.
    """
    own = _stated(folder).get("activation_fn")
    # transformers takes two labels for a config without any.
    labels = len(config.get("id2label") or "..")
    newer = config.get("sentence_transformers")
    named = own or (newer.get("activation_fn") if isinstance(newer, dict) else None)
    named = str(named or config.get("sbert_ce_default_activation_function") or "Sigmoid").rsplit(".", 1)[-1]
    unserved = "" if named in _SIGMOIDS else f"its scores have the activation {named}"
    unserved = unserved if labels == 1 else f"its head has {labels} labels, and only one is a score"
    sigmoid = _SIGMOIDS.get(named, True)
    return Embedding("score", normalizes=False, size=1, unserved=unserved, sigmoid=sigmoid)


def _sentence_config(folder: Path) -> dict[str, Any]:
    """Return the settings of the module `Transformer`, which is in the folder itself."""
    return read_json_if_there(folder / "sentence_bert_config.json")


def _stated(folder: Path) -> dict[str, Any]:
    """Return Sentence Transformers' settings of the whole model."""
    return read_json_if_there(folder / "config_sentence_transformers.json")


def _default_prompt(stated: dict[str, Any]) -> str:
    """Return the prompt that the files name as default; empty if there is none."""
    prompts, name = stated.get("prompts"), stated.get("default_prompt_name")
    found = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    return found if isinstance(found, str) else ""


_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
# The keys of config.json that differ between copies of the same weights.
_NOT_IDENTITY = ("_name_or_path", "transformers_version")
_SAMPLE_BYTES = 64 * 1024


class PairTokens(list[int]):
    """The tokens of two texts, in the order in which a cross-encoder reads them."""

    def __init__(self, tokens: list[int], second_from: int) -> None:
        """Create the pair.

        `second_from` is the index of the second text's first token; 0 if the texts are not separated.
        """
        super().__init__(tokens)
        self.second_from = second_from


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of one model that gateways and workers use."""

    name: str
    path: Path | None
    """The folder in Hugging Face's layout; None for the built-in model."""
    revision: str
    """The hash of the weights and config, equal on every machine. It is the root of block hash chains."""
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    embedding: Embedding = field(default_factory=Embedding)
    vision: Vision | None = None
    """The form of images in prompts; None for a model without vision."""
    encodes: bool = False
    """True for an encoder, which generates nothing."""

    @property
    def request_tokens(self) -> int:
        """The maximum number of tokens in a prompt and its output.

        An encoder's vector counts as one token without a position.
        """
        return self.max_context_tokens + self.encodes


def load_model_info(path: str | Path, name: str | None = None) -> ModelInfo:
    """Read a folder's config files, or return the built-in model for "builtin:sim".

    Raise StartupError that names the missing part.
    """
    if str(path) == BUILTIN_SIM:
        eos = frozenset({SIM_EOS, SIM_IM_END})
        return ModelInfo(name or SIM_NAME, None, "builtin-sim-1", SIM_MAX_CONTEXT_TOKENS, SIM_VOCAB_SIZE, eos)
    folder = Path(path)
    if not folder.is_dir():
        raise StartupError(f"model folder {folder} does not exist")
    config = read_json(folder / "config.json")
    text_config = config.get("text_config") or config
    context = next((text_config[key] for key in _CONTEXT_KEYS if isinstance(text_config.get(key), int)), None)
    vocab_size = text_config.get("vocab_size")
    if context is None or not isinstance(vocab_size, int):
        raise StartupError(f"{folder / 'config.json'} lacks max_position_embeddings or vocab_size")
    encodes = is_encoder(config)
    advice = folder / "generation_config.json"
    generation = read_json(advice) if advice.exists() else {}
    return ModelInfo(
        name=name or folder.name,
        path=folder,
        revision=_revision(folder, config),
        max_context_tokens=_encoder_tokens(folder, config, context) if encodes else context,
        vocab_size=vocab_size,
        eos_token_ids=frozenset() if encodes else _eos_token_ids(folder, generation, text_config),
        sampling=sampling_defaults(generation, advice),
        embedding=load_embedding(folder, config),
        vision=load_vision(folder, config),
        encodes=encodes,
    )


def _encoder_tokens(folder: Path, config: dict[str, Any], positions: int) -> int:
    """Return the longest prompt of an encoder: its positions, or Sentence Transformers' limit."""
    if config["model_type"] in _PADDED_POSITIONS:
        pad = config.get("pad_token_id")
        positions -= (pad if isinstance(pad, int) else 1) + 1
    # Later releases of Sentence Transformers write the length into the tokenizer's file only.
    of_tokenizer = read_json_if_there(folder / "tokenizer_config.json").get("model_max_length")
    own = _sentence_config(folder).get("max_seq_length")
    named = of_tokenizer if own is None else own
    return min(positions, named) if isinstance(named, int) and named > 0 else positions


def _eos_token_ids(folder: Path, generation: dict[str, Any], text_config: dict[str, Any]) -> frozenset[int]:
    value = generation.get("eos_token_id")
    if value is None:
        value = text_config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise StartupError(f"{folder}: no eos_token_id in generation_config.json or config.json")
    return frozenset(ids)


def _revision(folder: Path, config: dict[str, Any]) -> str:
    """Return a hash of the config and of each weights file's name, size and samples.

    With samples, no start has to read gigabytes.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise StartupError(f"model folder {folder} holds no *.safetensors")
    identity = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    digest = blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = read_json(index)
        # Without a connection to the hub, huggingface_hub may return an unfinished download
        # (findings/hub-returns-partial-snapshot.sh).
        if missing := sorted(set(listed.get("weight_map", {}).values()) - {file.name for file in weights}):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise StartupError(f"model folder {folder} lacks {missing[0]}{more}: download the model again")
        digest.update(json.dumps(listed, sort_keys=True).encode())
    for file in weights:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
