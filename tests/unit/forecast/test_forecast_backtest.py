"""Tests of backtests: scores, baselines, the command, and the aims on real demand."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from libs.cli.forecast.backtest import mean_ratio, parse_horizons, spell
from libs.cli.main import app
from libs.contracts.errors import InvalidRequest
from libs.forecast.backtest import (
    HORIZONS_S,
    block_error,
    inside,
    interval_score,
    make_plan,
    mase,
    pinball,
    run,
    score,
    wape,
)
from libs.forecast.baselines import (
    Autoregression,
    BaselineTask,
    DynamoKalman,
    ExponentialSmoothing,
    Persistence,
    SeasonalNaive,
    light_baselines,
)
from libs.forecast.demand_file import read_demand
from libs.lab.rivals.dynamo_predictors import Kalman
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import DemandHistory, Floats, history_from_rates
from libs.policy.forecast.model import DemandForecaster

DATA = Path(os.environ.get("FULCRUM_DATA", ""))


def _demand(requests: Floats) -> DemandHistory:
    rates = {"requests": requests, "known_requests": requests}
    return history_from_rates(
        np.arange(len(requests)) * 600.0, {**rates, "prefill": requests * 100, "decode": requests * 20}
    )


def _write(path: Path, history: DemandHistory, text: str = "") -> Path:
    lines = ["t_s,requests_per_s,known_requests_per_s,prefill_tokens_per_s,decode_tokens_per_s"]
    for at, (rate, prefill, decode) in enumerate(zip(history.requests, history.prefill, history.decode, strict=True)):
        lines.append(f"{600 * at},{rate:.6f},{rate:.6f},{prefill:.6f},{decode:.6f}")
    path.write_text("\n".join(lines) + "\n" + text)
    return path


def _daily(days: int, noise: float = 0.05) -> Floats:
    at = np.arange(days * 144)
    return 50 * np.exp(0.8 * np.sin(2 * np.pi * at / 144) + np.random.default_rng(3).normal(0, noise, len(at)))


def test_scores_equal_those_computed_by_hand() -> None:
    came, point = np.array([10.0, 20.0]), np.array([12.0, 15.0])
    assert wape(came, point) == pytest.approx(7 / 30)
    assert mase(came, point, 7.0) == pytest.approx(0.5)
    quantiles = np.tile(np.full(len(LEVELS), 8.0), (1, 1))
    assert pinball(np.array([10.0]), quantiles) == pytest.approx(2 * 0.5)
    assert interval_score(np.array([10.0]), quantiles) == pytest.approx(2 * 2 * 0.5)
    spread = np.linspace(1, 7, len(LEVELS))[None].repeat(3, axis=0)
    assert inside(np.array([0.9, 1.0, 7.0]), spread).tolist() == [0, 1, 1]


def test_correlated_outcomes_widen_the_uncertainty() -> None:
    alone = np.random.default_rng(1).random(600) < 0.9
    together = np.repeat(np.random.default_rng(1).random(20) < 0.9, 30)
    assert block_error(together.astype(float), 36) > 2 * block_error(alone.astype(float), 36)


def _said(baseline: Any, values: Floats, fitted: int, origin: int, horizons: tuple[int, ...] = (1, 6)) -> Floats:
    found: Floats | None = baseline.predict(BaselineTask(_demand(values), "requests", fitted, [origin], horizons))
    assert found is not None
    return found[0]


def test_simple_baselines_do_what_their_names_say() -> None:
    values = _daily(10)
    assert _said(Persistence(), values, 900, 1000).tolist() == [values[1000]] * 2
    assert _said(SeasonalNaive("day", 86_400), values, 900, 1000).tolist() == [values[857], values[862]]
    assert _said(SeasonalNaive("week", 604_800), values, 1100, 1200, (1008,)).tolist() == [values[1200]]
    short = BaselineTask(_demand(values[:50]), "requests", 40, [45], (1,))
    assert SeasonalNaive("day", 86_400).predict(short) is None


def test_holt_winters_follows_a_season_and_ets_a_level() -> None:
    values = _daily(8, noise=0.01)
    clean = 50 * np.exp(0.8 * np.sin(2 * np.pi * np.arange(8 * 144 + 40) / 144))
    origin = 7 * 144 + 10
    found = _said(ExponentialSmoothing("holt-winters", 86_400.0), values, 7 * 144, origin, (1, 36))
    assert found == pytest.approx([clean[origin + 1], clean[origin + 36]], rel=0.1)
    noisy = 100 + np.random.default_rng(2).normal(0, 10, 600)
    assert _said(ExponentialSmoothing("ets"), noisy, 500, 590) == pytest.approx([100, 100], rel=0.1)


def test_an_autoregression_returns_to_the_mean_as_fast_as_its_series() -> None:
    rng = np.random.default_rng(4)
    values = np.zeros(3000)
    for at in range(1, 3000):
        values[at] = 0.9 * values[at - 1] + rng.normal()
    found = _said(Autoregression(), values + 100, 2900, 2950, (1, 6, 60))
    expected = [100 + 0.9**h * values[2950] for h in (1, 6, 60)]
    assert found == pytest.approx(expected, abs=1.0)


def test_dynamos_filter_is_the_one_that_the_lab_uses() -> None:
    values = _daily(1)
    theirs = Kalman()
    for each in values[:100]:
        theirs.add(each * 600)
        said = theirs.next()
    assert _said(DynamoKalman(), values, 90, 99, (1,))[0] * 600 == pytest.approx(said)


def test_a_record_has_every_figure_and_names_the_baselines_that_ran() -> None:
    history = _demand(_daily(6))
    found = run(history, make_plan(history, HORIZONS_S), DemandForecaster(), light_baselines(), every=3)
    records = score(found)
    assert {(each["series"], each["horizon_s"]) for each in records} == {
        (series, horizon) for series in ("requests", "prefill", "decode") for horizon in HORIZONS_S[:3]
    } | {(series, 86_400) for series in ("requests", "prefill", "decode")}
    for each in records:
        assert {"wape", "mase", "pinball", "coverage90", "best_baseline", "best_baseline_wape", "wis"} <= set(each)
        assert each["best_baseline_wape"] == each["baselines"][each["best_baseline"]]["wape"]
        assert "persistence" in each["baselines"]
    ahead = next(each for each in records if each["horizon_s"] == 10_800)
    assert ahead["wape"] < ahead["best_baseline_wape"]


def test_half_of_a_short_file_is_scored_and_horizons_that_do_not_fit_are_omitted() -> None:
    plan = make_plan(_demand(np.ones(144)), HORIZONS_S)
    assert plan.horizons == (1, 6, 18)
    assert plan.test_from == 72
    with pytest.raises(ValueError, match="too few"):
        make_plan(_demand(np.ones(10)), HORIZONS_S)


def test_the_command_prints_a_list_of_records(tmp_path: Path) -> None:
    file = _write(tmp_path / "mine.csv", _demand(_daily(3)))
    arguments = ["forecast", "backtest", str(file), "--json", "--horizons", "10m,1h", "--every", "6"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    records = json.loads(done.stdout)
    assert {each["file"] for each in records} == {"mine"}
    assert {each["horizon_s"] for each in records} == {600, 3600}
    table = CliRunner().invoke(app, [each for each in arguments if each != "--json"])
    assert "1 h and more: WAPE is" in table.stdout
    assert "requests that came" in table.stdout and "predicted 1 h before" in table.stdout


@pytest.mark.system  # on a fresh machine matplotlib runs fc-list for its fonts
def test_the_report_is_one_page_with_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = _write(tmp_path / "mine.csv", _demand(_daily(2)))
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["forecast", "backtest", str(file), "--horizons", "1h", "--report", str(out), "--every", "9"]
    )
    assert done.exit_code == 0, done.output
    page = (out / "index.html").read_text()
    assert page.count("<svg") == 5
    assert json.loads((out / "backtest.json").read_text())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing in it"),
        ("t_s,requests_per_s\n1,2\n", "no column known_requests_per_s"),
        ("HEAD", "no bin after the header"),
        ("HEAD\n0,1,1,5\n", ":2: 4 cells"),
        ("HEAD\n0,1,1,5,many\n", "decode_tokens_per_s is 'many', not a number"),
        ("HEAD\n0,-1,1,5,5\n", ":2: requests_per_s is -1"),
        ("HEAD\n0,1,1,5,5\n600,1,1,5,5\n", "2 bins are too few"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    head = "t_s,requests_per_s,known_requests_per_s,prefill_tokens_per_s,decode_tokens_per_s"
    file = tmp_path / "bad.csv"
    file.write_text(text.replace("HEAD", head))
    done = CliRunner().invoke(app, ["forecast", "backtest", str(file)])
    assert isinstance(done.exception, InvalidRequest)
    assert words in done.exception.message
    assert "\n" not in done.exception.message


def test_gaps_a_clock_step_and_zeros_are_accepted(tmp_path: Path) -> None:
    values = _daily(2)
    values[100:130] = 0
    file = _write(tmp_path / "odd.csv", _demand(values), text="120000,3,3,10,10\n300000,,,,\n")
    done = CliRunner().invoke(
        app, ["forecast", "backtest", str(file), "--json", "--every", "9"], catch_exceptions=False
    )
    assert json.loads(done.stdout)
    assert "the clock was set back 1 times" in done.stderr
    assert "have no sample" in done.stderr


def test_times_are_parsed_and_formatted() -> None:
    assert parse_horizons("10m,1.5h,2d") == (600, 5400, 172_800)
    assert [spell(each) for each in (600, 5400, 86_400, 45)] == ["10 min", "90 min", "24 h", "45 s"]
    for text in ("", "10", "h", "0m", "1h,,2h"):
        with pytest.raises(InvalidRequest):
            parse_horizons(text)
    assert mean_ratio([2, 8, None]) == pytest.approx(4)


def test_an_unknown_baseline_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["forecast", "backtest", str(tmp_path / "x.csv"), "--baselines", "oracle"])
    assert "no baseline is called 'oracle'" in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["servegen_m-large_10min.csv", "servegen_deepseek-r1_10min.csv"])
def test_on_real_demand_the_aims_against_light_baselines_are_met(name: str) -> None:
    if not (DATA / name).is_file():
        pytest.skip(f"FULCRUM_DATA names no folder with {name}; docs/data.md says where to download it")
    history = read_demand(DATA / name)
    found = run(history, make_plan(history, HORIZONS_S), DemandForecaster(), light_baselines(), every=2)
    records = score(found)
    far = [each["wape"] / each["best_baseline_wape"] for each in records if each["horizon_s"] >= 3600]
    near = [each["wape"] / each["best_baseline_wape"] for each in records if each["horizon_s"] < 3600]
    assert (mean_ratio(far) or 9) <= 0.92
    assert (mean_ratio(near) or 9) <= 1.02
    for each in records:
        doubt = 2.6 * each["coverage90_error"] + 0.01
        assert each["coverage90"] >= 0.9 - doubt, each
        assert each["coverage90"] <= 0.9 + doubt or len(history) < 1000, each  # with a day of history wider is honest
