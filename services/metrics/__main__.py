import sys

from libs.runtime.service import run_service
from services.metrics.app import main
from services.metrics.settings import MetricsSettings

if __name__ == "__main__":
    sys.exit(run_service("metrics", MetricsSettings, main))
