"""The models that this gateway serves by name: what they are and how their text becomes tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from libs.contracts.errors import UnknownModel, quoted
from libs.model.info import ModelInfo, load_model_info
from libs.model.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One of them."""

    info: ModelInfo
    tokenizer: Tokenizer


class Catalog:
    """Models by name."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models: Mapping[str, ServedModel] = {model.info.name: model for model in models}

    @property
    def names(self) -> list[str]:
        """In the order of the settings."""
        return list(self._models)

    def get(self, name: str) -> ServedModel:
        """Raises UnknownModel."""
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(
                f"model {quoted(name)} is not served; there are {', '.join(self._models)}", param="model"
            )
        return model


def load_catalog(folders: Mapping[str, str]) -> Catalog:
    """From names and folders; raises StartupError that says what is missing."""
    infos = [load_model_info(folder, name) for name, folder in folders.items()]
    return Catalog(ServedModel(info, load_tokenizer(info)) for info in infos)
