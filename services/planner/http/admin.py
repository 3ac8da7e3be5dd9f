"""Who may change what the planner does."""

import hmac

from libs.contracts.errors import Unauthenticated


def check_token(token: str, authorization: str, what: str) -> None:
    """Raises Unauthenticated unless the header carries the suite's token; without one nobody may."""
    if not (token and hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())):
        raise Unauthenticated(f"{what} needs the suite's token as authorization: Bearer TOKEN")
