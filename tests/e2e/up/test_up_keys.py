"""Tests of a running suite with keys: who gets in, what each sees, and how soon a revoked key stops working."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite
QUESTION = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
SOON_S = 10.0
"""Bound on the time until a change of the keys counts everywhere: two seconds, and as long as busy cores take."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("keys")
    env = {"FULCRUM_CACHE": str(folder / "cache")}
    with running_suite(folder, "--engine", "sim", "--gateways", "2", env=env) as found:
        yield found


def command(suite: RunningSuite, *arguments: str) -> Any:
    done = suite.fulcrum("keys", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def statuses(suite: RunningSuite, key: str | None = None) -> dict[str, int]:
    headers = {} if key is None else bearer(key)
    urls = {
        "gateway": f"{suite.gateway}/v1/models",
        "second gateway": f"{suite.ready['gateways'][1]}/v1/models",
        "planner": f"{suite.ready['planner']}/v1/workers",
        "metrics": f"{suite.ready['metrics']}/v1/status",
        "prometheus": f"{suite.gateway}/metrics",
    }
    return {name: httpx.get(url, headers=headers).status_code for name, url in urls.items()}


def seconds_until(suite: RunningSuite, key: str | None, wanted: int) -> float:
    """Return the seconds until all REST APIs answer with that status."""
    began_s = time.monotonic()
    while set(statuses(suite, key).values()) != {wanted}:
        assert time.monotonic() - began_s < 3 * SOON_S, statuses(suite, key)
        time.sleep(0.02)
    return time.monotonic() - began_s


def test_from_the_first_key_on_each_caller_sees_only_its_own_data(suite: RunningSuite) -> None:
    assert set(statuses(suite).values()) == set(statuses(suite, "any").values()) == {200}
    rebound = httpx.get(f"{suite.gateway}/v1/models", headers={"host": "evil.example"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "wrong_host")

    admin = command(suite, "create", "--tenant", "ops", "--role", "admin")
    assert seconds_until(suite, None, 401) < SOON_S
    users = {name: command(suite, "create", "--tenant", name)["key"] for name in ("a", "b")}
    listed = command(suite, "list")
    assert [each["tenant"] for each in listed] == ["ops", "a", "b"]
    assert not any("digest" in each or "key" in each for each in listed)
    assert seconds_until(suite, admin["key"], 200) < SOON_S
    requested = statuses(suite, users["a"])
    assert [name for name, status in requested.items() if status == 200] == ["gateway", "second gateway"]
    assert [name for name, status in requested.items() if status == 403] == ["planner", "metrics", "prometheus"]

    a, b = (openai.OpenAI(base_url=f"{suite.gateway}/v1", api_key=users[name]) for name in ("a", "b"))
    assert a.chat.completions.create(**QUESTION).usage  # type: ignore[call-overload]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{suite.gateway}/v1", api_key="sk-wrong").models.list()
    file = a.files.create(file=("lines.jsonl", b'{"a": 1}\n'), purpose="batch").id
    assert [each.id for each in a.files.list()] == [file] and [each.id for each in b.files.list()] == []
    with pytest.raises(openai.NotFoundError):
        b.files.content(file)

    # The command line of the same machine has the suite's own token, and the page a login.
    for arguments in (("status", "--json"), ("workers", "--json"), ("chat", "hi", "--max-tokens", "4")):
        assert suite.fulcrum(*arguments).returncode == 0, arguments
    with httpx.Client(base_url=str(suite.ready["metrics"]), follow_redirects=True) as page:
        assert "Log in" in page.get("/", headers={"accept": "text/html"}).text
        assert "log in" not in page.post("/login", data={"key": admin["key"]}).text.lower()
        assert page.get("/v1/status").status_code == 200
        page.post("/logout")
        assert page.get("/v1/status").status_code == 401

    command(suite, "revoke", admin["id"])
    assert seconds_until(suite, admin["key"], 401) < SOON_S
    assert statuses(suite, users["b"])["gateway"] == 200


def test_a_tenant_over_its_limit_gets_a_retry_after(suite: RunningSuite) -> None:
    key = command(suite, "create", "--tenant", "limited")["key"]
    assert command(suite, "limits", "limited", "--requests", "2")["limited"]["requests_per_minute"] == 2
    with httpx.Client(base_url=suite.gateway, headers=bearer(key), timeout=30) as http:
        began_s = time.monotonic()
        while "x-ratelimit-limit-requests" not in (answer := http.post("/v1/chat/completions", json=QUESTION)).headers:
            assert time.monotonic() - began_s < 10, answer.text
            time.sleep(0.05)
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert http.post("/v1/chat/completions", json=QUESTION).status_code == 200
        refused = http.post("/v1/chat/completions", json=QUESTION)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "2 requests a minute" in refused.json()["error"]["message"]
        assert 30 < int(refused.headers["retry-after"]) <= 61


def test_two_gateways_enforce_a_limit_to_within_five_percent(suite: RunningSuite) -> None:
    limit, requested, headers = 200, 400, bearer(command(suite, "create", "--tenant", "shared")["key"])
    command(suite, "limits", "shared", "--requests", str(limit))

    def counted(number: int) -> bool | None:
        """Return whether the request was accepted; None before its gateway knew the limit."""
        url = f"{suite.ready['gateways'][number % 2]}/v1/chat/completions"
        answer = httpx.post(url, json=QUESTION, headers=headers, timeout=30)
        assert answer.status_code in (200, 401, 429), answer.text
        return None if "x-ratelimit-limit-requests" not in answer.headers else answer.status_code == 200

    began_s, admitted = time.monotonic(), 0
    for number in (0, 1):
        while (known := counted(number)) is None:
            assert time.monotonic() - began_s < 10
        admitted += known
    with ThreadPoolExecutor(8) as threads:
        admitted += sum(map(bool, threads.map(counted, range(requested))))
    assert time.monotonic() - began_s < 60, "a minute has passed, so the limit starts anew"
    assert limit * 0.95 <= admitted <= limit * 1.05


def test_the_audit_trail_names_who_changed_what(suite: RunningSuite) -> None:
    """The trail also has keys of other tests; a change over REST arrives through the broker."""
    admin = command(suite, "create", "--tenant", "auditors", "--role", "admin")
    seconds_until(suite, admin["key"], 200)
    mode = httpx.put(f"{suite.ready['planner']}/v1/mode", json={"mode": "advisory"}, headers=bearer(admin["key"]))
    assert mode.status_code == 200
    began_s, found = time.monotonic(), set[tuple[str, str]]()
    while not {("planner", "PUT /v1/mode"), ("keys", f"create {admin['id']}")} <= found:
        assert time.monotonic() - began_s < 30, found
        done = suite.fulcrum("audit", "--tenant", "auditors", "--json")
        assert done.returncode == 0, done.stderr
        events = [json.loads(each) for each in done.stdout.splitlines()]
        found = {(each["service"], each["action"]) for each in events}
    assert admin["key"] not in done.stdout
    assert {each["actor"] for each in events if each["service"] == "planner"} == {admin["id"]}
    command(suite, "revoke", admin["id"])
