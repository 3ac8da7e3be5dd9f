import sys

from libs.runtime.service import run_service
from services.planner.app import main
from services.planner.settings import PlannerSettings

if __name__ == "__main__":
    sys.exit(run_service("planner", PlannerSettings, main))
