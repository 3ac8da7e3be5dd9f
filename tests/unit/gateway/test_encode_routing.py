"""Tests of routing prompts with images: encoding counts in predicted time wherever an embedding is not kept."""

from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.policy.gateway.binding import PredictedTtft, bind, least_encode_ns
from libs.policy.gateway.outlook import RECENT_IMAGES, SubmitLoad, WorkerOutlook, lend_speeds
from libs.policy.gateway.queues import model_queues
from libs.policy.gateway.view import BindingRequest, PlacedImage, WorkerView
from services.gateway.link import outlook_of, read_report
from tests.unit.gateway.test_routing import SPEED, decode, prefill, worker

MS = 1_000_000
FOX, OWL = PlacedImage(600, b"fox"), PlacedImage(1_200, b"owl")


def ask(*images: PlacedImage, key: int = 1, **cached: int) -> BindingRequest:
    return BindingRequest(key, "m", tokens=1_300, cached_tokens=cached, images=images)


def predicted_ms(request: BindingRequest, *views: WorkerView) -> float:
    (binding,) = bind([request], views, PredictedTtft())
    return binding.predicted.ttft_ns / MS


def encoder(**fields: Any) -> WorkerView:
    return prefill("p", image_ns=200.0 * MS, **fields)


def test_a_predicted_ttft_has_the_time_of_images_that_are_not_kept_or_behind_a_cached_prefix() -> None:
    d = decode("d")
    text = predicted_ms(ask(), encoder(), d)
    assert predicted_ms(ask(FOX, OWL), encoder(), d) == pytest.approx(text + 400)
    assert predicted_ms(ask(FOX, PlacedImage(1_200, b"fox")), encoder(), d) == pytest.approx(text + 200)
    assert predicted_ms(ask(FOX, OWL), encoder(recent_images={b"owl"}), d) == pytest.approx(text + 200)
    cached = predicted_ms(ask(p=600), encoder(), d)
    assert predicted_ms(ask(FOX, OWL, p=600), encoder(), d) == pytest.approx(cached + 200)
    assert predicted_ms(ask(FOX), prefill("p"), d) == pytest.approx(text), "the time is unknown"


def test_a_prompt_goes_where_its_image_is_kept_unless_the_queue_there_takes_longer() -> None:
    def chosen(wait_ms: float) -> str | None:
        holder = prefill("b", image_ns=200.0 * MS, recent_images={b"fox"}, reported_backlog_ns=wait_ms * MS)
        views = [prefill("a", image_ns=200.0 * MS), holder, decode("d")]
        return bind([ask(FOX)], views, PredictedTtft())[0].prompt_worker

    assert (chosen(100), chosen(300)) == ("b", "a")


def test_prompts_of_one_round_wait_for_the_images_of_those_before_them() -> None:
    views = [encoder(), decode("d")]
    first, second = bind([ask(FOX), ask(OWL, key=2)], views, PredictedTtft())
    alone = first.predicted.ttft_ns
    assert second.predicted.ttft_ns == pytest.approx(2 * alone)


def test_images_on_their_way_count_until_the_worker_reports_them() -> None:
    who = worker()
    outlook = outlook_of(who)

    def report(submits_taken: int, waiting_encode_ns: int) -> None:
        load = common.Load(
            free_kv_blocks=1000, images_encoded=4, image_encode_ns=800 * MS, waiting_encode_ns=waiting_encode_ns
        )
        read_report(outlook, pb.WorkerFrame(load=load, submits_taken=submits_taken), who, 0)

    def backlog_ms() -> float:
        return outlook.view(who, "k", prefill_credits=1, decode_credits=0).backlog_ns(0) / MS

    report(0, 0)
    assert backlog_ms() == 0
    count = outlook.take_images([FOX, OWL], 0)
    outlook.sent(1, SubmitLoad(images=count))
    assert backlog_ms() == pytest.approx(400)
    assert outlook.take_images([FOX], 0) == 0, "it is encoded by then"
    assert outlook.take_images([PlacedImage(600, b"new")], 600) == 0, "its KV is cached"
    report(1, 250 * MS)
    assert backlog_ms() == pytest.approx(250)
    view = outlook.view(who, "k", prefill_credits=1, decode_credits=0)
    assert (view.image_ns, b"fox" in view.recent_images, b"new" in view.recent_images) == (200 * MS, True, False)


def test_the_images_that_a_worker_is_believed_to_keep_are_bounded() -> None:
    outlook = WorkerOutlook("cpu", SPEED, 100)
    images = [PlacedImage(1, b"%d" % number) for number in range(RECENT_IMAGES + 1)]
    assert [outlook.take_images([each], 0) for each in (*images, images[-1], images[0])] == [1] * len(images) + [0, 1]


def test_a_worker_that_has_encoded_nothing_is_assumed_as_fast_as_its_peers() -> None:
    known, new, other = (WorkerOutlook(device, SPEED, 100) for device in ("gpu", "gpu", "cpu"))
    known.image_ns = 5.0
    lend_speeds([known, new, other])
    assert (new.image_ns, other.image_ns) == (5.0, 0.0)


def test_a_deadline_leaves_time_for_images_on_the_worker_that_needs_the_least() -> None:
    views = [encoder(), prefill("q", image_ns=100.0 * MS), decode("d", image_ns=1.0)]
    assert least_encode_ns([FOX, OWL], 0, views, "m") == 200 * MS
    assert least_encode_ns([FOX, OWL], 600, [encoder(recent_images={b"owl"})], "m") == 0
    assert least_encode_ns([FOX], 0, views, "other") == 0


class Waiting:
    model, tokens, decodes_next, pooled = "m", 100, False, False

    def __init__(self, images: int) -> None:
        self.images = [object()] * images


def test_a_queue_counts_the_images_of_prompts_that_are_not_computed() -> None:
    computed = Waiting(4)
    computed.decodes_next = True
    (queue,) = model_queues([Waiting(2), Waiting(0), computed, Waiting(1)], [prefill("p"), decode("d")])
    assert (queue.images, queue.prefill_requests, queue.decode_requests) == (3, 3, 1)
