"""Tests of logs of many models: made, read, replayed and scored, and of their commands."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from libs.cli.main import app
from libs.cli.models.backtest import pairwise_correlation
from libs.contracts.errors import InvalidRequest
from libs.lab.models import backtest as backtest_module
from libs.lab.models.backtest import BacktestSettings, backtest, block_bootstrap, clairvoyant, keep_alive, one_a_model
from libs.lab.models.generate import KINDS, generate_usage
from libs.lab.models.usage import UsageLog, read_usage, spells, use_by_window, write_usage

DATA = os.environ.get("FULCRUM_DATA", "")


def log_of(rows, gpus=None):
    """Build a log from (arrival, model, seconds of execution)."""
    t_s, model, exec_s = (np.array(each, dtype=float) for each in zip(*sorted(rows), strict=True))
    count = int(model.max()) + 1
    sizes = np.ones(count) if gpus is None else np.array(gpus, dtype=float)
    return UsageLog("test", t_s, model.astype(np.int64), exec_s, [f"m{place}" for place in range(count)], sizes)


# ---------------------------------------------------------------- use by window

ROWS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 4), st.integers(0, 150)).map(lambda row: tuple(map(float, row))),
    min_size=1,
    max_size=40,
)


@given(ROWS, st.sampled_from([10.0, 60.0]), st.sampled_from([0.0, 30.0]))
def test_the_peak_of_concurrent_use_equals_a_count_instant_by_instant(rows, window_s, hold_s):
    log = log_of(rows, gpus=[1, 2, 1, 4, 0.5][: int(max(row[1] for row in rows)) + 1])
    use = use_by_window(log, window_s, hold_s)
    moments = np.arange(0.0, len(use) * window_s, 0.5)
    there = np.zeros((len(moments), len(log.models)), dtype=bool)
    for at_s, model, run_s in rows:
        if run_s + hold_s > 0:
            there[(moments >= at_s) & (moments < at_s + run_s + hold_s), int(model)] = True
    per = int(window_s / 0.5)
    for window in range(len(use)):
        part = there[window * per : (window + 1) * per]
        assert use.peak_models[window] == part.sum(axis=1).max()
        assert use.peak_gpus[window] == pytest.approx((part @ log.gpus).max())
        assert use.mean_models[window] == pytest.approx(part.sum(axis=1).mean())
        assert use.mean_gpus[window] == pytest.approx((part @ log.gpus).mean())


@given(ROWS)
def test_busy_periods_of_one_model_never_touch(rows):
    begin_s, end_s, model = spells(log_of(rows))
    for each in set(model.tolist()):
        mine = np.argsort(begin_s[model == each])
        begins, ends = begin_s[model == each][mine], end_s[model == each][mine]
        assert np.all(begins[1:] > ends[:-1])


def test_a_loaded_model_stays_until_its_time_is_up():
    log = log_of([(0.0, 0, 10.0), (100.0, 1, 10.0), (300.0, 0, 1.0)])
    there, paid = keep_alive(log, use_by_window(log, 60.0), 60.0)
    assert there.tolist() == [1, 1, 1, 0, 0]
    assert paid == pytest.approx([1.0, (10 + 20) / 60, 50 / 60, 0.0, 0.0], abs=0.02)
    assert one_a_model(log, use_by_window(log, 60.0)).tolist() == [1, 1, 2, 2, 2]


# ---------------------------------------------------------------- scores


@given(st.lists(st.integers(0, 9), min_size=1, max_size=200), st.integers(1, 70))
def test_hindsight_is_the_smallest_constant_that_is_exceeded_rarely_enough(peaks, per_period):
    peak = np.array(peaks, dtype=float)
    found = clairvoyant(peak, per_period, 0.9)
    for begin in range(0, len(peak), per_period):
        part, constant = peak[begin : begin + per_period], found[begin]
        assert np.all(found[begin : begin + per_period] == constant)
        allowed = 0.1 * len(part) + 1e-9
        assert (part > constant).sum() <= allowed
        assert constant == 0 or (part > constant - 1).sum() > allowed


def test_a_bootstrap_interval_contains_the_mean_and_widens_with_correlated_misses():
    rng = np.random.default_rng(2)
    alone = (rng.random(3000) > 0.02).astype(float)
    together = np.repeat((rng.random(150) > 0.02).astype(float), 20)
    for values in (alone, together):
        low, high = block_bootstrap(values)
        assert low <= values.mean() <= high
    assert np.diff(block_bootstrap(together)) > 2 * np.diff(block_bootstrap(alone))


# ---------------------------------------------------------------- made logs


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_log_has_the_requested_rate_and_is_repeatable(kind):
    spec = f"{kind}:models=40,seconds=21600"
    log, again = generate_usage(spec, seed=3), generate_usage(spec, seed=3)
    assert np.array_equal(log.t_s, again.t_s)
    assert np.all(np.diff(log.t_s) >= 0)
    rate = len(log.t_s) / 40 / 21600
    assert rate == pytest.approx(0.037, rel=0.05 if kind in ("poisson", "gamma", "shock") else 0.5)
    assert log.exec_s.mean() == pytest.approx(16.79, rel=0.03)


@pytest.mark.parametrize("kind", ["surge:cv=1,", "surge:cv=2,", "shock:"])
@pytest.mark.parametrize("correlation", [0.1, 0.3])
def test_models_of_generated_logs_have_the_requested_correlation(kind, correlation):
    """This holds on average, as a day has few surges."""
    spec = f"{kind}models=30,correlation={correlation}"
    found = [pairwise_correlation(generate_usage(spec, seed=seed)) for seed in range(5)]
    assert np.mean(found) == pytest.approx(correlation, abs=0.05)


def test_the_bursts_of_a_generated_log_are_as_requested():
    log = generate_usage("gamma:models=1,rate=1,cv=4,seconds=86400", seed=1)
    gaps = np.diff(log.t_s)
    assert gaps.std() / gaps.mean() == pytest.approx(4, rel=0.08)


def test_an_unknown_kind_and_impossible_shares_are_named():
    with pytest.raises(InvalidRequest, match="no kind of trace"):
        generate_usage("storm", seed=1)
    with pytest.raises(InvalidRequest, match="at most 1 − own"):
        generate_usage("shock:correlation=0.6", seed=1)


# ---------------------------------------------------------------- files


def test_a_written_log_is_read_back_unchanged(tmp_path):
    log = generate_usage("poisson:models=5,seconds=3600,sizes=0.5", seed=2)
    write_usage(log, tmp_path / "log.csv")
    found = read_usage(tmp_path / "log.csv")
    assert np.array_equal(found.t_s, log.t_s)
    assert np.array_equal(found.exec_s, log.exec_s)
    assert [found.models[place] for place in found.model] == [log.models[place] for place in log.model]
    assert {found.models[i]: found.gpus[i] for i in range(5)} == {log.models[i]: log.gpus[i] for i in range(5)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing in it"),
        ("a,b\n1,2\n", "no log of models has the columns"),
        ("t_s,model,exec_s\n", "no request in it"),
        ("t_s,model,exec_s\n1,a,x\n", ":2: exec_s is 'x', not a number"),
        ("t_s,model,exec_s\n1,a,-1\n", ":2: exec_s is -1"),
        ("t_s,model,exec_s\n1,,3\n", ":2: model is empty"),
        ("t_s,model,exec_s\n1,a\n", ":2: 2 cells"),
        ("t_s,model,exec_s\n5,a,1\n4,a,1\n", "sort the file by time"),
        ("t_s,model,exec_s,gpus\n1,a,1,2\n2,a,1,4\n", "2 GPUs in one line, 4 in another"),
    ],
)
def test_a_broken_log_is_one_line_that_names_the_error(tmp_path, text, message):
    file = tmp_path / "log.csv"
    file.write_text(text)
    done = CliRunner().invoke(app, ["models", "backtest", str(file)])
    assert isinstance(done.exception, InvalidRequest)
    assert message in done.exception.message
    assert "\n" not in done.exception.message


def test_times_count_from_the_minute_of_the_first_request(tmp_path):
    """Unix time, and a log's later days, begin far from 0."""
    file = tmp_path / "log.csv"
    file.write_text("t_s,model,exec_s\n1700000030,a,1\n1700000090.5,a,2\n")
    assert read_usage(file).t_s.tolist() == [50.0, 110.5]


