"""`python -m services.decode`."""

import sys

from libs.runtime.service import run_service
from libs.worker.service import serve_worker
from services.decode.settings import DecodeSettings

if __name__ == "__main__":
    sys.exit(run_service("decode", DecodeSettings, serve_worker))
