"""The stored form of API keys and tenants' limits, and the port to their store.

Only hashes of keys are stored. A key consists of 32 random bytes and cannot be guessed, so a single SHA-256 suffices. A
password would need a slow hash.
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
"""The roles, from least to most privileged.

A user may access its tenant's resources. An operator may also read everything and change workers' roles. An admin may
also change models and the resources of all tenants.
"""
PREFIX: Final = "sk-fulcrum-"
"""The prefix of every key, by which secret scanners recognise leaked keys."""
SECRET_BYTES: Final = 32
MAX_KEYS: Final = 10_000
"""The maximum number of stored keys. Beyond it, the oldest revoked or expired keys are dropped."""
MAX_LIMITED: Final = 10_000
"""The maximum number of tenants with limits of their own."""
MAX_DELETED: Final = 10_000
"""The maximum number of remembered deletions of tenants. The oldest are forgotten first."""
MAX_CHANGES: Final = 200
"""The maximum number of changes stored with the keys."""
MAX_KEY_MODELS: Final = 256
MAX_PRIORITY: Final = 100
ANY: Final = "*"
TENANT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ApiKey(msgspec.Struct, frozen=True):
    """A key as it is stored, without its secret."""

    id: str
    """The name of the key in lists and commands. It reveals nothing about the secret."""
    # SHA-256 of the key in hexadecimal.
    digest: str
    tenant: str
    role: Role = "user"
    models: tuple[str, ...] = ()
    """The models that the key's requests may name; empty for all."""
    service_class: str = DEFAULT_CLASS
    """The service class of the key's requests, which may also name the batch class. `ANY` allows every class."""
    priority: int = 0
    """The highest priority allowed for the key's batch jobs."""
    created_unix_s: int = 0
    expires_unix_s: int | None = None
    revoked_unix_s: int | None = None

    def ended(self, now_s: float) -> bool:
        """Return whether the key is revoked or expired."""
        return self.revoked_unix_s is not None or (self.expires_unix_s is not None and now_s >= self.expires_unix_s)


class TenantLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limits of one tenant. None means unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    """The number of concurrent choices. Each of a request's `n` and each of its prompts counts."""
    gpu_seconds_per_day: int | None = None
    """The estimated GPU time of the tenant's requests and batch lines per day."""
    stored_bytes: int | None = None
    """The total size of the tenant's files, including the answers of batches."""
    file_days: int | None = None
    """The number of days after which the tenant's files are deleted."""
    batch_lines: int | None = None
    """The number of lines in all unfinished batches of the tenant."""
    weight: int | None = None
    """The tenant's weight for turns in queues and for decode places; the default is 1."""
    files: int | None = None
    """The number of files, including those that unfinished batches will write. None applies the gateway's setting."""


class KeyChange(msgspec.Struct, frozen=True):
    """A change of keys or limits.

    It is stored with them until the metrics service has published it to the audit topic.
    """

    at_unix_ns: int
    actor: str
    """The operating system user who made the change."""
    action: str
    subject: str
    tenant: str = ""
    detail: str = ""


class KeySet(msgspec.Struct, frozen=True):
    """All keys, oldest first, and the limits of tenants that have some."""

    keys: tuple[ApiKey, ...] = ()
    limits: dict[str, TenantLimits] = {}
    changes: tuple[KeyChange, ...] = ()
    """The latest changes, oldest first; at most `MAX_CHANGES`."""
    cache_secret: str = ""
    """The secret, in hexadecimal, from which tenants' cache salts are derived; empty before the first key."""
    deleted: dict[str, int] = {}
    """The deleted tenants with the Unix time of deletion in ns. Data from before that time has no owner."""

    def with_cache_secret(self, *, anew: bool = False) -> Self:
        """Return the keys with a cache secret.

        `anew` replaces an existing secret, so that no KV block cached before can be found.
        """
        if self.cache_secret and not anew:
            return self
        return msgspec.structs.replace(self, cache_secret=secrets.token_hex(SECRET_BYTES))

    def without_tenant(self, tenant: str, now_unix_ns: int) -> Self:
        """Return the keys without the tenant: its keys revoked, its limits removed and its deletion recorded.

        Data that the tenant stored before the deletion must be deleted by others. Raise InvalidRequest for an invalid
        name.
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
        """Return the keys with one more. Raise Conflict if there are `MAX_KEYS` active ones."""
        surplus = len(self.keys) + 1 - MAX_KEYS
        ended = {each.id for each in [each for each in self.keys if each.ended(now_s)][: max(surplus, 0)]}
        if surplus > len(ended):
            raise Conflict(f"there are {MAX_KEYS} keys already: revoke some")
        kept = tuple(each for each in self.keys if each.id not in ended)
        return msgspec.structs.replace(self, keys=(*kept, key)).with_cache_secret()

    def without_key(self, key_id: str, now_s: float) -> Self:
        """Return the keys with one of them revoked. Raise KeyNotFound."""
        if not any(each.id == key_id for each in self.keys):
            raise KeyNotFound(f"no key {quoted(key_id)} is kept: `fulcrum keys list` shows them", param="id")
        return msgspec.structs.replace(self, keys=tuple(_revoked(each, key_id, now_s) for each in self.keys))

    def with_limits(self, tenant: str, limits: TenantLimits) -> Self:
        """Return the keys with a tenant's limits replaced. Empty limits remove them.

        Raise Conflict if `MAX_LIMITED` tenants have limits, and InvalidRequest for an invalid name.
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
    """Return the SHA-256 digest by which a key is looked up."""
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
    """Create a key. Return its secret, which must be shown once, and its stored form.

    Raise InvalidRequest, which names the faulty option.
    """
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
    """Raise InvalidRequest if no tenant can have this name."""
    if not TENANT_NAME.fullmatch(tenant):
        raise InvalidRequest(f"tenant {quoted(tenant)} must match {TENANT_NAME.pattern}", param="tenant")


def read_book(text: bytes) -> KeySet:
    """Decode stored keys. Raise msgspec.DecodeError if the text is invalid."""
    return _BOOK.decode(text)


def shown_key(key: ApiKey, now_s: float) -> Mapping[str, object]:
    """Return a key and its status for lists. The digest is omitted."""
    status = "revoked" if key.revoked_unix_s is not None else "expired" if key.ended(now_s) else "active"
    shown = msgspec.to_builtins(key)
    del shown["digest"]
    return {**shown, "status": status}


_BOOK: Final = msgspec.json.Decoder(KeySet)


@dataclass(frozen=True, slots=True)
class StoredKeySet:
    """A key set with its version, by which later changes are recognised."""

    version: str
    book: KeySet


class KeyStore(Protocol):
    """A store of one key set.

    Methods raise StoreUnavailable if the store does not answer or its content is invalid.
    """

    async def load(self, known: str = "") -> StoredKeySet | None:
        """Return the stored keys, or None if their version is `known`. The set is empty if none was ever stored."""
        ...

    async def change(self, edit: Callable[[KeySet], KeySet]) -> KeySet:
        """Apply `edit` to the stored keys, store the result and return it. Concurrent changes are not lost."""
        ...

    async def close(self) -> None:
        """Disconnect from the store. Further calls have no effect."""
        ...
