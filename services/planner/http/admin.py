"""Who may change what the planner does."""

import hmac

from libs.contracts.errors import Conflict, Unauthenticated
from services.planner.kept import Lead
from services.planner.state import PlannerState


def check_token(token: str, authorization: str, what: str) -> None:
    """Raises Unauthenticated unless the header carries the suite's token; without one nobody may."""
    if not (token and hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())):
        raise Unauthenticated(f"{what} needs the suite's token as authorization: Bearer TOKEN")


def check_leads(state: PlannerState) -> None:
    """Raises Conflict where another planner decides: what is set here would change nothing."""
    if state.lead is Lead.ANOTHERS:
        raise Conflict("another planner of this cluster leads: ask that one")
