"""Tests of small pure parts of the gateway: headers, credits, expiry, stop strings and model limits."""

import pytest

from libs.contracts.errors import ContextTooLong, InvalidRequest, NoWorkers, QueueFull, StartupError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch import waiting as waiting_queue
from libs.dispatch.generation import ApiFinishReason, Generation, RequestTimes
from libs.dispatch.ports import OneForAll, QueuedDemand
from libs.dispatch.waiting import WaitingQueue, expired
from libs.policy.gateway.order import WaitBounds
from libs.policy.gateway.outlook import CreditBalance
from libs.policy.gateway.view import WorkerView, serves
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel
from libs.runtime.settings import load_settings
from services.gateway.request.choice import StopMatcher
from services.gateway.request.parse import Defaults, ParsedRequest, parse_completion, read_headers
from services.gateway.request.prompt import check_fit, load_catalog
from services.gateway.request.recorder import request_event
from services.gateway.settings import GatewaySettings

MODEL = load_catalog({"sim": "builtin:sim"}).get("sim")
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def generation(number: int, *, arrival_ns: int = 0, queued_ns: int = 0, reroutes: int = 0) -> Generation:
    found = Generation(
        request_id=str(number), model="sim", prompt=b"\1\0\0\0", prompt_tokens=1, max_output_tokens=3,
        sampling=pb.Sampling(), context=pb.RequestContext(ttft_deadline_unix_ns=arrival_ns + 1),
        end_token_ids=frozenset({9}), sink=None, timeline=RequestTimes(arrival_ns, queued_ns),  # type: ignore[arg-type]
    )  # fmt: skip
    found.placement.queued(number)
    found.placement.reroutes = reroutes
    return found


def view(worker_id: str = "w", kv_kind: str = "k", **takes: bool) -> WorkerView:
    flags = {f"takes_{phase}": takes.get(phase, False) for phase in ("prefill", "decode", "both")}
    return WorkerView(worker_id, "sim", kv_kind, prefill_credits=0, decode_credits=0, load=0, **flags)


# ------------------------------------------------------------ what stays of a choice


def test_an_event_has_the_maximum_output_tokens_of_its_choice() -> None:
    event = request_event(generation(1), ApiFinishReason.STOP)
    assert (event.max_output_tokens, event.output_tokens) == (3, 0)


@pytest.mark.parametrize(("tokens_ns", "second_ns"), [((), 0), ((1_300,), 0), ((1_300, 1_450, 1_500), 450)])
def test_an_event_has_the_time_of_the_second_token(tokens_ns: tuple[int, ...], second_ns: int) -> None:
    choice = generation(1, arrival_ns=1_000)
    for at_ns in tokens_ns:
        choice.timeline.token(at_ns)
    event = request_event(choice, ApiFinishReason.STOP)
    assert event.second_token_ns == second_ns
    assert event.ttft_ns == (300 if tokens_ns else 0)
    assert event.decode_ns == (tokens_ns[-1] - tokens_ns[0] if tokens_ns else 0)


# ------------------------------------------------------------ headers


