"""`python -m services.decode`: a worker. Its code is libs/worker, from `service.serve_worker` on."""

from libs.runtime.service import end_process, run_service
from libs.worker.service import FAILED_S, serve_worker
from services.decode.settings import DecodeSettings

if __name__ == "__main__":
    end_process(run_service("decode", DecodeSettings, serve_worker, failed_s=FAILED_S))
