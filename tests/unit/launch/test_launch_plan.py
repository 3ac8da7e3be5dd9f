"""Tests of the processes of a suite and of their arguments."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cli.up.command import ToolFormat
from libs.contracts.errors import StartupError
from libs.launch.options import LaunchSettings, SuiteOptions
from libs.launch.plan import SuiteLocation, make_plan
from libs.launch.preflight import check, gateway_port
from libs.launch.processes.port import StatusLine, parse_status
from libs.launch.ready import Ready, default_ready_file, write_ready
from libs.model.fetch import BUNDLED_MODEL, Model, resolve_model
from libs.runtime.http import bind
from services.gateway.answers.families import CALLS, NONE
from services.gateway.settings import ToolFormatName

MODEL = Model("sim", "builtin:sim")
PLACE = SuiteLocation(
    folder=Path("/tmp/suite"),
    broker=("fulcrum-broker",),
    kafka="127.0.0.1:9092",
    redis_server="redis-server",
    planner_port=8001,
    metrics_port=0,
    worker_threads=2,
    worker_drain_s=3.0,
    gateway_drain_s=3,
    token="secret",
    cluster="local",
)


def test_every_worker_has_a_unique_name_which_is_its_id() -> None:
    plan = make_plan(SuiteOptions(engine="sim", prefill=2, decode=1, mixed=1), MODEL, PLACE)
    assert [spec.name for spec in plan.workers] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert all(spec.env["FULCRUM_WORKER_ID"] == spec.name for spec in plan.workers)
    assert [spec.env["FULCRUM_WORKER_ROLE"] for spec in plan.workers] == ["prefill", "prefill", "decode", "mixed"]


def test_a_mixed_worker_is_a_decode_service_with_a_budget() -> None:
    (_prefill, _decode, mixed) = make_plan(SuiteOptions(mixed=1), MODEL, PLACE).workers
    assert mixed.command[-1] == "services.decode"
    assert int(mixed.env["FULCRUM_WORKER_BUDGET_TOKENS"]) > 0


def test_the_first_gateway_has_the_requested_port_and_every_gateway_knows_the_model() -> None:
    plan = make_plan(SuiteOptions(gateways=3, gateway_port=9000), MODEL, PLACE)
    assert [spec.env["FULCRUM_GATEWAY_PORT"] for spec in plan.gateways] == ["9000", "0", "0"]
    assert {spec.env["FULCRUM_GATEWAY_ID"] for spec in plan.gateways} == {"gateway-1", "gateway-2", "gateway-3"}
    assert all(json.loads(spec.env["FULCRUM_GATEWAY_MODELS"]) == {"sim": "builtin:sim"} for spec in plan.gateways)


def test_embedded_stores_are_omitted_if_stores_are_given() -> None:
    own = make_plan(SuiteOptions(), MODEL, PLACE)
    assert [spec.name for spec in own.stores] == ["kafka", "redis"]
    given_plan = make_plan(SuiteOptions(kafka="a:1", redis="redis://b"), MODEL, PLACE)
    assert given_plan.stores == ()
    for spec in (*given_plan.gateways, *given_plan.workers, *given_plan.observers):
        assert (spec.env["FULCRUM_KAFKA"], spec.env["FULCRUM_REDIS"]) == ("a:1", "redis://b")


@pytest.mark.parametrize("options", [SuiteOptions(prefill=0), SuiteOptions(decode=0)])
def test_a_suite_without_one_of_the_phases_is_refused(options: SuiteOptions) -> None:
    with pytest.raises(StartupError, match="nothing would"):
        options.check()
    SuiteOptions(prefill=0, decode=0, mixed=1).check()


def test_suites_that_share_given_stores_have_unique_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FULCRUM_CLUSTER", raising=False)
    assert LaunchSettings().cluster_of(9000, own_stores=True) == "local"
    assert LaunchSettings().cluster_of(9000, own_stores=False) == "local-9000"
    monkeypatch.setenv("FULCRUM_CLUSTER", "shared")
    assert LaunchSettings().cluster_of(9000, own_stores=False) == "shared"


@pytest.mark.system
def test_a_suite_has_the_requested_port_or_one_held_for_it() -> None:
    with gateway_port(SuiteOptions(gateway_port=9000), "127.0.0.1") as port:
        assert port == 9000
    with gateway_port(SuiteOptions(gateway_port=0), "127.0.0.1") as one:
        with gateway_port(SuiteOptions(gateway_port=0), "127.0.0.1") as other:
            assert one != other
        bind("127.0.0.1", one, "FULCRUM_GATEWAY_PORT").close()
    with pytest.raises(StartupError, match="FULCRUM_HOST"), gateway_port(SuiteOptions(gateway_port=0), "192.0.2.1"):
        pass


def test_cores_are_distributed_and_every_worker_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FULCRUM_WORKER_THREADS", raising=False)
    assert LaunchSettings().threads_of(10_000) == 1
    monkeypatch.setenv("FULCRUM_WORKER_THREADS", "3")
    assert LaunchSettings().threads_of(10_000) == 3


def test_a_status_line_round_trips() -> None:
    assert parse_status(b'{"event": "ready", "http": "http://h:1", "new": 1}\n') == StatusLine(
        "ready", http="http://h:1"
    )
    assert parse_status(b'{"event": "progress", "stage": "loading", "fraction": 0.5}').fraction == 0.5  # type: ignore[union-attr]


@given(st.binary())
def test_other_output_of_a_library_is_neither_a_status_line_nor_an_error(line: bytes) -> None:
    assert parse_status(b"x" + line) is None
    parse_status(line)


async def _no_helper(_name: str, _command: tuple[str, ...]) -> str:
    raise AssertionError("nothing is to be fetched")


async def test_the_sim_engine_needs_no_model() -> None:
    assert await resolve_model(None, engine="sim", helper=_no_helper) == MODEL


@pytest.mark.parametrize("spec", ["nonsense", "/no/such/folder", "../x", "a/b/c", ""])
async def test_an_unknown_model_is_one_line_that_names_valid_ones(spec: str) -> None:
    with pytest.raises(StartupError, match="name a folder"):
        await resolve_model(spec, engine="torch", helper=_no_helper)


async def test_a_folder_without_a_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        await resolve_model(str(tmp_path), engine="torch", helper=_no_helper)


async def test_the_bundled_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    calls = []

    async def convert(name: str, command: tuple[str, ...]) -> str:
        calls.append(name)
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        config = {"max_position_embeddings": 8, "vocab_size": 9, "eos_token_id": 2}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        return ""

    for _ in range(2):
        model = await resolve_model(None, engine="torch", helper=convert)
        assert model == Model(BUNDLED_MODEL, str(tmp_path / "models" / BUNDLED_MODEL))
    assert calls == ["convert"]
    named = await resolve_model(model.path, engine="torch", helper=_no_helper)
    assert named == model


def test_pool_workers_that_share_a_gpu_name_it_and_sim_workers_share_a_process() -> None:
    options = SuiteOptions(engine="sim", pool=5, workers_per_gpu=2, models=("a", "b"))
    found = [each.env for each in make_plan(options, MODEL, PLACE).workers]
    assert [json.loads(env.get("FULCRUM_WORKER_COMPANIONS", "[]")) for env in found] == [["pool-2"], ["pool-4"], []]
    assert [json.loads(env["FULCRUM_WORKER_GPU_UUIDS"]) for env in found] == [["sim-0"], ["sim-1"], ["sim-2"]]
    assert {env["FULCRUM_WORKER_GPU_SHARE"] for env in found} == {"0.500000"}
    torch = SuiteOptions(engine="torch", pool=4, workers_per_gpu=2, models=("a", "b"))
    found = [each.env for each in make_plan(torch, MODEL, replace(PLACE, gpus=("0", "1"))).workers]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0", "0", "1", "1"]
    with pytest.raises(StartupError, match="--pool"):
        SuiteOptions(workers_per_gpu=2).check()


def test_gateways_get_a_named_template_and_tool_format() -> None:
    named = SuiteOptions(gateways=2, chat_template=Path("/a/b.jinja"), tool_format="glm")
    for spec in make_plan(named, MODEL, PLACE).gateways:
        assert json.loads(spec.env["FULCRUM_GATEWAY_CHAT_TEMPLATES"]) == {"*": "/a/b.jinja"}
        assert json.loads(spec.env["FULCRUM_GATEWAY_TOOL_FORMATS"]) == {"*": "glm"}
    (own,) = make_plan(SuiteOptions(), MODEL, PLACE).gateways
    assert not own.env.keys() & {"FULCRUM_GATEWAY_CHAT_TEMPLATES", "FULCRUM_GATEWAY_TOOL_FORMATS"}


def test_an_unusable_template_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "broken.jinja"
    with pytest.raises(StartupError, match="cannot be read"):
        SuiteOptions(chat_template=file).check()
    file.write_text("{% if %}")
    with pytest.raises(StartupError, match="does not parse"):
        SuiteOptions(chat_template=file).check()
    file.write_text("{{ messages }}")
    SuiteOptions(chat_template=file).check()


def test_the_command_line_accepts_the_tool_formats_of_gateways() -> None:
    assert {each.value for each in ToolFormat} == set(get_args(ToolFormatName)) == {*CALLS, NONE}


@pytest.mark.system
async def test_a_second_suite_on_the_same_port_gets_an_error_that_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        options = SuiteOptions(engine="sim", gateway_port=port)
        with pytest.raises(StartupError, match="is in use: stop what holds it or set --gateway-port"):
            await check(options, "127.0.0.1")
        url = f"http://127.0.0.1:{port}"
        rest = dict.fromkeys(("planner", "metrics", "token", "kafka", "redis", "cluster", "model", "engine"), "x")
        write_ready(default_ready_file(port), Ready(gateway=url, gateways=(url,), pid=os.getpid(), **rest))
        with pytest.raises(StartupError, match=f"a suite runs at {url} already: `fulcrum down` stops it"):
            await check(options, "127.0.0.1")