def test_headers_have_defaults() -> None:
    headers = read_headers({})
    context = headers.context(1000, Defaults("g", 5000, 100))
    assert (headers.request_id, context.tenant, context.service_class) == ("", "default", "online")
    assert context.ttft_deadline_unix_ns == 1000 + 5_000_000_000
    assert context.tpot_target_us == 100_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-fulcrum-ttft-deadline-ms", b"soon"),
        (b"x-fulcrum-ttft-deadline-ms", b"-1"),
        (b"x-fulcrum-ttft-deadline-ms", b"nan"),
        (b"x-fulcrum-tpot-target-ms", b"inf"),
        (b"x-fulcrum-tpot-target-ms", b"0"),
        (b"x-fulcrum-tenant", b"a b"),
        (b"x-fulcrum-class", b""),
        (b"x-request-id", b"\xff"),
        (b"x-request-id", b"x" * 129),
    ],
)
def test_an_invalid_header_is_refused_by_name(name: bytes, value: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_headers({name: value})
    assert caught.value.param == name.decode()


def test_a_trace_context_is_propagated_or_dropped() -> None:
    assert read_headers({b"traceparent": TRACE}).traceparent == TRACE.decode()
    assert read_headers({b"traceparent": b"garbage"}).traceparent == ""
    assert read_headers({b"traceparent": TRACE + b", " + TRACE}).traceparent == "", "of two lines"


# ------------------------------------------------------------ credits


def test_a_recall_takes_free_credits_now_and_reserved_ones_once_they_are_free() -> None:
    purse = CreditBalance()
    purse.grant(3)
    purse.reserve()
    purse.recall(3)
    assert purse.give_back() == 2
    assert purse.give_back() == 0
    purse.release()
    assert purse.give_back() == 1
    assert (purse.free, purse.reserved, purse.owed) == (0, 0, 0)


def test_a_recall_is_settled_by_use() -> None:
    purse = CreditBalance()
    purse.grant(2)
    purse.reserve()
    purse.reserve()
    purse.recall(2)
    purse.use_reserved()
    purse.use_reserved()
    purse.grant(1)
    assert purse.give_back() == 0
    assert purse.free == 1


# ------------------------------------------------------------ queue


def test_resumed_requests_come_first_then_first_come_first_served() -> None:
    queue = WaitingQueue(10)
    late, early, resumed = generation(1, arrival_ns=20), generation(2, arrival_ns=10), generation(3, arrival_ns=30)
    resumed.placement.reroutes = 1
    for item in (early, late, resumed):
        queue.add(item, 0)
    assert queue.in_order(0) == [resumed, early, late]
    demand = queue.demand("sim", 0)
    assert (demand.waiting, demand.waiting_tokens, demand.head_deadline_unix_ns) == (3, 3, 31)
    for item in (late, early, resumed):
        assert queue.remove(item)
    assert not queue.remove(late)
    assert queue.demand("sim", 0) == QueuedDemand()


MS = 1_000_000
MS_A_TOKEN = Speed(StepTimeModel(0.0, MS, 0.0, 0.0, 0.0, 0.0, 0.0), chunk_tokens=512)


def waits(number: int, tokens: int, arrival_ns: int, limit_ms: int) -> Generation:
    """A request that waits for its first token, `limit_ms` at most."""
    found = generation(number, arrival_ns=arrival_ns, queued_ns=arrival_ns)
    found.prompt_tokens, found.prompt = tokens, b"\1\0\0\0" * tokens
    found.context.ttft_deadline_unix_ns = arrival_ns + limit_ms * MS
    return found


def takes_one(prompt_tokens: int = 0) -> WorkerView:
    """A worker at a millisecond a prompt token."""
    return WorkerView(
        "w", "sim", "k", takes_prefill=True, takes_decode=True, takes_both=False, prefill_credits=1, decode_credits=9,
        load=0, speed=MS_A_TOKEN, prompt_tokens=prompt_tokens,
    )  # fmt: skip


def queued_at_a_known_pace() -> tuple[WaitingQueue, list[Generation], int]:
    """A long prompt before two short ones, after 2 s in which the one worker took 100 ms of prefill each 100 ms."""
    queue, now_ns, views = WaitingQueue(100), 1_000_000 * MS, [takes_one()]
    for number in range(21):
        queue.add(waits(number, 100, now_ns, 60_000), now_ns)
    queue.judge(views)
    for each in list(queue)[:20]:
        now_ns += 100 * MS
        queue.bound(each, now_ns)
    queue.remove(next(iter(queue)))
    waiting = [waits(100, 600, now_ns, 2_000), waits(101, 100, now_ns, 800), waits(102, 100, now_ns, 800)]
    for each in waiting:
        queue.add(each, now_ns)
    queue.judge(views)
    return queue, waiting, now_ns


def test_a_long_prompt_makes_room_at_the_measured_pace_of_departures() -> None:
    queue, (long, *short), now_ns = queued_at_a_known_pace()
    assert queue.in_order(now_ns, [takes_one()]) == [*short, long]
    for each in short:
        queue.remove(each)
    assert queue.in_order(now_ns, [takes_one()]) == [long]


def test_no_prompt_makes_room_while_none_can_start() -> None:
    queue, waiting, now_ns = queued_at_a_known_pace()
    assert queue.in_order(now_ns, [takes_one(prompt_tokens=10_000)]) == waiting


def test_the_longest_unused_paces_of_many_models_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "MOST_PACES", 3)
    queue = WaitingQueue(10)
    for number in range(8):
        item = generation(number)
        item.model = f"model-{number % 5}"
        queue.add(item, 0)
        queue.remove(item)
    assert list(queue._paces) == ["model-0", "model-1", "model-2"]


