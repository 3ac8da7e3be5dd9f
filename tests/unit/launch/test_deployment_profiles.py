"""Tests of the shipped profiles of GPU machines: each loads, is consistent and becomes workers."""

import json
from dataclasses import replace as replaced
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from libs.cli.main import app
from libs.contracts.errors import StartupError
from libs.launch.options import SuiteOptions
from libs.launch.plan import make_plan
from libs.launch.profile import load_profile, profile_names
from libs.model.fetch import Model
from libs.perfmodel.profiles import profile as step_times
from libs.policy.step_time import StepWork, chunks_work
from libs.worker.settings import WorkerSettings
from tests.unit.launch.test_launch_plan import PLACE

MODEL = Model("gpt", "/models/gpt")
SHIPPED = [
    "gpt-oss-120b-8xh100", "gpt-oss-120b-tp2-8xh100", "llama-3.3-70b-2-nodes-h100", "llama-3.3-70b-fp8-8xh100",
    "llama-3.3-70b-nvfp4-b200",
]  # fmt: skip
NODES = "llama-3.3-70b-2-nodes-h100"


def test_the_shipped_profiles_are_these() -> None:
    assert profile_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_profile_is_consistent_and_separates_measured_from_predicted_figures(name: str) -> None:
    profile = load_profile(name)
    assert profile.not_run.startswith("Nothing of it has run on GPUs")
    predicted = profile.predicted
    assert predicted.source.startswith("aiconfigurator-core") and f"TP{profile.workers[0].gpus}" in predicted.source
    assert list(predicted.prefill_ms.values()) == sorted(predicted.prefill_ms.values())
    assert list(predicted.decode_ms.values()) == sorted(predicted.decode_ms.values())


@pytest.mark.parametrize("name", SHIPPED)
def test_workers_of_a_profile_can_change_roles_and_equal_those_started_in_the_role(name: str) -> None:
    workers = load_profile(name).workers
    assert min(sum(each.role == role for each in workers) for role in ("prefill", "decode")) >= 2
    assert len({(each.max_sequences, str(each.arguments), len(each.devices)) for each in workers}) == 1


@pytest.mark.parametrize("name", SHIPPED)
def test_a_rehearsal_has_the_same_workers_with_steps_of_predicted_length(name: str) -> None:
    profile, options = load_profile(name), SuiteOptions(engine="sim", profile=name)
    options.check()
    workers = make_plan(options, MODEL, PLACE).workers
    assert len(workers) == len(profile.workers) == options.workers
    for spec in workers:
        assert spec.env["FULCRUM_WORKER_ENGINE"] == "sim"
        assert spec.env["FULCRUM_WORKER_GPUS"] == str(profile.workers[0].gpus)
    steps = step_times(workers[0].env["FULCRUM_WORKER_SIM_PROFILE"])
    assert steps.gpus == profile.workers[0].gpus
    for tokens, ms in profile.predicted.prefill_ms.items():
        assert steps.step_time.step_ns(chunks_work([(0, tokens)])) == pytest.approx(ms * 1e6, rel=0.2)
    for batch, ms in profile.predicted.decode_ms.items():
        work = StepWork(decode_sequences=batch, decode_kv_tokens=batch * profile.predicted.decode_context_tokens)
        assert steps.step_time.step_ns(work) == pytest.approx(ms * 1e6, rel=0.3)


@pytest.mark.parametrize("name", SHIPPED)
def test_settings_of_a_profile_are_those_that_a_worker_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_profile(name)
    for worker in profile.workers:
        for variable, value in {**profile.model_settings("/models"), **worker.settings()}.items():
            monkeypatch.setenv(variable, value)
        read = WorkerSettings()
        assert (read.engine, read.role, read.model) == ("vllm", worker.role, profile.model)
        assert read.model_path == f"/models/{profile.model}"
        assert (read.gpus, read.vllm_arguments) == (worker.gpus, worker.arguments)
        assert read.engine_config("x").block_size_tokens == worker.block_size_tokens


