"""The models that this gateway serves by name: what they are and how their text becomes tokens."""

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
MAX_NAMED = 20
"""Models that an error lists."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model and its tokenizer."""

    info: ModelInfo
    tokenizer: Tokenizer
    ttft_ms: float | None = None
    """Wanted where a request names none; None: as the gateway has it."""
    tpot_ms: float | None = None
    names: FormatNames = NO_NAMES
    """Formats of its answers that are set by hand."""
    base: str = ""
    """Name of the model whose workers compute it, for an adapter of that; empty: its own."""
    adapter_source: str = ""
    """Folder of an adapter that the catalogue names; empty: workers were started with it."""
    format: AnswerFormat = field(init=False)

    @property
    def routed(self) -> str:
        """Name of the model that workers have."""
        return self.base or self.info.name

    @property
    def adapter_name(self) -> str:
        """Of an adapter: its name to clients; empty: it is a model of its own."""
        return self.info.name if self.base else ""

    @property
    def adapter(self) -> str:
        """What workers call the adapter on them; empty: none."""
        if not self.base:
            return ""
        # One that is removed and added again from elsewhere shares no weights and no KV with what it was.
        return f"{self.info.name}@{crc32(self.adapter_source.encode()):08x}" if self.adapter_source else self.info.name

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", answer_format(self.tokenizer, self.names.of(self.info.name)))


class Catalog:
    """Served models by name."""

    def __init__(self, models: Iterable[ServedModel], format_names: FormatNames = NO_NAMES) -> None:
        self.format_names = format_names
        """For models that are added."""
        self._models: Mapping[str, ServedModel] = {model.info.name: model for model in models}
        self.own = dict(self._models)
        """Those of the settings, which stay."""
        self.names = list(self._models)
        """In the order of the settings, then those that were added; always the same list."""

        self.broken: dict[str, str] = {}
        """Why others that were added cannot be served here."""

    def replace_added(self, models: Iterable[ServedModel]) -> None:
        """Serve these beside those of the settings, in place of others that were added before."""
        self._models = {**{model.info.name: model for model in models}, **self.own}
        self.names[:] = [*self.own, *sorted(self._models.keys() - self.own.keys())]

    def get(self, name: str) -> ServedModel:
        """Raises UnknownModel."""
        return self.need(name, frozenset())

    def need(self, name: str, allowed: AbstractSet[str]) -> ServedModel:
        """The model, if it is one of `allowed`, which are all where that is empty. Raises NoWorkers for one whose files
        are broken, UnknownModel for others, and does not tell what is not allowed from what is not there."""
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
    """Load the models of `folders` (name to folder), and `adapters` of them (name to model's name); raises StartupError
    that says what is missing."""
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
