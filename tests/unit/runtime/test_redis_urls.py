"""Tests of Redis URLs, plain and with sentinels: validation and redaction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import StartupError
from libs.runtime.redis import check_url, shown_url
from libs.runtime.sentinel import SentinelAnswer, primary_of, read_sentinel_url
from libs.runtime.settings import CommonSettings, load_settings


def test_one_url_names_sentinels_primary_and_database() -> None:
    found = read_sentinel_url("redis+sentinel://a:26380,b,[::1]:7/mymaster/2")
    assert found.sentinels == [("a", 26380), ("b", 26379), ("::1", 7)]
    assert (found.name, found.options, found.sentinel_options) == ("mymaster", {"db": 2}, {})


def test_redis_and_sentinels_have_separate_passwords_and_one_authority() -> None:
    url = "rediss+sentinel://me:p%40ss@a/m?sentinel_password=other&ssl_ca_certs=/ca.pem"
    found = read_sentinel_url(url)
    tls = {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert found.options == {"db": 0, "username": "me", "password": "p@ss"} | tls
    assert found.sentinel_options == {"password": "other"} | tls


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "rediss://me:secret@host?ssl_ca_certs=/ca.pem",
        "unix:///run/redis.sock",
        "redis+sentinel://:secret@a,b,c/mymaster",
    ],
)
def test_valid_urls_are_accepted(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://host", "redis://HOST:6379/0"),
        ("redis+sentinel://me:hush@a,b", "add the name of the primary"),
        ("redis+sentinel://me:hush@/mymaster", "'' is not the HOST:PORT of a sentinel"),
        ("redis+sentinel://me:hush@a:99999/mymaster", "'a:99999' is not the HOST:PORT"),
        ("redis+sentinel://me:hush@a/mymaster/first", "'first' is not the number of a database"),
        ("redis://me:hush@a?pasword=hush", "'pasword' is not an option"),
    ],
)
def test_an_invalid_url_is_refused_in_one_line_without_its_secrets(
    monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    monkeypatch.setenv("FULCRUM_REDIS", url)
    with pytest.raises(StartupError) as caught:
        load_settings(CommonSettings)
    line = caught.value.message
    assert line.startswith("FULCRUM_REDIS=(hidden): ")
    assert said in line
    assert "hush" not in line
    assert "\n" not in line


@given(st.text("abc:/@%&=?", min_size=1).filter(lambda text: "?" not in text))
def test_no_password_is_shown(secret: str) -> None:
    hidden = f"S3{secret}S3"
    for url in (f"redis://me:{hidden}@host:6379/0", f"redis+sentinel://:{hidden}@a,b/m?sentinel_password=S3x"):
        assert "S3" not in shown_url(url)


@pytest.mark.parametrize("mark", ["/", "#"])
@pytest.mark.parametrize("url", ["redis://:{}@host/0", "redis+sentinel://me:{}@a,b/mymaster/0"])
def test_a_password_with_reserved_characters_is_refused_with_a_remedy_and_not_shown(mark: str, url: str) -> None:
    with pytest.raises(ValueError, match=r"in a password write / as %2F") as caught:
        check_url(url.format(f"secret{mark}rest"))
    assert "secret" not in str(caught.value)


def test_the_latest_failover_counts_however_many_connections_missed_it() -> None:
    old = SentinelAnswer(1, True, "old", 1)
    assert primary_of([old, SentinelAnswer(2, True, "new", 2), old]) == ("new", 2)
    assert primary_of([old, SentinelAnswer(2, False, "new", 2)]) is None  # it is down, and the old one is no primary
    assert primary_of([SentinelAnswer(2, False, "new", 2), SentinelAnswer(2, True, "new", 2)]) == ("new", 2)
    assert primary_of([]) is None
