"""Who calls: a bounded table of callers by the digest of their key, and what each of them may do. No I/O."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import InvalidApiKey, InvalidRequest, PermissionDenied, StoreUnavailable
from libs.contracts.foreign_text import masked
from libs.keys.book import ANY, ROLES, TENANT_NAME, ApiKey, KeyBook, KeyChange, Role, TenantLimits, digest_of

NO_KEY: Final = (
    "You didn't provide an API key: send it as header authorization: Bearer KEY; `fulcrum keys create` makes one"
)
WRONG_KEY: Final = "The API key is not known here, has expired or was revoked; `fulcrum keys create` makes a new one"
UNKNOWN_YET: Final = (
    "which API keys there are is not known yet: their store has not answered since this service started"
)
DEFAULT_TENANT: Final = "default"
"""Whose things those without a tenant's name are."""
TENANT_HEADER: Final = "x-fulcrum-tenant"
CLASS_HEADER: Final = "x-fulcrum-class"
NO_NAME: Final = "anybody"
"""The actor where nobody is held to have a key."""
MAX_SAID_CHARS: Final = 80
_BEARER: Final = b"bearer "


def named_in(headers: Mapping[bytes, bytes], header: str) -> str | None:
    """Return the tenant or class that a header names. Raise InvalidRequest for what is no name."""
    raw = headers.get(header.encode())
    if raw is None:
        return None
    value = raw.decode("latin-1")
    if not TENANT_NAME.fullmatch(value):
        raise InvalidRequest(f"header {header} must match {TENANT_NAME.pattern}", param=header)
    return value


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from. The default is anybody of a suite without keys: all is everybody's."""

    tenant: str = ""
    """Empty: the one that a header names, since nobody is held to one."""
    role: Role = "admin"
    models: frozenset[str] = frozenset()
    """Empty: all."""
    service_class: str = ANY
    priority: int | None = None
    """The highest that its batch jobs may have; None: any."""
    expires_unix_s: float = float("inf")
    name: str = ""
    """The key's id; empty where nobody is held to have one."""

    def may_use(self, model: str) -> bool:
        """Whether its requests may name the model."""
        return not self.models or model in self.models

    def may_read(self, tenant: str) -> bool:
        """Whether it may see what belongs to `tenant`."""
        return self.role != "user" or (tenant or DEFAULT_TENANT) == self.tenant

    def check_write(self, tenant: str, what: str) -> None:
        """Raises PermissionDenied where it may see, but not change, what belongs to `tenant`."""
        if self.role != "admin" and (tenant or DEFAULT_TENANT) != self.tenant:
            raise PermissionDenied(f"{what} belongs to another tenant: an operator may see it, an admin change it")

    def check_role(self, least: Role) -> None:
        """Raises PermissionDenied for a caller below that role."""
        if ROLES.index(self.role) < ROLES.index(least):
            raise PermissionDenied(f"this needs a key of role {least}; this one has role {self.role}")

    def check_named(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise InvalidRequest or PermissionDenied for a tenant or class in the headers that its requests may not
        have."""
        self.tenant_of(named_in(headers, TENANT_HEADER))
        self.class_of(named_in(headers, CLASS_HEADER), self.service_class)

    def tenant_of(self, named: str | None) -> str:
        """The tenant of a request whose header names `named`: an admin may act for any. Raises PermissionDenied for
        another's."""
        if self.role == "admin":
            return named or self.tenant or DEFAULT_TENANT
        if named is not None and named != self.tenant:
            raise PermissionDenied(
                f"the key belongs to tenant {self.tenant}, and the header names another", param=TENANT_HEADER
            )
        return self.tenant

    def class_of(self, named: str | None, default: str) -> str:
        """The class of a request whose header names `named`. Raises PermissionDenied for one above the key's."""
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
"""That are remembered."""
NO_LIMITS: Final = TenantLimits()
ANYBODY: Final = Caller()
SUITE_TOKEN: Final = Caller(tenant=DEFAULT_TENANT, name="token")
"""The caller that sends the suite's own token."""
NOBODY: Final = Caller(DEFAULT_TENANT, "user", frozenset({""}))
"""Who has shown no key where one is needed: may use no model, and gets what is public."""


def actor_of(caller: Caller, said: str = "") -> str:
    """Return who acts, as records name it: a key's id, or the suite's token with the name that its holder gives."""
    if caller.name != SUITE_TOKEN.name:
        return caller.name or NO_NAME
    said = masked(said)[:MAX_SAID_CHARS]
    return f"{SUITE_TOKEN.name} ({said})" if said else SUITE_TOKEN.name


class KeyTable:
    """The callers of one service. Fed by `libs.keys.follow`; bounded as the book is."""

    def __init__(self, *, open_without_keys: bool, token: str = "") -> None:
        """open_without_keys: whether a suite that has no key lets everybody in. token: the suite's own, which counts as
        an admin's key."""
        self.open_without_keys = open_without_keys
        self._token = digest_of(token.encode()) if token else None
        self._callers: dict[bytes, Caller] = {}
        self.limits: dict[str, TenantLimits] = {}
        self.changes: tuple[KeyChange, ...] = ()
        """Of the book, the last ones."""
        self._deleted: dict[str, int] = {}
        self._cache_secret = b""
        self._salts: dict[str, str] = {}
        self.known = False
        """Whether the store has answered since the start."""
        self.closed = False
        """Whether there is a key: one that is revoked counts, so that revoking the last lets nobody in."""

    def replace(self, book: KeyBook, now_s: float) -> None:
        """Take what the store has now. A book that has lost all its keys opens nothing while this process lives."""
        self.known = True
        self.closed = self.closed or bool(book.keys)
        callers = {bytes.fromhex(key.digest): _caller(key) for key in book.keys if not key.ended(now_s)}
        if self._token is not None:
            callers[self._token] = SUITE_TOKEN
        self._callers, self.limits, self.changes = callers, dict(book.limits), book.changes
        self._cache_secret, self._deleted = bytes.fromhex(book.cache_secret), dict(book.deleted)
        self._salts.clear()

    def limits_of(self, tenant: str) -> TenantLimits:
        """What it is held to; nothing where everybody is let in."""
        return (None if self.is_open else self.limits.get(tenant or DEFAULT_TENANT)) or NO_LIMITS

    def deleted_unix_ns(self, tenant: str) -> int:
        """When it was deleted, with all that it had until then; 0: never."""
        return self._deleted.get(tenant or DEFAULT_TENANT, 0)

    def home(self, tenant: str) -> str:
        """The name under which its things are kept: another one after it was deleted, so that a tenant that is given
        the same name finds nothing of the first one's."""
        at = self.deleted_unix_ns(tenant)
        return f"{tenant}@{at}" if at else tenant

    def cache_salt(self, tenant: str) -> str:
        """What keeps its KV blocks apart from others': made from a secret, so that a name is not enough to find them;
        the name itself in a suite without keys."""
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
    def told_apart(self) -> bool:
        """Whether a request's tenant is known for sure: where everybody is let in anyone may name any."""
        return not self.is_open

    def weight(self, tenant: str) -> int:
        """Of its turns and its places, against 1 of others."""
        return self.limits_of(tenant).weight or 1

    def identify(self, authorization: bytes | None) -> Caller:
        """Who sends `authorization`, also where everybody is let in; ANYBODY for a key that is not known."""
        if not authorization or authorization[:7].lower() != _BEARER:
            return ANYBODY
        return self._callers.get(digest_of(authorization[7:].strip()), ANYBODY)

    def open(self) -> bool:
        """Whether everybody is let in, since there are no keys. Raises StoreUnavailable while that is not known."""
        if not self.known:
            raise StoreUnavailable(UNKNOWN_YET, retry_after_s=1.0)
        return self.is_open

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in, as far as is known."""
        return self.known and self.open_without_keys and not self.closed

    def caller(self, authorization: bytes | None, now_s: float) -> Caller:
        """Who sends `authorization`. Raises InvalidApiKey, StoreUnavailable. One hash and one look-up."""
        if self.open():
            return ANYBODY
        if not authorization or authorization[:7].lower() != _BEARER:
            raise InvalidApiKey(NO_KEY)
        return self.by_digest(digest_of(authorization[7:].strip()), now_s)

    def by_digest(self, digest: bytes, now_s: float) -> Caller:
        """Whose key has that digest. Raises InvalidApiKey."""
        found = self._callers.get(digest)
        if found is None or now_s >= found.expires_unix_s:
            raise InvalidApiKey(WRONG_KEY)
        return found


def _caller(key: ApiKey) -> Caller:
    ends = float("inf") if key.expires_unix_s is None else float(key.expires_unix_s)
    return Caller(key.tenant, key.role, frozenset(key.models), key.service_class, key.priority, ends, key.id)
