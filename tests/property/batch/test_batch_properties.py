"""Properties of batch jobs: shares cover a file, notes describe what is done, and people come first."""

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.policy.batch import LOOK_AHEAD, SHARE_LINES, GatewayLoad, allowed
from libs.policy.gateway.order import Line
from services.gateway.batch.job import ShareNote
from services.gateway.batch.lines import IdHashes, custom_id_of, read_line
from services.gateway.batch.shares import Cutter, after
from services.gateway.batch.view import MAX_EARLY, JobTable, snapshot

LINES = st.lists(
    st.one_of(
        st.sampled_from([b"", b"  ", b"{", b"null", b'{"custom_id": 3}', "é\ud7ff".encode(), b'"custom_id": "1"']),
        st.integers(0, 40).map(lambda number: json.dumps({"custom_id": str(number)}).encode()),
        st.integers(0, 9).map(lambda number: json.dumps({"a": {"custom_id": "x"}, "custom_id": str(number)}).encode()),
    ),
    max_size=3 * SHARE_LINES,
)


def cut(parts: Sequence[bytes], cutter: Cutter) -> Cutter:
    for part in parts:
        cutter.push(part)
    cutter.flush()
    return cutter


@given(LINES, st.integers(1, 50), st.booleans(), st.booleans())
def test_shares_cover_each_line_once_and_mark_repeated_ids(
    lines: list[bytes], part_bytes: int, ends: bool, marked: bool
) -> None:
    text = BOM_UTF8 * marked + b"\n".join(lines) + (b"\n" if ends and lines else b"")
    parts = [text[start : start + part_bytes] for start in range(0, len(text), part_bytes)]
    hashes = IdHashes()
    cutter = cut(parts, Cutter(on_line=hashes.add))
    finder = hashes.finder()
    cut(parts, Cutter(on_line=finder.add))

    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    assert cutter.lines == len(kept) == sum(span.lines for span in cutter.spans)
    seen: set[str] = set()
    repeated: list[int] = []
    place = 0
    for span in cutter.spans:
        inside = text[span.first_byte : span.first_byte + span.bytes].split(b"\n")
        found = [(span.first_line + index, line) for index, line in enumerate(inside) if line.strip()]
        assert (span.first_place, found) == (place, kept[place : place + span.lines])
        assert 0 < span.lines <= SHARE_LINES
        for index, (_, line) in enumerate(found):
            custom_id = custom_id_of(line)
            if custom_id is not None:
                if custom_id in seen:
                    repeated.append(place + index)
                seen.add(custom_id)
        place += span.lines
    assert list(finder.places) == repeated
    assert finder.needed or not repeated


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[]", "invalid_line", None),
        (b'{"custom_id": 7, "method": "POST", "url": "/x", "body": {}}', "invalid_line", "custom_id"),
        (b'{"custom_id": "7", "url": "/x", "body": {}}', "invalid_line", "method"),
        (b'{"custom_id": "7", "method": "POST", "url": "/x"}', "invalid_line", "body"),
    ],
)
def test_a_json_line_is_refused_with_the_missing_field(text: bytes, code: str, param: str | None) -> None:
    refusal = read_line(text, number=3, place=2, endpoint="/x", repeated=False).refusal
    assert refusal is not None
    assert (refusal.code, refusal.param, "line 3 " in refusal.message) == (code, param, True)


@given(LINES, st.data())
def test_shares_are_the_same_wherever_cutting_is_resumed(lines: list[bytes], data: st.DataObject) -> None:
    text = b"\n".join(lines)
    whole = cut([text], Cutter()).spans
    if not whole:
        return
    taken_up = after(whole[data.draw(st.integers(0, len(whole) - 1))])
    found = cut([text[taken_up.first_byte :]], Cutter(copy(taken_up))).spans
    assert found == whole[taken_up.number :]


@given(
    st.integers(1, SHARE_LINES).flatmap(
        lambda n: st.tuples(st.just(n), st.dictionaries(st.integers(0, n - 1), st.booleans()))
    )
)
def test_a_note_round_trips(case: tuple[int, dict[int, bool]]) -> None:
    lines, added = case
    note = ShareNote(lines)
    for index, ok in added.items():
        note.add(index, ok=ok)
    again = ShareNote.read(note.text(), lines)
    assert again == note
    assert [index for index in range(lines) if again.has(index)] == sorted(added)
    assert again.counts == (sum(added.values()), len(added) - sum(added.values()))
    assert again.whole == (len(added) == lines)
    assert len(again.text()) < 4096


COUNTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20)).map(
        lambda item: pb.JobEvent(
            job_id="job", at_unix_ns=7, progress=pb.Progress(share=item[0], completed=item[1], failed=item[2])
        )
    )
)


@given(COUNTS, st.lists(st.integers(0, 30)))
def test_repeated_events_change_no_job(events: list[pb.JobEvent], again: list[int]) -> None:
    def fold(found: list[pb.JobEvent]) -> tuple[int, int]:
        book = JobTable()
        book.apply(pb.JobEvent(job_id="job", created=pb.Created()))
        for event in found:
            job = book.apply(event)
        return (job.completed, job.failed) if found and job else (0, 0)

    repeated = list(events)
    repeated += [events[number % len(events)] for number in again if events]
    assert fold(repeated) == fold(events)


def whole(share: int, completed: int) -> pb.JobEvent:
    return pb.JobEvent(job_id="job", at_unix_ns=9, progress=pb.Progress(share=share, completed=completed, whole=True))


