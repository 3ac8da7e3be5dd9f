"""`python -m libs.model.prepare MODEL [FOLDER]`: put a model into FOLDER/MODEL unless it is there.

MODEL is ORG/NAME on the Hugging Face hub, or the bundled model. FOLDER is usually a volume that gateways and workers
share. Without FOLDER, a model of the hub is downloaded to the hub's own cache. Status lines report the progress and the
path.
"""

import os
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from tqdm import tqdm

from libs.model.fetch import BUNDLED_MODEL
from libs.runtime import status

# The files that engines and gateways read. Other formats of the same weights are not downloaded.
FILES = ("*.safetensors", "*_Dense/pytorch_model.bin", "*.json", "*.jinja", "*.model")
# A second copy of the weights, for their makers' code.
OTHER_FILES = ("original/*",)
EXIT_NO_MODEL = 2


class _Progress(tqdm):  # type: ignore[misc]
    """A progress bar that reports the download in status lines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*arguments, **{**options, "disable": False})

    def display(self, *_arguments: Any, **_options: Any) -> bool:
        # tqdm calls this a few times a second. It reports instead of drawing.
        if self.total:
            status.progress("downloading", min(1.0, self.n / self.total))
        return True


def download(name: str, folder: Path | None = None) -> int:
    """Download a model. Return 0 with the folder in a status line, or 2 after one line with the reason.

    Without `folder`, the model is stored in huggingface_hub's cache.
    """
    try:
        path = snapshot_download(
            name,
            allow_patterns=list(FILES),
            ignore_patterns=list(OTHER_FILES),
            tqdm_class=_Progress,
            local_dir=folder,
        )
    except GatedRepoError:
        error = f"model {name} is gated: accept its terms on the hub and set HF_TOKEN"
    except (RepositoryNotFoundError, HFValidationError):
        error = f"the hub has no model {name}: check the name (a private one needs HF_TOKEN)"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as cause:
        reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        error = f"model {name} is not in the cache and the hub cannot be reached ({reason}): name a folder instead"
    else:
        status.emit("ready", path=path)
        return 0
    status.emit("failed", error=error)
    print(f"fulcrum download: {error}", file=sys.stderr)
    return EXIT_NO_MODEL


def main(model: str, folder: Path) -> int:
    """Prepare the model, and return the exit code. A code other than 0 follows one line with the reason."""
    target = folder / model
    if model == BUNDLED_MODEL:
        # In a separate program, since only engines may import torch.
        os.execv(sys.executable, [sys.executable, "-m", "libs.engine.torch.convert", str(target)])  # noqa: S606
    return download(model, target)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [model]:
            sys.exit(download(model))
        case [model, folder]:
            sys.exit(main(model, Path(folder)))
        case _:
            sys.exit(__doc__)
