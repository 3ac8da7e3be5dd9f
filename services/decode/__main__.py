"""`python -m services.decode`."""

import sys

from libs.runtime.service import run_service
from services.decode.app import serve
from services.decode.settings import DecodeSettings

if __name__ == "__main__":
    sys.exit(run_service("decode", DecodeSettings, serve))
