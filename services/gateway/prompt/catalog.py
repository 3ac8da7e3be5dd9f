"""The models that this gateway serves by name: what they are and how their text becomes tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from libs.contracts.errors import UnknownModel, quoted
from libs.model.info import ModelInfo, load_model_info
from libs.model.tokenizer import Tokenizer, load_tokenizer

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


class Catalog:
    """Served models by name."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models: Mapping[str, ServedModel] = {model.info.name: model for model in models}
        self.own = dict(self._models)
        """Those of the settings, which stay."""
        self.names = list(self._models)
        """In the order of the settings, then those that were added; always the same list."""

    def replace_added(self, models: Iterable[ServedModel]) -> None:
        """Serve these beside those of the settings, in place of others that were added before."""
        self._models = {**{model.info.name: model for model in models}, **self.own}
        self.names[:] = [*self.own, *sorted(self._models.keys() - self.own.keys())]

    def get(self, name: str) -> ServedModel:
        """Raises UnknownModel."""
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(
                f"model {quoted(name)} is not served; there are {', '.join(self.names[:MAX_NAMED]) or 'none'}",
                param="model",
            )
        return model


def load_catalog(folders: Mapping[str, str]) -> Catalog:
    """Load the models of `folders` (name to folder); raises StartupError that says what is missing."""
    infos = [load_model_info(folder, name) for name, folder in folders.items()]
    return Catalog(ServedModel(info, load_tokenizer(info)) for info in infos)
