"""A service's callers by the digest of their keys, and their permissions."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import InvalidApiKey, InvalidRequest, PermissionDenied, StoreUnavailable
from libs.contracts.foreign_text import masked
from libs.keys.book import ANY, ROLES, TENANT_NAME, ApiKey, KeyChange, KeySet, Role, TenantLimits, digest_of

NO_KEY: Final = (
    "You didn't provide an API key: send it as header authorization: Bearer KEY; `fulcrum keys create` makes one"
)
WRONG_KEY: Final = "The API key is not known here, has expired or was revoked; `fulcrum keys create` makes a new one"
UNKNOWN_YET: Final = (
    "which API keys there are is not known yet: their store has not answered since this service started"
)
DEFAULT_TENANT: Final = "default"
"""The tenant to which everything without a tenant belongs."""
TENANT_HEADER: Final = "x-fulcrum-tenant"
CLASS_HEADER: Final = "x-fulcrum-class"
NO_NAME: Final = "anybody"
"""The actor in audit records if callers need no key."""
MAX_SAID_CHARS: Final = 80
_BEARER: Final = b"bearer "


def named_in(headers: Mapping[bytes, bytes], header: str) -> str | None:
    """Return the tenant or class in a header, or None without the header.

    Raise InvalidRequest if the name is invalid.
    """
    raw = headers.get(header.encode())
    if raw is None:
        return None
    value = raw.decode("latin-1")
    if not TENANT_NAME.fullmatch(value):
        raise InvalidRequest(f"header {header} must match {TENANT_NAME.pattern}", param=header)
    return value


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity and rights of the sender of a request.

    The default is an anonymous caller in a suite without keys, who may do everything.
    """

    tenant: str = ""
    """The caller's tenant; empty if callers need no key. A header may then name the tenant."""
    role: Role = "admin"
    models: frozenset[str] = frozenset()
    """The models that the caller may use; empty for all."""
    service_class: str = ANY
    priority: int | None = None
    """The highest priority allowed for the caller's batch jobs; None for any."""
    expires_unix_s: float = float("inf")
    name: str = ""
    """The id of the key; empty if callers need no key."""

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def may_read(self, tenant: str) -> bool:
        return self.role != "user" or (tenant or DEFAULT_TENANT) == self.tenant

    def check_write(self, tenant: str, what: str) -> None:
        """Raise PermissionDenied if the caller may not change resources of `tenant`."""
        if self.role != "admin" and (tenant or DEFAULT_TENANT) != self.tenant:
            raise PermissionDenied(f"{what} belongs to another tenant: an operator may see it, an admin change it")

    def check_role(self, least: Role) -> None:
        """Raise PermissionDenied if the caller's role is below `least`."""
        if ROLES.index(self.role) < ROLES.index(least):
            raise PermissionDenied(f"this needs a key of role {least}; this one has role {self.role}")

    def check_named(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise PermissionDenied if the headers name a tenant or class that the caller may not use.

        Raise InvalidRequest if a name is invalid.
        """
        self.tenant_of(named_in(headers, TENANT_HEADER))
        self.class_of(named_in(headers, CLASS_HEADER), self.service_class)

    def tenant_of(self, named: str | None) -> str:
        """Return the tenant of a request. `named` is the tenant in its header.

        An admin may act for any tenant. Raise PermissionDenied if another caller names a tenant that is not its own.
        """
        if self.role == "admin":
            return named or self.tenant or DEFAULT_TENANT
        if named is not None and named != self.tenant:
            raise PermissionDenied(
                f"the key belongs to tenant {self.tenant}, and the header names another", param=TENANT_HEADER
            )
        return self.tenant

    def class_of(self, named: str | None, default: str) -> str:
        """Return the class of a request. `named` is the class in its header.

        Raise PermissionDenied if the key does not allow the named class.
        """
        if self.service_class == ANY:
            return named or default
        if named not in (None, self.service_class, BATCH_CLASS):
            raise PermissionDenied(
                f"the key's requests are of class {self.service_class}, or of class {BATCH_CLASS}",
                param=CLASS_HEADER,
            )
        return named or self.service_class


SALT_BYTES: Final = 16
MAX_SALTS: Final = 10_000
"""The maximum number of cached salts."""
NO_LIMITS: Final = TenantLimits()
ANYBODY: Final = Caller()
SUITE_TOKEN: Final = Caller(tenant=DEFAULT_TENANT, name="token")
"""The caller that sends the suite's token."""
NOBODY: Final = Caller(DEFAULT_TENANT, "user", frozenset({""}))
"""The caller without a key in a suite with keys. It may use no model, and reach only public paths."""


def actor_of(caller: Caller, said: str = "") -> str:
    """Return the actor's name for audit records: the key's id, or the suite's token with the name that its holder
    gives.
    """
    if caller.name != SUITE_TOKEN.name:
        return caller.name or NO_NAME
    said = masked(said)[:MAX_SAID_CHARS]
    return f"{SUITE_TOKEN.name} ({said})" if said else SUITE_TOKEN.name


class KeyTable:
    """The callers of one service, updated by `libs.keys.gate`. Its size is bounded by the limits of a `KeySet`."""

    def __init__(self, *, open_without_keys: bool, token: str = "") -> None:
        """Create an empty table, which is not `known` yet.

        `open_without_keys` admits everybody while there are no keys. The suite's `token` has the rights of an admin's
        key.
        """
        self.open_without_keys = open_without_keys
        self._token = digest_of(token.encode()) if token else None
        self._callers: dict[bytes, Caller] = {}
        self.limits: dict[str, TenantLimits] = {}
        self.changes: tuple[KeyChange, ...] = ()
        """The latest changes of keys and limits, as they are stored."""
        self._deleted: dict[str, int] = {}
        self._cache_secret = b""
        self._salts: dict[str, str] = {}
        self.known = False
        """True once the store has answered."""
        self.closed = False
        """True if there is or was a key. Revoked keys count, so that revoking the last key does not admit everybody."""

    def replace(self, book: KeySet, now_s: float) -> None:
        """Replace the contents with those of the store.

        If the store has lost all keys, nobody is admitted for as long as this process lives.
        """
        self.known = True
        self.closed = self.closed or bool(book.keys)
        callers = {bytes.fromhex(key.digest): _caller(key) for key in book.keys if not key.ended(now_s)}
        if self._token is not None:
            callers[self._token] = SUITE_TOKEN
        self._callers, self.limits, self.changes = callers, dict(book.limits), book.changes
        self._cache_secret, self._deleted = bytes.fromhex(book.cache_secret), dict(book.deleted)
        self._salts.clear()

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the tenant's limits. There are none if everybody is admitted."""
        return (None if self.is_open else self.limits.get(tenant or DEFAULT_TENANT)) or NO_LIMITS

    def deleted_unix_ns(self, tenant: str) -> int:
        """Return the Unix time in ns at which the tenant and its data were deleted; 0 if never."""
        return self._deleted.get(tenant or DEFAULT_TENANT, 0)

    def home(self, tenant: str) -> str:
        """Return the name under which the tenant's data is stored.

        It changes when the tenant is deleted, so that a new tenant of the same name cannot find the old data.
        """
        at = self.deleted_unix_ns(tenant)
        return f"{tenant}@{at}" if at else tenant

    def cache_salt(self, tenant: str) -> str:
        """Return the salt that keeps the tenant's KV blocks apart from those of others.

        It is derived from a secret, because otherwise a tenant's name would suffice to find its blocks. In a suite
        without keys, it is the tenant's name.
        """
        if not self._cache_secret or self.is_open:
            return tenant
        found = self._salts.get(tenant)
        if found is None:
            if len(self._salts) >= MAX_SALTS:
                self._salts.clear()
            made = hmac.digest(self._cache_secret, self.home(tenant).encode(), "sha256")[:SALT_BYTES]
            found = self._salts[tenant] = made.hex()
        return found

    @property
    def are_distinct(self) -> bool:
        """Return whether tenants are authenticated. If everybody is admitted, callers may name any tenant."""
        return not self.is_open

    def weight(self, tenant: str) -> int:
        """Return the tenant's weight for turns and places, which is 1 unless its limits specify another one."""
        return self.limits_of(tenant).weight or 1

    def identify(self, authorization: bytes | None) -> Caller:
        """Return the sender of `authorization` even if everybody is admitted, or ANYBODY for an unknown key."""
        if not authorization or authorization[:7].lower() != _BEARER:
            return ANYBODY
        return self._callers.get(digest_of(authorization[7:].strip()), ANYBODY)

    def open(self) -> bool:
        """Return whether everybody is admitted because there are no keys.

        Raise StoreUnavailable until the store has answered.
        """
        if not self.known:
            raise StoreUnavailable(UNKNOWN_YET, retry_after_s=1.0)
        return self.is_open

    @property
    def is_open(self) -> bool:
        """Return whether everybody is admitted. The result is False until the store has answered."""
        return self.known and self.open_without_keys and not self.closed

    def caller(self, authorization: bytes | None, now_s: float) -> Caller:
        """Return the sender of `authorization`, which takes one hash and one lookup.

        Raise InvalidApiKey if the key is unknown or expired, and StoreUnavailable until the store has answered.
        """
        if self.open():
            return ANYBODY
        if not authorization or authorization[:7].lower() != _BEARER:
            raise InvalidApiKey(NO_KEY)
        return self.by_digest(digest_of(authorization[7:].strip()), now_s)

    def by_digest(self, digest: bytes, now_s: float) -> Caller:
        """Return the caller whose key has this digest. Raise InvalidApiKey if the key is unknown or expired."""
        found = self._callers.get(digest)
        if found is None or now_s >= found.expires_unix_s:
            raise InvalidApiKey(WRONG_KEY)
        return found


def _caller(key: ApiKey) -> Caller:
    ends = float("inf") if key.expires_unix_s is None else float(key.expires_unix_s)
    return Caller(key.tenant, key.role, frozenset(key.models), key.service_class, key.priority, ends, key.id)
