"""`python -m services.prefill`."""

import sys

from libs.runtime.service import run_service
from libs.worker.service import serve_worker
from services.prefill.settings import PrefillSettings

if __name__ == "__main__":
    sys.exit(run_service("prefill", PrefillSettings, serve_worker))
