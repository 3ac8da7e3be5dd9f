"""The prefill worker, `python -m services.prefill`. Its code is in libs/worker, starting at `service.serve_worker`."""

from libs.runtime.service import end_process, run_service
from libs.worker.service import FAILED_S, serve_worker
from services.prefill.settings import PrefillSettings

if __name__ == "__main__":
    end_process(run_service("prefill", PrefillSettings, serve_worker, failed_s=FAILED_S))