def test_aegaeons_columns_are_read_with_times_derived_from_tokens(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("Request Time,Model Name,Input Length,Output Length\n00:00:01.500,a,800,100\n00:00:02.000,b,8,10\n")
    log = read_usage(file)
    assert log.t_s.tolist() == [1.5, 2.0]
    assert log.exec_s.tolist() == pytest.approx([0.1 + 5.0, 0.001 + 0.5])
    assert "no times of execution" in log.notes[0]


@pytest.mark.parametrize(
    ("name", "count", "models"),
    [("alibaba_genai_2024-11.csv", 14_266, 76), ("aegaeon_synth_40models_0.1rps.csv", 181, 39)],
)
def test_a_public_log_is_read_completely(name, count, models):
    path = Path(DATA) / name
    if not DATA or not path.is_file():
        pytest.skip(f"FULCRUM_DATA names no folder with {name}; docs/data.md says where to download it")
    log = read_usage(path)
    assert (len(log.t_s), len(log.models)) == (count, models)


# ---------------------------------------------------------------- backtests


def test_an_assumption_of_independence_covers_too_little_for_correlated_models():
    found = backtest(generate_usage("shock:models=40,seconds=28800,correlation=0.3", seed=4), BacktestSettings())
    by_name = {score.policy: score for score in found.scores}
    ours, independent = by_name["fulcrum"], by_name["independent models, not calibrated"]
    assert independent.interval[1] < 0.99
    assert ours.keeps_confidence
    assert ours.keeps_cost
    assert by_name["fulcrum, not calibrated"].coverage > independent.coverage


def test_predictions_for_poisson_models_match_the_textbook():
    found = backtest(generate_usage("poisson:seconds=28800", seed=6), BacktestSettings(independent=False)).as_json()
    assert found["predicted_mean"] == pytest.approx(46.3, rel=0.03)
    assert found["active_mean"] == pytest.approx(46.3, rel=0.03)
    assert found["common_rate"] is None
    assert sum(count for name, count in found["laws"].items() if name.startswith("constant")) > 80


def test_a_log_that_is_too_short_is_refused_as_too_short():
    with pytest.raises(InvalidRequest, match="ask for shorter ones"):
        backtest(log_of([(0.0, 0, 5.0), (100.0, 0, 5.0)]), BacktestSettings())


def test_the_part_replayed_before_ctrl_c_is_scored(monkeypatch):
    plain = backtest_module.replay

    def interrupted(*arguments):
        for done in plain(*arguments):
            yield done
            if done == 70:
                raise KeyboardInterrupt

    monkeypatch.setattr(backtest_module, "replay", interrupted)
    found = backtest(generate_usage("poisson:models=10,seconds=7200", seed=1), BacktestSettings())
    assert found.interrupted
    assert found.as_json()["windows"] == 70 - found.warmup
    assert len(found.hindsight_gpus) == 70 - found.warmup


# ---------------------------------------------------------------- commands


def test_a_replay_of_a_generated_log_prints_one_line_of_json_and_writes_a_page(tmp_path):
    file, report = tmp_path / "day.csv", tmp_path / "out"
    made = CliRunner().invoke(
        app, ["models", "generate", "gamma:models=8,seconds=7200", "--out", str(file), "--json", "--seed", "3"]
    )
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["requests"] == len(file.read_text().splitlines()) - 1
    done = CliRunner().invoke(app, ["models", "backtest", str(file), "--json", "--report", str(report)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    wanted = {"windows", "active_mean", "predicted_mean", "p99_coverage", "reserved_gpus", "clairvoyant_gpus"}
    assert wanted <= found.keys()
    assert [each["policy"] for each in found["baselines"]][-4:] == [
        "fixed Poisson rates", "keep-alive 60 s", "keep-alive 300 s", "one GPU a model",
    ]  # fmt: skip
    assert "<svg" in (report / "index.html").read_text()
    assert len((report / "windows.csv").read_text().splitlines()) == found["windows"] + 1
    assert json.loads((report / "backtest.json").read_text()) == found


def test_a_table_for_people_names_every_policy(tmp_path):
    file = tmp_path / "day.csv"
    write_usage(generate_usage("poisson:models=6,seconds=3600", seed=1), file)
    done = CliRunner().invoke(app, ["models", "backtest", str(file), "--window", "30s", "--period", "10m"])
    assert done.exit_code == 0, done.output
    assert "keep-alive 300 s" in done.stdout
    assert "hindsight, constant for a period" in done.stdout


@pytest.mark.parametrize("option", [("--window", "1x"), ("--window", "0s"), ("--period", "10s"), ("--window", "30d")])
def test_an_invalid_time_is_named(tmp_path, option):
    done = CliRunner().invoke(app, ["models", "backtest", str(tmp_path / "none.csv"), *option])
    assert isinstance(done.exception, InvalidRequest)
    assert option[0] in done.exception.message


def test_kinds_are_listed():
    done = CliRunner().invoke(app, ["models", "generate", "--json"])
    assert set(json.loads(done.stdout)["kinds"]) == set(KINDS)


@pytest.mark.parametrize("command", [("models",), ("models", "backtest"), ("models", "generate")])
def test_help_has_an_example(command):
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.stdout