def test_the_queue_accepts_resumed_requests_beyond_its_bound() -> None:
    queue = WaitingQueue(1)
    queue.check_room(1, 0)
    queue.add(generation(1), 0)
    with pytest.raises(QueueFull) as caught:
        queue.check_room(1, 0)
    assert caught.value.retry_after_s
    queue.add(generation(2), 0)
    assert len(queue) == 2


def test_a_wait_times_out_sooner_without_any_worker() -> None:
    waited = [generation(1, queued_ns=0), generation(2, queued_ns=int(8e9))]
    patience = WaitBounds(max_wait_ms=10_000, no_workers_wait_ms=1_000)
    both = [view(both=True)]
    assert expired(waited, both, patience, now_ns=int(9e9 - 1), drain_s=7.0) == []
    for views, now_ns, error in (([], int(8.5e9), NoWorkers), (both, int(11e9), QueueFull)):
        ended = expired(waited, views, patience, now_ns=now_ns, drain_s=7.0)
        assert [(g.placement.sequence_id, type(e)) for g, e in ended] == [(1, error)]


@pytest.mark.parametrize(
    ("views", "ready"),
    [
        ([], False),
        ([view(both=True)], True),
        ([view(prefill=True)], False),
        ([view(decode=True)], False),
        ([view(prefill=True), view(decode=True)], True),
        ([view(prefill=True, kv_kind="a"), view(decode=True, kv_kind="b")], False),
    ],
)
def test_a_model_is_served_if_both_phases_have_workers_that_fit(views: list[WorkerView], ready: bool) -> None:
    assert serves(views, "sim") is ready
    assert not serves(views, "other")


# ------------------------------------------------------------ stops and ends


@pytest.mark.parametrize(
    ("stops", "pieces", "sent", "stopped"),
    [
        (["END"], ["abcE", "N", "Dxyz"], "abc", True),
        (["END"], ["abcE", "N", "x"], "abcENx", False),
        (["END"], ["EEN", "D"], "E", True),
        (["abc", "b"], ["a", "b", "c"], "a", True),
        (["abc", "b"], ["abc"], "a", True),
        (["aab"], ["a", "a", "a", "b"], "a", True),
        (["😀"], ["x😀y"], "x", True),
        ([], ["abc"], "abc", False),
    ],
)
def test_text_ends_before_the_first_complete_stop_string(
    stops: list[str], pieces: list[str], sent: str, stopped: bool
) -> None:
    matcher = StopMatcher(stops)
    found = ""
    for piece in pieces:
        text, ended = matcher.push(piece)
        found += text
        if ended:
            break
    else:
        found += matcher.flush()
        ended = False
    assert (found, ended) == (sent, stopped)
    assert (matcher.matched in stops) is stopped


@pytest.mark.parametrize(
    ("stops", "early", "late", "sent", "stopped"),
    [
        (["END"], "aENDb", "cENDd", "aENDbc", True),
        (["END"], "aEN", "Db", "a", True),
        (["END"], "aEND", "b", "aENDb", False),
        (["aa"], "aa", "a", "a", True),
        (["abcd", "bc"], "abc", "d", "", True),
        (["abcd", "bc"], "abc", "x", "abcx", False),
    ],
)
def test_a_stop_string_counts_if_it_ends_after_the_exempt_text(
    stops: list[str], early: str, late: str, sent: str, stopped: bool
) -> None:
    for pushes in ([(early, len(early)), (late, 0)], [(early + late, len(early))]):
        matcher, found, ended = StopMatcher(stops), "", False
        for text, exempt_chars in pushes:
            shown, ended = matcher.push(text, exempt_chars)
            found += shown
        assert (found if ended else found + matcher.flush(), ended) == (sent, stopped)


def test_output_is_complete_at_an_end_token_or_the_bound() -> None:
    one = generation(1)
    assert one.complete() is None
    one.output = [1, 9]
    assert one.complete() is ApiFinishReason.STOP
    one.output = [1, 2, 3]
    assert one.complete() is ApiFinishReason.LENGTH


# ------------------------------------------------------------ what fits


