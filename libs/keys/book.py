"""The stored form of API keys and their tenants (hashes, never the keys themselves), and the port to their store.

A key is 32 random bytes, which cannot be guessed. A single SHA-256 is enough; a password would need a slow hash.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol, Self

import msgspec

from libs.contracts.classes import DEFAULT_CLASS
from libs.contracts.errors import Conflict, InvalidRequest, KeyNotFound, quoted

Role = Literal["user", "operator", "admin"]
ROLES: Final[tuple[Role, ...]] = ("user", "operator", "admin")
"""The roles from least to most privileged.

A user has access to its tenant's resources. An operator sees everything and moves roles. An admin changes models
and the resources of other tenants.
"""
PREFIX: Final = "sk-fulcrum-"
"""The prefix of every key, by which secret scanners find one that has leaked."""
SECRET_BYTES: Final = 32
MAX_KEYS: Final = 10_000
"""The maximum number of stored keys; beyond it the oldest ended ones are dropped."""
MAX_LIMITED: Final = 10_000
"""The maximum number of tenants with their own limits."""
MAX_DELETED: Final = 10_000
"""The maximum number of deleted tenants that are remembered, the latest ones."""
MAX_CHANGES: Final = 200
"""The maximum number of changes of the book that are stored with it."""
MAX_KEY_MODELS: Final = 256
MAX_PRIORITY: Final = 100
ANY: Final = "*"
TENANT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ApiKey(msgspec.Struct, frozen=True):
    """A key in its stored form, without its secret."""

    id: str
    """The name of the key in lists and for revocation, which reveals nothing of the secret."""
    # SHA-256 of the key, in hex.
    digest: str
    tenant: str
    role: Role = "user"
    models: tuple[str, ...] = ()
    """The models that requests may name; empty for all."""
    service_class: str = DEFAULT_CLASS
    """The class of the key's requests, which may name batch instead; `ANY` lets them name every class."""
    priority: int = 0
    """The highest priority of the key's batch jobs."""
    created_unix_s: int = 0
    expires_unix_s: int | None = None
    revoked_unix_s: int | None = None

    def ended(self, now_s: float) -> bool:
        """Return whether the key is revoked or expired."""
        return self.revoked_unix_s is not None or (self.expires_unix_s is not None and now_s >= self.expires_unix_s)


class TenantLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limits of one tenant; None means unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    """The choices in progress at once, counting each of a request's `n` and each of its prompts."""
    gpu_seconds_per_day: int | None = None
    """The estimated GPU time of the tenant's requests and batch lines per day."""
    stored_bytes: int | None = None
    """The total size of the tenant's files, including answers of batches."""
    file_days: int | None = None
    """The days after which the tenant's files are deleted."""
    batch_lines: int | None = None
    """The number of lines of all unfinished batches of the tenant together."""
    weight: int | None = None
    """The weight of the tenant's turns in a queue and of its decode places; the default is 1."""
    files: int | None = None
    """The number of files, including ones that unfinished batches will write; None: the gateway's setting."""


class KeyChange(msgspec.Struct, frozen=True):
    """A change of the book, stored with it until the metrics service has published it to the audit topic."""

    at_unix_ns: int
    actor: str
    """The user of the machine on which the book was changed."""
    action: str
    subject: str
    tenant: str = ""
    detail: str = ""


class KeySet(msgspec.Struct, frozen=True):
    """All keys, oldest first, and the limits of the tenants that have some."""

    keys: tuple[ApiKey, ...] = ()
    limits: dict[str, TenantLimits] = {}
    changes: tuple[KeyChange, ...] = ()
    """The latest changes, at most `MAX_CHANGES`, the oldest first."""
    cache_secret: str = ""
    """The secret, in hex, from which each tenant's salt of KV blocks is derived; empty before the first key."""
    deleted: dict[str, int] = {}
    """The deleted tenants with the time of deletion in Unix ns. Data from before then has no owner."""

    def with_cache_secret(self, *, anew: bool = False) -> Self:
        """Return the book with a cache secret; `anew` draws another one, so that no cached KV block can be found
        again.
        """
        if self.cache_secret and not anew:
            return self
        return msgspec.structs.replace(self, cache_secret=secrets.token_hex(SECRET_BYTES))

    def without_tenant(self, tenant: str, now_unix_ns: int) -> Self:
        """Return the book with the tenant's keys revoked, its limits removed and its deletion noted.

        Everything the tenant had until then is to be deleted. Raise InvalidRequest for an invalid name.
        """
        check_tenant(tenant)
        now_s = now_unix_ns / 1e9
        keys = tuple(_revoked(each, each.id, now_s) if each.tenant == tenant else each for each in self.keys)
        others = {name: each for name, each in self.limits.items() if name != tenant}
        before = {name: at for name, at in self.deleted.items() if name != tenant}
        deleted = dict([*before.items(), (tenant, now_unix_ns)][-MAX_DELETED:])
        return msgspec.structs.replace(self, keys=keys, limits=others, deleted=deleted)

    def noted(self, change: KeyChange) -> Self:
        return msgspec.structs.replace(self, changes=(*self.changes, change)[-MAX_CHANGES:])

    def with_key(self, key: ApiKey, now_s: float) -> Self:
        """Return the book with one more key. Raise Conflict if there are `MAX_KEYS` active ones."""
        surplus = len(self.keys) + 1 - MAX_KEYS
        ended = {each.id for each in [each for each in self.keys if each.ended(now_s)][: max(surplus, 0)]}
        if surplus > len(ended):
            raise Conflict(f"there are {MAX_KEYS} keys already: revoke some")
        kept = tuple(each for each in self.keys if each.id not in ended)
        return msgspec.structs.replace(self, keys=(*kept, key)).with_cache_secret()

    def without_key(self, key_id: str, now_s: float) -> Self:
        """Return the book with that key revoked, unless it already was. Raise KeyNotFound."""
        if not any(each.id == key_id for each in self.keys):
            raise KeyNotFound(f"no key {quoted(key_id)} is kept: `fulcrum keys list` shows them", param="id")
        return msgspec.structs.replace(self, keys=tuple(_revoked(each, key_id, now_s) for each in self.keys))

    def with_limits(self, tenant: str, limits: TenantLimits) -> Self:
        """Return the book with the tenant's limits replaced; empty limits remove them.

        Raise Conflict at `MAX_LIMITED` tenants, InvalidRequest for an invalid name.
        """
        check_tenant(tenant)
        others = {name: each for name, each in self.limits.items() if name != tenant}
        if limits == TenantLimits():
            return msgspec.structs.replace(self, limits=others)
        if len(others) >= MAX_LIMITED:
            raise Conflict(f"{MAX_LIMITED} tenants have limits already: remove some")
        return msgspec.structs.replace(self, limits=others | {tenant: limits})


