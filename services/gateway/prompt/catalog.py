"""The models that this gateway serves, by name, with their tokenizers."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final
from zlib import crc32

from libs.contracts.errors import NoWorkers, StartupError, UnknownModel, quoted
from libs.model.info import ModelInfo, load_model_info
from libs.model.tokenizer import Tokenizer, load_tokenizer
from services.gateway.answers.families import NO_NAMES, AnswerFormat, FormatNames, answer_format

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
# The most models that an error message lists.
MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    tokenizer: Tokenizer
    ttft_ms: float | None = None
    """The TTFT target of requests that name none; None applies the gateway's."""
    tpot_ms: float | None = None
    names: FormatNames = NO_NAMES
    """The answer formats that are configured by hand."""
    base: str = ""
    """The base model whose workers compute this adapter; empty for a model of its own."""
    adapter_source: str = ""
    """The folder of an adapter from the catalogue; empty if workers were started with the adapter."""
    format: AnswerFormat = field(init=False)

    @property
    def routed(self) -> str:
        """Return the name under which workers serve the model."""
        return self.base or self.info.name

    @property
    def adapter_name(self) -> str:
        """Return the adapter's name to clients; empty for a model of its own."""
        return self.info.name if self.base else ""

    @property
    def adapter(self) -> str:
        """Return the adapter's name on workers; empty if there is none."""
        if not self.base:
            return ""
        # One that is removed and added again from elsewhere shares no weights and no KV with what it was.
        return f"{self.info.name}@{crc32(self.adapter_source.encode()):08x}" if self.adapter_source else self.info.name

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", answer_format(self.tokenizer, self.names.of(self.info.name)))


class Catalog:
    def __init__(self, models: Iterable[ServedModel], format_names: FormatNames = NO_NAMES) -> None:
        # Applied to models that are added later.
        self.format_names = format_names
        self._models: Mapping[str, ServedModel] = {model.info.name: model for model in models}
        self.own = dict(self._models)
        """The models named in the settings, which are never removed."""
        self.names = list(self._models)
        """The names in the order of the settings, then those added. The list object never changes."""

        self.broken: dict[str, str] = {}
        """The reason why each added model that cannot be served here is broken."""

    def replace_added(self, models: Iterable[ServedModel]) -> None:
        """Replace the models that were added earlier; those of the settings stay."""
        self._models = {**{model.info.name: model for model in models}, **self.own}
        self.names[:] = [*self.own, *sorted(self._models.keys() - self.own.keys())]

    def get(self, name: str) -> ServedModel:
        return self.need(name, frozenset())

    def need(self, name: str, allowed: AbstractSet[str]) -> ServedModel:
        """Return the model if it is one of `allowed`; an empty set allows all.

        Raise NoWorkers if the model's files are broken. Raise UnknownModel otherwise, which does not reveal whether
        a model that is not allowed exists.
        """
        is_allowed = not allowed or name in allowed
        model = self._models.get(name) if is_allowed else None
        if model is None and is_allowed and name in self.broken:
            raise NoWorkers(f"model {quoted(name)} cannot be served here: {self.broken[name]}")
        if model is None:
            named = [each for each in self.names if not allowed or each in allowed][:MAX_NAMED]
            raise UnknownModel(
                f"model {quoted(name)} is not served; there are {', '.join(named) or 'none'}", param="model"
            )
        return model


def load_catalog(
    folders: Mapping[str, str], names: FormatNames = NO_NAMES, adapters: Mapping[str, str] = _NONE
) -> Catalog:
    """Load the models of `folders` (name to folder) and their `adapters` (name to model's name).

    Raise StartupError that says what is missing.
    """
    infos = [load_model_info(folder, name) for name, folder in folders.items()]
    models = {info.name: ServedModel(info, load_tokenizer(info), names=names) for info in infos}
    for name, base in adapters.items():
        own = models.get(base)
        if own is None or own.base or name in models:
            raise StartupError(
                f"FULCRUM_GATEWAY_ADAPTERS: {name} is to be an adapter of {base}, which FULCRUM_GATEWAY_MODELS"
                f" {'does not name' if own is None else 'cannot give it: names must differ'}"
            )
        models[name] = replace(own, info=replace(own.info, name=name), base=base)
    return Catalog(models.values(), names)
