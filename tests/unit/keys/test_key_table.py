"""Tests of the key table: its contents, and what each caller may do."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import (
    Conflict,
    InvalidApiKey,
    InvalidRequest,
    KeyNotFound,
    PermissionDenied,
    StoreUnavailable,
)
from libs.keys import book as book_module
from libs.keys.book import KeySet, TenantLimits, digest_of, draw_key, read_book, shown_key
from libs.keys.table import ANYBODY, Caller, KeyTable

NOW_S = 1_700_000_000.0


def bearer(secret: str) -> bytes:
    return f"Bearer {secret}".encode()


def table(*books: KeySet, open_without_keys: bool = True, token: str = "") -> KeyTable:
    made = KeyTable(open_without_keys=open_without_keys, token=token)
    for each in books:
        made.replace(each, NOW_S)
    return made


def test_a_stored_key_contains_its_hash_and_never_the_key() -> None:
    secret, key = draw_key("a", now_s=NOW_S, role="operator", models=("m",), expires_in_s=60)
    stored = msgspec.json.encode(KeySet().with_key(key, NOW_S))
    assert secret.startswith("sk-fulcrum-") and secret.encode() not in stored
    assert read_book(stored).keys == (key,)
    assert bytes.fromhex(key.digest) == digest_of(secret.encode())
    assert key.digest not in str(shown_key(key, NOW_S))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"role": "root"}, "role"),
        ({"service_class": "?"}, "class"),
        ({"priority": 101}, "priority"),
        ({"models": ("",)}, "models"),
    ],
)
def test_an_invalid_option_is_named(options: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        draw_key(**{"tenant": "a", "now_s": NOW_S, **options})  # type: ignore[arg-type]
    assert refused.value.param == param


def test_a_full_key_table_evicts_the_oldest_ended_key_and_no_valid_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book_module, "MAX_KEYS", 3)
    made = [draw_key(tenant, now_s=NOW_S)[1] for tenant in "abcd"]
    full = KeySet()
    for key in made[:3]:
        full = full.with_key(key, NOW_S)
    with pytest.raises(Conflict, match="revoke some"):
        full.with_key(made[3], NOW_S)
    kept = full.without_key(made[1].id, NOW_S).with_key(made[3], NOW_S)
    assert [key.tenant for key in kept.keys] == ["a", "c", "d"]
    with pytest.raises(KeyNotFound):
        kept.without_key(made[1].id, NOW_S)


def test_a_suite_without_keys_admits_everyone_and_one_with_a_key_requires_it() -> None:
    made = table(KeySet())
    assert made.caller(None, NOW_S) is made.caller(b"Bearer any", NOW_S) is ANYBODY
    secret, key = draw_key("a", now_s=NOW_S)
    made.replace(KeySet().with_key(key, NOW_S), NOW_S)
    for sent in (None, b"", b"Bearer any", b"Basic " + secret.encode(), secret.encode(), bearer(secret + "x")):
        with pytest.raises(InvalidApiKey):
            made.caller(sent, NOW_S)
    assert made.caller(bearer(secret), NOW_S).tenant == "a"
    assert made.caller(b"bearer  " + secret.encode() + b" ", NOW_S).tenant == "a"


def test_revoking_the_last_key_or_losing_the_store_admits_no_one() -> None:
    secret, key = draw_key("a", now_s=NOW_S)
    first = KeySet().with_key(key, NOW_S)
    for after in (first.without_key(key.id, NOW_S), KeySet()):
        made = table(first, after)
        for sent in (None, bearer(secret)):
            with pytest.raises(InvalidApiKey):
                made.caller(sent, NOW_S)


def test_a_key_admits_no_one_from_its_expiry_on() -> None:
    secret, key = draw_key("a", now_s=NOW_S, expires_in_s=10)
    made = table(KeySet().with_key(key, NOW_S))
    assert made.caller(bearer(secret), NOW_S + 9.9).tenant == "a"
    with pytest.raises(InvalidApiKey):
        made.caller(bearer(secret), NOW_S + 10)


def test_no_one_is_admitted_until_the_keys_are_known() -> None:
    made = KeyTable(open_without_keys=True)
    with pytest.raises(StoreUnavailable) as refused:
        made.caller(b"Bearer any", NOW_S)
    assert refused.value.retry_after_s is not None
    assert not made.is_open


def test_beyond_loopback_a_suite_without_keys_admits_no_one() -> None:
    with pytest.raises(InvalidApiKey):
        table(KeySet(), open_without_keys=False).caller(None, NOW_S)


def test_the_suites_token_counts_as_an_admins_key() -> None:
    made = table(KeySet().with_key(draw_key("a", now_s=NOW_S)[1], NOW_S), token="t")
    assert made.caller(b"Bearer t", NOW_S).role == "admin"
    assert made.caller(b"Bearer t", NOW_S).name == "token"
    with pytest.raises(InvalidApiKey):
        table(KeySet(), open_without_keys=False, token="").caller(b"Bearer ", NOW_S)


def test_roles_rise_from_user_over_operator_to_admin() -> None:
    user, operator, admin = (Caller("a", role) for role in ("user", "operator", "admin"))
    assert [each.may_read("b") for each in (user, operator, admin)] == [False, True, True]
    user.check_write("a", "it")
    admin.check_write("b", "it")
    for each in (user, operator):
        with pytest.raises(PermissionDenied):
            each.check_write("b", "it")
    operator.check_role("user")
    with pytest.raises(PermissionDenied, match="role operator"):
        user.check_role("operator")


def test_things_without_an_owner_belong_to_the_default_tenant() -> None:
    assert Caller("default", "user").may_read("")
    assert not Caller("a", "user").may_read("")


NAMES = st.text("ab.", min_size=1, max_size=3)


@given(tenant=NAMES, named=st.none() | NAMES, own=NAMES, requested=st.none() | NAMES | st.just("batch"))
def test_headers_only_narrow_what_a_key_gives(tenant: str, named: str | None, own: str, requested: str | None) -> None:
    caller = Caller(tenant, "user", service_class=own)
    try:
        assert caller.tenant_of(named) == tenant
    except PermissionDenied:
        assert named not in (None, tenant)
    try:
        assert caller.class_of(requested, "online") in (own, "batch")
    except PermissionDenied:
        assert requested not in (None, own, "batch")


def test_without_keys_headers_set_tenant_and_class() -> None:
    assert (ANYBODY.tenant_of(None), ANYBODY.tenant_of("x")) == ("default", "x")
    assert (ANYBODY.class_of(None, "online"), ANYBODY.class_of("x", "online")) == ("online", "x")


def test_a_salt_derives_from_a_secret_is_equal_at_every_gateway_and_differs_by_tenant() -> None:
    book = KeySet().with_key(draw_key("a", now_s=NOW_S)[1], NOW_S)
    one, other = table(book), table(read_book(msgspec.json.encode(book)))
    assert one.cache_salt("a") == other.cache_salt("a") != one.cache_salt("b")
    assert len(bytes.fromhex(one.cache_salt("a"))) == 16
    another_suite = table(KeySet().with_key(draw_key("a", now_s=NOW_S)[1], NOW_S))
    assert another_suite.cache_salt("a") != one.cache_salt("a"), "it could be made from a name"


def test_a_salt_changes_when_the_secret_is_rotated_and_when_its_tenant_was_deleted() -> None:
    book = KeySet().with_key(draw_key("a", now_s=NOW_S)[1], NOW_S)
    books = (book, book.with_cache_secret(anew=True), book.without_tenant("a", 10**18))
    assert len({table(each).cache_salt("a") for each in books}) == 3
    assert table(books[2]).cache_salt("b") == table(book).cache_salt("b")
    assert book.with_cache_secret() == book


def test_without_keys_tenants_are_separate_by_name() -> None:
    assert table(KeySet()).cache_salt("a") == "a"


def test_a_tenant_is_deleted_with_its_keys_and_limits_and_others_are_not() -> None:
    keys = {tenant: draw_key(tenant, now_s=NOW_S) for tenant in ("a", "b")}
    book = KeySet()
    for _, key in keys.values():
        book = book.with_key(key, NOW_S)
    for tenant in keys:
        book = book.with_limits(tenant, TenantLimits(concurrent=3))
    found = table(book.without_tenant("a", round(NOW_S * 1e9)))
    with pytest.raises(InvalidApiKey):
        found.caller(bearer(keys["a"][0]), NOW_S)
    assert found.caller(bearer(keys["b"][0]), NOW_S).tenant == "b"
    assert set(found.limits) == {"b"}
    assert (found.deleted_unix_ns("a"), found.deleted_unix_ns("b")) == (round(NOW_S * 1e9), 0)
    assert found.home("a") != "a" and found.home("b") == "b"
    with pytest.raises(InvalidRequest):
        book.without_tenant("a b", 1)
