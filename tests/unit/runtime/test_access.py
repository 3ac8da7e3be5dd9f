"""Tests of secure defaults: incomplete TLS, unprotected listeners and plaintext tokens are refused."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import StartupError
from libs.runtime.net.access import admin_token, call_metadata, is_loopback, needs_token
from libs.runtime.net.rpc import make_server
from libs.runtime.settings import CommonSettings, load_settings
from libs.worker.settings import WorkerSettings

TLS = {"FULCRUM_TLS_CERT": "/c.pem", "FULCRUM_TLS_KEY": "/k.pem", "FULCRUM_TLS_CA": "/ca.pem"}
SERVE, PULL = "/fulcrum.worker.v1.WorkerService/Serve", "/fulcrum.worker.v1.KvService/Pull"
ADMIN, HEALTH = "/fulcrum.worker.v1.WorkerAdminService/SetRole", "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@given(st.sets(st.sampled_from(sorted(TLS)), min_size=1, max_size=2), st.sampled_from([CommonSettings, WorkerSettings]))
def test_incomplete_tls_is_one_line_that_names_the_missing_setting(
    given: set[str], settings_class: type[CommonSettings]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULCRUM_WORKER_ENGINE", "sim")
        for variable in given:
            patch.setenv(variable, TLS[variable])
        with pytest.raises(StartupError) as caught:
            load_settings(settings_class)
    line = caught.value.message
    missing = line.split(" as well")[0]
    assert {variable for variable in TLS if variable in missing} == set(TLS) - given
    assert "\n" not in line and "Value error" not in line


def test_an_authority_alone_does_not_count_as_a_plaintext_listener() -> None:
    with pytest.raises(ValueError, match="FULCRUM_TLS_CERT and FULCRUM_TLS_KEY"):
        make_server(CommonSettings(tls_ca="/ca.pem"), "127.0.0.1:0")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:9000", "127.8.9.10:1", "[::1]:9000", "localhost:9000", "unix:/run/fulcrum.sock", "unix:relative"],
)
def test_local_addresses_are_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:9000", "[::]:9000", "10.0.0.1:1", "worker-1:9000", "localhost.example:1", "128.0.0.1:1", ":9000", "",
     "127.0.0.1.example:1", "[fe80::1]:1"],
)  # fmt: skip
def test_every_other_address_is_beyond_loopback(address: str) -> None:
    assert not is_loopback(address)


def settings(*, token: str = "", plaintext: bool = False, tls: bool = False) -> CommonSettings:
    files = {"tls_cert": "/c.pem", "tls_key": "/k.pem", "tls_ca": "/ca.pem"} if tls else {}
    return CommonSettings.model_validate({"token": token, "allow_plaintext_token": plaintext, **files})


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
@pytest.mark.parametrize(
    "left_open", [settings(), settings(token="t"), settings(plaintext=True)], ids=["nothing", "token", "permission"]
)
async def test_an_unprotected_listener_beyond_loopback_does_not_start(host: str, left_open: CommonSettings) -> None:
    with pytest.raises(StartupError) as caught:
        make_server(left_open, f"{host}:0")
    line = caught.value.message
    for variable in ("FULCRUM_TLS_CERT", "FULCRUM_TOKEN", "FULCRUM_ALLOW_PLAINTEXT_TOKEN=1", "FULCRUM_HOST"):
        assert variable in line
    assert "\n" not in line


@pytest.mark.system
async def test_a_listener_starts_with_a_token_allowed_in_plaintext_and_on_loopback_without_protection() -> None:
    for allowed, address in ((settings(token="t", plaintext=True), "0.0.0.0:0"), (settings(), "127.0.0.1:0")):
        server, _ = make_server(allowed, address)
        await server.stop(None)


@pytest.mark.parametrize("method", [SERVE, PULL, REFLECTION])
def test_beyond_loopback_every_service_needs_the_token_or_a_certificate(method: str) -> None:
    assert needs_token(settings(token="t", plaintext=True), "0.0.0.0:1", method)
    assert not needs_token(settings(token="t", tls=True), "0.0.0.0:1", method)
    assert not needs_token(settings(token="t"), "127.0.0.1:1", method)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "127.0.0.1:1"])
@pytest.mark.parametrize("tls", [False, True])
def test_admin_calls_need_the_token_everywhere_and_probes_nowhere(address: str, tls: bool) -> None:
    own = settings(token="t", plaintext=True, tls=tls)
    assert needs_token(own, address, ADMIN)
    assert not needs_token(own, address, HEALTH)


def test_a_call_sends_the_token_only_over_a_protected_or_accepted_connection() -> None:
    bearer = (("authorization", "Bearer t"),)
    assert call_metadata(settings(token="t"), "worker:9000") == ()
    assert call_metadata(settings(token="t"), "127.0.0.1:9000") == bearer
    assert call_metadata(settings(token="t", tls=True), "worker:9000") == bearer
    assert call_metadata(settings(token="t", plaintext=True), "worker:9000") == bearer
    assert call_metadata(settings(plaintext=True), "worker:9000") == ()


def test_an_administrator_cannot_send_the_token_in_plaintext() -> None:
    with pytest.raises(StartupError, match=r"worker:9000 in plaintext.*FULCRUM_ALLOW_PLAINTEXT_TOKEN=1"):
        admin_token(settings(token="t"), "worker:9000")
    assert admin_token(settings(token="t", plaintext=True), "worker:9000") == "t"
    assert admin_token(settings(token="t"), "127.0.0.1:9000", "suite's") == "suite's"
    assert admin_token(settings(), "worker:9000") == ""


def test_the_first_process_creates_the_token_file_and_all_use_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    monkeypatch.setenv("FULCRUM_TOKEN_FILE", str(path))
    tokens = {load_settings(CommonSettings).token.get_secret_value() for _ in range(3)}
    assert tokens == {path.read_text()} and len(path.read_text()) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setenv("FULCRUM_TOKEN", "named")
    assert load_settings(CommonSettings).token.get_secret_value() == "named"


@pytest.mark.parametrize("content", [None, " \n"])
def test_a_token_file_without_a_token_is_one_line_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "missing" / "token"
    if content is not None:
        path.parent.mkdir()
        path.write_text(content)
    monkeypatch.setenv("FULCRUM_TOKEN_FILE", str(path))
    with pytest.raises(StartupError, match="FULCRUM_TOKEN_FILE") as caught:
        load_settings(CommonSettings)
    assert "\n" not in caught.value.message
