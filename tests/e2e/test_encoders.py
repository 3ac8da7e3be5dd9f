"""Test of a suite that serves an encoder: its vectors are those that transformers computes."""

from pathlib import Path

import httpx
import pytest

from libs.testing.suites.suite import running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.torch, pytest.mark.timeout(600)]

TEXTS = ["a red fox runs", "the slow dog", "dogs over the hill " * 10, "fox"]


def test_an_encoders_folder_is_served_as_any_other(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from libs.testing.engines.encoder_model import vectors, write_random_encoder

    model = write_random_encoder(tmp_path / "tiny-bert", pooling="cls_token", normalizes=True)
    with running_suite(tmp_path, "--engine", "torch", "--model", str(model), "--prefill", "1") as suite:
        body = {"model": model.name, "input": TEXTS}
        answer = httpx.post(f"{suite.gateway}/v1/embeddings", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        for item, expected in zip(answer.json()["data"], vectors(model, TEXTS), strict=True):
            assert item["embedding"] == pytest.approx(expected, abs=1e-5)
