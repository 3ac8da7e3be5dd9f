"""The decode worker, `python -m services.decode`. Its code is in libs/worker, starting at `service.serve_worker`."""

from libs.runtime.service import end_process, run_service
from libs.worker.service import FAILED_S, serve_worker
from services.decode.settings import DecodeSettings

if __name__ == "__main__":
    end_process(run_service("decode", DecodeSettings, serve_worker, failed_s=FAILED_S))
