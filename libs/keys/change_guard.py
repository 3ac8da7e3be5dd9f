"""Authorization of changes to a control plane service: the suite's token or a key, never a browser's session."""

import hmac

from libs.contracts.errors import InvalidApiKey, Unauthenticated
from libs.keys.book import Role
from libs.keys.table import SUITE_TOKEN, Caller, KeyTable
from libs.runtime.clock import Clock


class ChangeGuard:
    """The check in front of every route that changes something.

    Unlike `KeyGate` it admits nobody just because there are no keys.
    """

    def __init__(self, keys: KeyTable | None, clock: Clock, *, token: str) -> None:
        """Check against keys and the suite's `token`, which counts as an admin's key; empty for no token."""
        self._keys = keys
        self._clock = clock
        self._token = token

    def admit(self, authorization: str, what: str, least: Role = "operator") -> Caller:
        """Return the caller of the action that `what` names.

        Raise Unauthenticated without the token or a key, PermissionDenied for a key below that role.
        """
        if self._token and hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            return SUITE_TOKEN
        try:
            if self._keys is not None and self._keys.known and self._keys.closed:
                caller = self._keys.caller(authorization.encode(), self._clock.now_ns() / 1e9)
                caller.check_role(least)
                return caller
        except InvalidApiKey:
            pass
        raise Unauthenticated(
            f"{what} needs the suite's token, or a key of role {least}, as authorization: Bearer TOKEN"
        )