def parsed_request(body: bytes) -> ParsedRequest:
    return parse_completion(body)


@pytest.mark.parametrize(
    ("body", "prompts", "error", "param"),
    [
        (b'{"model":"sim","prompt":"x"}', [[]], InvalidRequest, "prompt"),
        (b'{"model":"sim","prompt":[1]}', [[260]], InvalidRequest, "prompt"),
        (b'{"model":"sim","prompt":[1]}', [[-1]], InvalidRequest, "prompt"),
        (b'{"model":"sim","prompt":[1]}', [[2**70]], InvalidRequest, "prompt"),
        (b'{"model":"sim","prompt":[1]}', [[1] * 100], ContextTooLong, "prompt"),
        (b'{"model":"sim","prompt":[1],"max_tokens":91}', [[1] * 10], ContextTooLong, "max_tokens"),
        (b'{"model":"sim","prompt":[1],"logit_bias":{"260":1}}', [[1]], InvalidRequest, "logit_bias"),
        (b'{"model":"sim","prompt":[1],"stop_token_ids":[260]}', [[1]], InvalidRequest, "stop_token_ids"),
    ],
)
def test_a_request_that_does_not_fit_the_model_is_refused_by_its_field(
    body: bytes, prompts: list[list[int]], error: type[InvalidRequest], param: str
) -> None:
    with pytest.raises(error) as caught:
        check_fit(parsed_request(body), prompts, MODEL, 100)
    assert caught.value.param == param


def test_a_bias_beyond_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias: '999' is beyond the vocabulary's 260 tokens"):
        check_fit(parsed_request(b'{"model":"sim","prompt":[1],"logit_bias":{"9":1,"999":1}}'), [[1]], MODEL, 100)


def test_a_request_that_fits_exactly_is_accepted() -> None:
    assert check_fit(parsed_request(b'{"model":"sim","prompt":[1],"max_tokens":90}'), [[1] * 10], MODEL, 100) == 90


# ------------------------------------------------------------ settings


@pytest.mark.parametrize("value", ["{", "[]", '{"a": 1}', "sim"])
def test_models_that_are_not_a_json_object_of_folders_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FULCRUM_GATEWAY_MODELS", value)
    with pytest.raises(StartupError, match="FULCRUM_GATEWAY_MODELS"):
        load_settings(GatewaySettings)


def test_models_are_parsed_from_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_GATEWAY_MODELS", '{"a": "/b"}')
    assert load_settings(GatewaySettings).models == {"a": "/b"}


def test_the_builtin_model_is_served_by_default() -> None:
    assert GatewaySettings.model_validate({}).models == {"sim": "builtin:sim"}


class DistinctTenants(OneForAll):
    are_distinct = True


def test_one_tenant_leaves_room_in_the_queue_for_others() -> None:
    queue = WaitingQueue(10, DistinctTenants())
    held = [generation(number) for number in range(1, 6)]
    for each in held:
        queue.check_tenant(each.context.tenant, 1, 0)
        queue.add(each, 0)
    with pytest.raises(QueueFull, match="5 requests of tenant"):
        queue.check_tenant(held[0].context.tenant, 1, 0)
    queue.check_tenant("another", 2, 0)
    with pytest.raises(QueueFull, match="0 requests of tenant another are waiting already, of 5"):
        queue.check_tenant("another", 3, 0)
    queue.remove(held[0])
    queue.check_tenant(held[0].context.tenant, 1, 0)


def test_a_deadline_nearer_than_the_class_allows_is_replaced_by_that_of_the_class() -> None:
    defaults = Defaults("g", 5000, 100, {"online": (300.0, 20.0), "*": (2000.0, 0.0)})

    def wants(name: str, ttft_ms: int, tpot_ms: int) -> tuple[int, int]:
        found = {
            b"x-fulcrum-class": name.encode(),
            b"x-fulcrum-ttft-deadline-ms": str(ttft_ms).encode(),
            b"x-fulcrum-tpot-target-ms": str(tpot_ms).encode(),
        }
        context = read_headers(found).context(0, defaults)
        return context.ttft_deadline_unix_ns // 1_000_000, context.tpot_target_us // 1000

    assert wants("online", 1, 1) == (300, 20)
    assert wants("online", 900, 50) == (900, 50)
    assert wants("chat", 1, 1) == (2000, 1)