def test_the_printed_command_of_a_profile_starts_its_workers() -> None:
    printed = CliRunner().invoke(app, ["profile", NODES]).stdout
    for worker in load_profile(NODES).workers:
        for variable, value in worker.settings().items():
            assert f"\n{variable}={value}\n" in printed
    assert printed.count("FULCRUM_WORKER_MODEL_PATH=/models/meta-llama/") == 4


def test_a_profile_refuses_other_options_for_workers() -> None:
    result = CliRunner().invoke(app, ["up", "--engine", "vllm", "--profile", SHIPPED[0], "--decode", "2"])
    assert result.exit_code == 2 and "suites without" in result.output


def test_a_suite_of_a_profile_starts_each_worker_on_its_gpus() -> None:
    options = SuiteOptions(engine="vllm", profile="gpt-oss-120b-tp2-8xh100")
    options.check()
    workers = make_plan(options, MODEL, PLACE).workers
    assert [spec.name for spec in workers] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert options.workers == 4
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in workers] == ["0,1", "2,3", "4,5", "6,7"]
    assert json.loads(workers[0].env["FULCRUM_WORKER_VLLM_ARGUMENTS"])["tensor_parallel_size"] == 2


def test_a_profile_that_one_machine_cannot_start_is_refused_in_one_line() -> None:
    for options, reason in (
        (SuiteOptions(engine="vllm", profile="llama-3.3-70b-2-nodes-h100"), "takes 2 machines"),
        (SuiteOptions(engine="vllm", profile="gpt-oss"), "there are: gpt-oss-120b-8xh100"),
        (SuiteOptions(engine="torch", profile="gpt-oss-120b-8xh100"), "--engine vllm"),
        (SuiteOptions(engine="sim", profile="gpt-oss-120b-8xh100", sim_profile="instant"), "leave --sim-profile out"),
    ):
        with pytest.raises(StartupError, match=reason):
            options.check()


def test_a_profile_that_could_not_serve_is_refused() -> None:
    good = load_profile("gpt-oss-120b-tp2-8xh100")
    prefill, _, decode, _ = good.workers
    for workers, reason in (
        ((prefill, replace(decode, devices=(1, 4))), "GPU 1 of node 0 is in 2 workers"),
        ((prefill, replace(decode, devices=(4,))), "1 GPUs and arguments for 2"),
        ((prefill,), "a prefill and a decode worker"),
        ((prefill, replace(decode, block_size_tokens=16)), "exchange KV"),
    ):
        with pytest.raises(StartupError, match=reason):
            replace(good, workers=workers).check()


@pytest.mark.parametrize("profile", [None, "gpt-oss-120b-tp2-8xh100"])
def test_arguments_of_the_command_line_precede_those_of_a_profile(profile: str | None) -> None:
    words = ("--max-model-len=32768", "language_model_only", 'speculative_config={"method": "ngram"}', "dtype=float16")
    options = SuiteOptions(engine="vllm", profile=profile, engine_args=words)
    options.check()
    for worker in make_plan(options, MODEL, replaced(PLACE, vllm_arguments=options.engine_arguments)).workers:
        arguments = json.loads(worker.env["FULCRUM_WORKER_VLLM_ARGUMENTS"])
        assert (arguments["max_model_len"], arguments["language_model_only"]) == (32768, True)
        assert (arguments["speculative_config"], arguments["dtype"]) == ({"method": "ngram"}, "float16")
        assert arguments.get("tensor_parallel_size") == (2 if profile else None)


@pytest.mark.parametrize(
    ("engine", "word", "says"),
    [
        ("vllm", "max-num-seqs=4", "--engine-arg cannot have max_num_seqs: set FULCRUM_WORKER_MAX_SEQUENCES"),
        ("vllm", "4=4", "write KEY=VALUE"),
        ("sim", "max_model_len=4", "--engine-arg is for --engine vllm"),
    ],
)
def test_an_invalid_argument_or_one_owned_by_the_worker_is_refused(engine: Any, word: str, says: str) -> None:
    with pytest.raises(StartupError, match=says):
        SuiteOptions(engine=engine, engine_args=(word,)).check()
    with pytest.raises(StartupError, match="given twice"):
        SuiteOptions(engine="vllm", engine_args=("dtype=half", "dtype=auto")).check()
