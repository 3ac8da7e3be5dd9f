"""`python -m libs.model.hub ORG/NAME`: download a model, telling progress and the path."""

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

from libs.runtime import status

FILES = ("*.safetensors", "*.json", "*.jinja", "*.model")
"""What engines and gateways read; other formats of the same weights stay where they are."""
OTHER_FILES = ("original/*",)
"""The same weights once more, as their maker's own code reads them."""
EXIT_NO_MODEL = 2


class _Progress(tqdm):  # type: ignore[misc]
    """Every bar of the download becomes status lines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*arguments, **{**options, "disable": False})

    def display(self, *_arguments: Any, **_options: Any) -> bool:
        """Tell instead of draw; tqdm calls it a few times a second."""
        if self.total:
            status.progress("downloading", min(1.0, self.n / self.total))
        return True


def main(name: str, folder: Path | None = None) -> int:
    """0 with the folder in a status line, or 2 with one line that says why there is none.

    Without a `folder` of its own the model goes into huggingface_hub's cache.
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
