"""Tests of the topics that a job may name: those on the operator's list, and never Kafka's own or ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import InvalidRequest, StartupError, TopicNotAllowed
from libs.launch.options import LaunchSettings
from libs.runtime.settings import load_settings
from services.gateway.batch.begin import AllowedTopics, read_request
from services.gateway.settings import GatewaySettings

NAMES = st.text("abz.-_0", min_size=1, max_size=12)


def allows(patterns: str, topic: str) -> bool:
    try:
        AllowedTopics(patterns).need(topic, param="output_topic")
    except TopicNotAllowed:
        return False
    return True


@given(NAMES)
def test_without_a_list_no_topic_is_allowed(topic: str) -> None:
    assert not allows("", topic) and not allows(" , ", topic)


@given(st.lists(NAMES, max_size=4), NAMES)
def test_a_name_on_the_list_allows_only_itself(names: list[str], topic: str) -> None:
    assert allows(",".join(names), topic) == (topic in names and not topic.startswith("__"))


@given(NAMES, NAMES, NAMES)
def test_a_star_matches_any_text_and_other_characters_are_literal(before: str, between: str, after: str) -> None:
    topic = f"{before}{between}{after}"
    assert allows(f"x,{before}*{after}", topic) == (not topic.startswith("__"))
    assert not allows(f"{before}*{after}", f"!{topic}")


@given(st.sampled_from(["fulcrum.", "__"]), NAMES, st.sampled_from(["*", "fulcrum.*", "__*", "f*,_*"]))
def test_kafkas_own_topics_and_ours_are_never_allowed(prefix: str, rest: str, patterns: str) -> None:
    assert not allows(patterns, prefix + rest)
    assert not allows(f"{patterns},{prefix}{rest}", prefix + rest)


@pytest.mark.parametrize("field", ["input_topic", "output_topic", "error_topic"])
def test_each_field_is_checked_against_the_list_and_named_by_the_error(field: str) -> None:
    lines = "" if field == "input_topic" else '"input_file_id": "file-1", '
    body = f'{{"endpoint": "/v1/completions", {lines}"{field}": "payments"}}'.encode()
    with pytest.raises(TopicNotAllowed, match="FULCRUM_GATEWAY_BATCH_TOPICS") as refused:
        read_request(body, topics=AllowedTopics("batch.*"), now_ns=0)
    assert refused.value.param == field
    assert getattr(read_request(body, topics=AllowedTopics("pay*"), now_ns=0), field) == "payments"


def test_an_invalid_topic_name_is_refused_as_invalid() -> None:
    body = b'{"endpoint": "/v1/completions", "input_topic": "a b"}'
    with pytest.raises(InvalidRequest, match="name of a topic"):
        read_request(body, topics=AllowedTopics("*"), now_ns=0)


def test_a_list_that_no_topic_can_match_is_an_invalid_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_GATEWAY_BATCH_TOPICS", "batch.[a-z]+")
    with pytest.raises(StartupError, match="FULCRUM_GATEWAY_BATCH_TOPICS"):
        load_settings(GatewaySettings)


@pytest.mark.parametrize(
    ("host", "said", "allowed"),
    [("127.0.0.1", None, "batch.*"), ("0.0.0.0", None, ""), ("127.0.0.1", "", ""), ("0.0.0.0", "a,b", "a,b")],
)
def test_a_suite_on_loopback_allows_topics_of_batch_by_default(
    monkeypatch: pytest.MonkeyPatch, host: str, said: str | None, allowed: str
) -> None:
    monkeypatch.setenv("FULCRUM_HOST", host)
    if said is not None:
        monkeypatch.setenv("FULCRUM_GATEWAY_BATCH_TOPICS", said)
    assert load_settings(LaunchSettings).batch_topics_allowed() == allowed
    assert load_settings(GatewaySettings).batch_topics == (said or "")