EVENTS = st.lists(
    st.one_of(
        st.builds(whole, st.integers(0, 5), st.integers(1, 30)),
        st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(0, 20)).map(
            lambda item: pb.JobEvent(
                job_id="job", at_unix_ns=7, progress=pb.Progress(share=item[0], completed=item[1], failed=item[2])
            )
        ),
        st.integers(1, 9).map(lambda n: pb.JobEvent(job_id="job", dealt=pb.Dealt(shares=n, lines=9 * n, next_byte=n))),
        st.integers(1, 9).map(
            lambda n: pb.JobEvent(job_id="job", assembled=pb.Assembled(output=pb.AssembledFile(lines=n)))
        ),
        st.just(pb.JobEvent(job_id="job", at_unix_ns=1, cancel_asked=pb.CancelAsked())),
        st.just(pb.JobEvent(job_id="job", at_unix_ns=2, started=pb.Started(lines=99, results_since=[4]))),
        st.just(pb.JobEvent(job_id="job", at_unix_ns=3, foretold=pb.Foretold(late=True))),
        st.sampled_from(["", "room"]).map(lambda text: pb.JobEvent(job_id="job", waits=pb.Waits(reason=text))),
    )
)


@given(EVENTS, EVENTS, EVENTS, st.booleans())
def test_a_reader_that_starts_at_a_repeated_created_event_learns_what_all_others_know(
    before: list[pb.JobEvent], meanwhile: list[pb.JobEvent], then: list[pb.JobEvent], ends: bool
) -> None:
    keeper, late = JobTable(), JobTable()
    created = pb.JobEvent(job_id="job", at_unix_ns=5, created=pb.Created(tenant="ann"))
    finished = [pb.JobEvent(job_id="job", at_unix_ns=8, finished=pb.Finished(completed=3))] if ends else []
    for event in (created, *before, *finished):
        keeper.apply(event)
    job = keeper.get("job")
    assert job is not None
    reported = pb.JobEvent(job_id="job", at_unix_ns=10, snapshot=snapshot(job))
    for event in (*meanwhile, reported, *then):
        keeper.apply(event)
        late.apply(pb.JobEvent.FromString(event.SerializeToString()))
    assert late.get("job") == keeper.get("job")


@given(st.data())
def test_a_second_created_event_hides_nothing_of_a_snapshot(data: st.DataObject) -> None:
    """The reader starts after the first one, and reads the second before the snapshot."""
    shares = [data.draw(st.integers(1, 5)) for _ in range(4)]
    progress = [
        pb.JobEvent(
            job_id="job",
            at_unix_ns=9,
            progress=pb.Progress(share=share, completed=done, failed=done // 2, whole=done == lines, note=f"{done}"),
        )
        for share, lines in enumerate(shares)
        for done in range(1, lines + 1)
    ]
    reported = sorted(progress, key=lambda event: data.draw(st.integers(0, 5)) + 10 * event.progress.completed)
    started = pb.JobEvent(job_id="job", at_unix_ns=2, started=pb.Started(lines=sum(shares)))
    created = pb.JobEvent(job_id="job", at_unix_ns=1, created=pb.Created(tenant="ann"))
    again = pb.JobEvent(job_id="job", at_unix_ns=5, created=pb.Created(tenant="ann"))
    keeper, late = JobTable(), JobTable()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reported)), min_size=3, max_size=3)))
    before, early, meanwhile, then = (
        reported[: cuts[0]],
        reported[cuts[0] : cuts[1]],
        reported[cuts[1] : cuts[2]],
        reported[cuts[2] :],
    )
    for event in (created, started, *before):
        keeper.apply(event)
    job = keeper.get("job")
    assert job is not None
    anew = pb.JobEvent(job_id="job", at_unix_ns=10, snapshot=snapshot(job))
    for event in (*early, again, *meanwhile, anew, *then):
        keeper.apply(event)
        late.apply(pb.JobEvent.FromString(event.SerializeToString()))
    assert late.get("job") == keeper.get("job")


def test_events_of_unknown_jobs_are_bounded_and_dropped_ones_counted() -> None:
    book = JobTable()
    for number in range(MAX_EARLY + 2):
        book.apply(pb.JobEvent(job_id=f"job-{number}", progress=pb.Progress(completed=1)))
    assert book.dropped == 2


@given(
    st.builds(
        GatewayLoad,
        free=st.integers(0, 100),
        bound=st.integers(0, 100),
        people_waiting=st.integers(0, 3),
        lines_waiting=st.integers(0, 40),
    ),
    st.floats(0.01, 1),
    st.integers(1, 64),
)
def test_batch_gets_no_slot_while_people_wait_and_leaves_room_otherwise(
    load: GatewayLoad, share: float, most: int
) -> None:
    found = allowed(load, share, most)
    assert found <= most
    assert found == 0 or not load.people_waiting
    assert found <= max(LOOK_AHEAD, share * (load.free + load.bound))


@dataclass(frozen=True)
class Item:
    arrival_unix_ns: int
    resumed: bool
    batch: bool
    ttft_deadline_unix_ns: int = 0
    prompt_tokens: int = 1


def order(items: list[Item]) -> list[Item]:
    line = Line[Item]()
    for number, item in enumerate(items):
        line.add(number, item)
    return list(line.in_order(0))


@given(st.lists(st.builds(Item, arrival_unix_ns=st.integers(0, 9), resumed=st.booleans(), batch=st.booleans())))
def test_no_batch_line_precedes_a_person(items: list[Item]) -> None:
    found = order(items)
    assert [item.batch for item in found] == sorted(item.batch for item in items)
    people = [item for item in items if not item.batch]
    assert [item for item in found if not item.batch] == order(people)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_line_or_a_reason(text: bytes) -> None:
    line = read_line(text, number=3, place=2, endpoint="/v1/completions", repeated=False)
    assert (line.number, line.place) == (3, 2)
    assert line.refusal is not None
