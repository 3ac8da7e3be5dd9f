import sys

from libs.runtime.service import run_service
from services.gateway.app import main
from services.gateway.settings import GatewaySettings

if __name__ == "__main__":
    sys.exit(run_service("gateway", GatewaySettings, main))
