"""API keys and the tenants that they belong to, as they are stored: hashes, never the keys. Pure, but for what is
drawn.

A key is 32 random bytes, which nobody guesses: one SHA-256 of it is enough, where a password would need a slow hash.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Final, Literal, Self

import msgspec

from libs.contracts.classes import DEFAULT_CLASS
from libs.contracts.errors import Conflict, InvalidRequest, KeyNotFound, quoted

Role = Literal["user", "operator", "admin"]
ROLES: Final[tuple[Role, ...]] = ("user", "operator", "admin")
"""The least first: a user has its tenant's things, an operator sees everything and moves roles, an admin changes
models and whatever is another tenant's."""
PREFIX: Final = "sk-fulcrum-"
"""What every key begins with, so that scanners for secrets find one that has leaked."""
SECRET_BYTES: Final = 32
MAX_KEYS: Final = 10_000
"""Keys that are kept, revoked ones included: the newest of those stay."""
MAX_LIMITED: Final = 10_000
"""Tenants with limits of their own."""
MAX_DELETED: Final = 10_000
"""Tenants that were deleted; the ones deleted last are known."""
MAX_CHANGES: Final = 200
"""Of the book, that are kept with it."""
MAX_KEY_MODELS: Final = 256
MAX_PRIORITY: Final = 100
MAX_WEIGHT: Final = 100
ANY: Final = "*"
TENANT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ApiKey(msgspec.Struct, frozen=True):
    """One key, as it is stored."""

    id: str
    """Names it in lists and to revoke it; says nothing of the key."""
    digest: str
    """SHA-256 of the key, in hex."""
    tenant: str
    role: Role = "user"
    models: tuple[str, ...] = ()
    """Names that requests may use; empty: all."""
    service_class: str = DEFAULT_CLASS
    """Of its requests, which may ask for batch in its place; ANY: the one that they name."""
    priority: int = 0
    """The highest that its batch jobs may have."""
    created_unix_s: int = 0
    expires_unix_s: int | None = None
    revoked_unix_s: int | None = None

    def ended(self, now_s: float) -> bool:
        """Whether it lets nobody in any more."""
        return self.revoked_unix_s is not None or (self.expires_unix_s is not None and now_s >= self.expires_unix_s)


class TenantLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one tenant may have of the suite; None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    """Choices at once: each of a request's `n`, and each of its prompts, is one."""
    gpu_seconds_per_day: int | None = None
    """Of GPUs, that its requests and batch lines are reckoned to take."""
    stored_bytes: int | None = None
    """Of files, answers of its batches included."""
    file_days: int | None = None
    """Its files are deleted after this many."""
    batch_lines: int | None = None
    """Of batches that have not ended, together."""
    weight: int | None = None
    """Of its turns in a queue and of places to decode, against 1 of others."""
    files: int | None = None
    """That it has, or its unfinished batches will write; None: as the gateway's settings have it."""


class KeyChange(msgspec.Struct, frozen=True):
    """Who changed the book; kept with it until the metrics service has brought it to the audit topic."""

    at_unix_ns: int
    actor: str
    """The user of the machine on which it was changed."""
    action: str
    subject: str
    tenant: str = ""
    detail: str = ""


class KeyBook(msgspec.Struct, frozen=True):
    """All keys, the oldest first, and the limits of tenants that have some."""

    keys: tuple[ApiKey, ...] = ()
    limits: dict[str, TenantLimits] = {}
    changes: tuple[KeyChange, ...] = ()
    """The last MAX_CHANGES, the oldest first."""
    cache_secret: str = ""
    """Hex, from which each tenant's salt of KV blocks is made; empty before there is a key."""
    deleted: dict[str, int] = {}
    """Tenants that were deleted, and when, in Unix ns: what they had before is nobody's."""

    def with_cache_secret(self, *, anew: bool = False) -> Self:
        """With one; `anew`: with another one, so that no KV block is found again."""
        if self.cache_secret and not anew:
            return self
        return msgspec.structs.replace(self, cache_secret=secrets.token_hex(SECRET_BYTES))

    def without_tenant(self, tenant: str, now_unix_ns: int) -> Self:
        """With its keys revoked and its limits gone; what it has had so far is to be deleted. Raises InvalidRequest."""
        check_tenant(tenant)
        now_s = now_unix_ns / 1e9
        keys = tuple(_revoked(each, each.id, now_s) if each.tenant == tenant else each for each in self.keys)
        others = {name: each for name, each in self.limits.items() if name != tenant}
        before = {name: at for name, at in self.deleted.items() if name != tenant}
        deleted = dict([*before.items(), (tenant, now_unix_ns)][-MAX_DELETED:])
        return msgspec.structs.replace(self, keys=keys, limits=others, deleted=deleted)

    def noted(self, change: KeyChange) -> Self:
        """With one more change."""
        return msgspec.structs.replace(self, changes=(*self.changes, change)[-MAX_CHANGES:])

    def with_key(self, key: ApiKey, now_s: float) -> Self:
        """With one more. Raises Conflict where there are MAX_KEYS that still let somebody in."""
        surplus = len(self.keys) + 1 - MAX_KEYS
        ended = {each.id for each in [each for each in self.keys if each.ended(now_s)][: max(surplus, 0)]}
        if surplus > len(ended):
            raise Conflict(f"there are {MAX_KEYS} keys already: revoke some")
        kept = tuple(each for each in self.keys if each.id not in ended)
        return msgspec.structs.replace(self, keys=(*kept, key)).with_cache_secret()

    def without_key(self, key_id: str, now_s: float) -> Self:
        """With that key revoked; one that was stays as it is. Raises KeyNotFound."""
        if not any(each.id == key_id for each in self.keys):
            raise KeyNotFound(f"no key {quoted(key_id)} is kept: `fulcrum keys list` shows them", param="id")
        return msgspec.structs.replace(self, keys=tuple(_revoked(each, key_id, now_s) for each in self.keys))

    def with_limits(self, tenant: str, limits: TenantLimits) -> Self:
        """With that tenant's limits in place of what it had; none of them removes it. Raises Conflict at MAX_LIMITED,
        InvalidRequest."""
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
    """What a key is looked up by."""
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
    """A new key, which is to be shown once, and what is stored of it. Raises InvalidRequest that names the option."""
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
    """Raises InvalidRequest for a name that no tenant can have."""
    if not TENANT_NAME.fullmatch(tenant):
        raise InvalidRequest(f"tenant {quoted(tenant)} must match {TENANT_NAME.pattern}", param="tenant")


def read_book(text: bytes) -> KeyBook:
    """What was stored. Raises msgspec.DecodeError for what is no book."""
    return _BOOK.decode(text)


def shown_key(key: ApiKey, now_s: float) -> Mapping[str, object]:
    """A key as lists show it: without its hash."""
    status = "revoked" if key.revoked_unix_s is not None else "expired" if key.ended(now_s) else "active"
    shown = msgspec.to_builtins(key)
    del shown["digest"]
    return {**shown, "status": status}


_BOOK: Final = msgspec.json.Decoder(KeyBook)
