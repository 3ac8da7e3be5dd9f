"""Tests of answers copied to a client's topic: one that does not fit does not affect the others."""

import json
import time
from collections.abc import Container, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from libs.bus.work import Produced, Raw
from libs.contracts.errors import TooLargeForTopic, TopicRefused
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.contracts.topics import BATCH_JOBS, BATCH_RESULTS, BATCH_SHARES
from libs.filestore.local import LocalFiles
from libs.policy.batch import GatewayLoad
from libs.runtime.clock import SystemClock
from libs.testing.batch.work import HOUR_NS, MemoryWork, created, running
from libs.testing.wait import until
from services.gateway.batch.line_request import Slots
from services.gateway.batch.lines import MAX_TOO_LARGE, BatchLine
from services.gateway.batch.runner import LaneRunner
from services.gateway.batch.view import JobView
from services.gateway.metrics import BatchMetrics
from services.gateway.request.formats import CompletionChoice, Envelope

LINES = 40
LARGE = 7
MAX_BYTES = 1_000


class SmallTopics(MemoryWork):
    """Clients' topics that accept small records, or none."""

    def __init__(self, takes: bool) -> None:
        super().__init__(BATCH_SHARES)
        self.takes = takes
        self.copied: list[Raw] = []

    async def commit(self, produced: Sequence[Produced], *, next_offset: int, note: str = "") -> None:
        raws = [item for item in produced if isinstance(item, Raw)]
        if raws and not self.takes:
            raise TopicRefused("nobody may write to it")
        if any(len(raw.value) > MAX_BYTES for raw in raws):
            raise TooLargeForTopic("topic answers does not take answers")
        self.copied += raws
        await super().commit(
            [item for item in produced if not isinstance(item, Raw)], next_offset=next_offset, note=note
        )


class Answers:
    """A requester that answers each line, some at length."""

    def __init__(self, large: Container[int]) -> None:
        self._large = large

    async def ask(self, share: pb.Share, line: BatchLine) -> Envelope[CompletionChoice]:
        text = "y" * (2 * MAX_BYTES if line.place in self._large else 1)
        return Envelope("id", "text_completion", 1, "m", [CompletionChoice(0, text)])


async def answer_a_job(
    work: SmallTopics, tmp_path: Path, share: pb.Share, large: Container[int] = (LARGE,)
) -> list[pb.Result]:
    files, view = LocalFiles(tmp_path / "files", max_bytes=10**6), JobView(work)
    async with files.draft("file-1", max_bytes=10**6) as draft:
        line = b'{"custom_id":"%03d","method":"POST","url":"/v1/completions","body":{}}\n'
        await draft.write(b"".join(line % number for number in range(LINES)))
        share.bytes = (await draft.keep(name="f", purpose="batch")).bytes
    runner = LaneRunner(
        files=files,
        requester=Answers(large),  # type: ignore[arg-type]
        slots=Slots(
            lambda: GatewayLoad(free=99, bound=0, people_waiting=0, lines_waiting=0), share=1, max_in_flight=99
        ),
        clock=SystemClock(),
        view=view,
        metrics=BatchMetrics(CollectorRegistry()),
        by_prefix=False,
    )
    await work.send(BATCH_JOBS, created("job"))
    await work.send(BATCH_SHARES, share)
    async with running(view.follow(), runner.work(work)):
        await until(lambda: work.next_offset == 1, what="the share's end")
    await until(lambda: len(work.values_of(BATCH_RESULTS)) == LINES)
    return [result for result in work.values_of(BATCH_RESULTS) if isinstance(result, pb.Result)]


def a_share(error_topic: str) -> pb.Share:
    return pb.Share(
        job_id="job",
        input_file_id="file-1",
        endpoint="/v1/completions",
        first_line=1,
        lines=LINES,
        expires_unix_ns=time.time_ns() + HOUR_NS,
        output_topic="answers",
        error_topic=error_topic,
    )


@pytest.mark.parametrize("error_topic", ["errors", ""])
async def test_an_answer_too_large_for_a_topic_is_in_the_file_and_all_others_are_in_both(
    tmp_path: Path, error_topic: str
) -> None:
    work = SmallTopics(takes=True)
    results = await answer_a_job(work, tmp_path, a_share(error_topic))
    assert all(result.ok for result in results)
    assert sorted(result.place for result in results) == list(range(LINES))
    answers = [int(raw.key) for raw in work.copied if raw.topic == "answers"]
    assert sorted(answers) == [place for place in range(LINES) if place != LARGE]
    reported = [json.loads(raw.value) for raw in work.copied if raw.topic == "errors"]
    assert [(error["custom_id"], error["error"]["code"]) for error in reported] == (
        [(f"{LARGE:03d}", "answer_too_large")] if error_topic else []
    )
    notes = [event.progress for event in work.values_of(BATCH_JOBS) if isinstance(event, pb.JobEvent)]
    assert max(progress.completed for progress in notes) == LINES


async def test_a_topic_that_refuses_everything_gets_no_more_copies(tmp_path: Path) -> None:
    work = SmallTopics(takes=False)
    results = await answer_a_job(work, tmp_path, a_share("errors"))
    assert len(results) == LINES
    assert not work.copied


async def test_a_topic_too_small_for_every_answer_is_given_up_soon(tmp_path: Path) -> None:
    work = SmallTopics(takes=True)
    results = await answer_a_job(work, tmp_path, a_share("errors"), range(LINES))
    assert len(results) == LINES
    assert len(work.copied) == MAX_TOO_LARGE