def _revoked(key: ApiKey, key_id: str, now_s: float) -> ApiKey:
    if key.id != key_id or key.revoked_unix_s is not None:
        return key
    return msgspec.structs.replace(key, revoked_unix_s=int(now_s))


def digest_of(secret: bytes) -> bytes:
    """Return the SHA-256 by which a key is looked up."""
    return hashlib.sha256(secret).digest()


def draw_key(
    tenant: str,
    *,
    now_s: float,
    role: Role = "user",
    models: tuple[str, ...] = (),
    service_class: str = DEFAULT_CLASS,
    priority: int = 0,
    expires_in_s: float | None = None,
) -> tuple[str, ApiKey]:
    """Return a new key, to be shown once, and its stored form. Raise InvalidRequest, which names the option."""
    check_tenant(tenant)
    if role not in ROLES:
        raise InvalidRequest(f"role {quoted(role)} is none of {', '.join(ROLES)}", param="role")
    if service_class != ANY and not TENANT_NAME.fullmatch(service_class):
        raise InvalidRequest(f"class {quoted(service_class)} must match {TENANT_NAME.pattern}", param="class")
    if abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority")
    if len(models) > MAX_KEY_MODELS or not all(models):
        raise InvalidRequest(f"models are up to {MAX_KEY_MODELS} names, none of them empty", param="models")
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    key = ApiKey(
        id=f"key_{secrets.token_hex(6)}",
        digest=digest_of(secret.encode()).hex(),
        tenant=tenant,
        role=role,
        models=models,
        service_class=service_class,
        priority=priority,
        created_unix_s=int(now_s),
        expires_unix_s=None if expires_in_s is None else int(now_s + expires_in_s),
    )
    return secret, key


def check_tenant(tenant: str) -> None:
    """Raise InvalidRequest for a name that no tenant can have."""
    if not TENANT_NAME.fullmatch(tenant):
        raise InvalidRequest(f"tenant {quoted(tenant)} must match {TENANT_NAME.pattern}", param="tenant")


def read_book(text: bytes) -> KeySet:
    """Decode a stored book. Raise msgspec.DecodeError for anything else."""
    return _BOOK.decode(text)


def shown_key(key: ApiKey, now_s: float) -> Mapping[str, object]:
    """Return a key with its status for lists, without its hash."""
    status = "revoked" if key.revoked_unix_s is not None else "expired" if key.ended(now_s) else "active"
    shown = msgspec.to_builtins(key)
    del shown["digest"]
    return {**shown, "status": status}


_BOOK: Final = msgspec.json.Decoder(KeySet)


@dataclass(frozen=True, slots=True)
class StoredKeySet:
    """A key set and the version by which newer ones are recognised."""

    version: str
    book: KeySet


class KeyStore(Protocol):
    """A store of one book of keys.

    Methods raise StoreUnavailable while it does not answer, or if its content is invalid.
    """

    async def load(self, known: str = "") -> StoredKeySet | None:
        """Return the book, or None if its version is still the `known` one. It is empty if none was ever stored."""
        ...

    async def change(self, edit: Callable[[KeySet], KeySet]) -> KeySet:
        """Store and return the result of `edit`. Concurrent changes are both kept."""
        ...

    async def close(self) -> None:
        """Disconnect from the store. Calling it twice is harmless."""
        ...
