"""Arithmetic and order of batch jobs: shares cover a file, notes tell what is done, people come first."""

import json
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from services.gateway.batch.jobs import JobBook
from services.gateway.batch.line import read_line
from services.gateway.batch.note import ShareNote
from services.gateway.batch.shares import SHARE_LINES, Cutter, custom_id_of
from services.gateway.batch.slots import LOOK_AHEAD, Load, allowed
from services.gateway.order import order

LINES = st.lists(
    st.one_of(
        st.sampled_from([b"", b"  ", b"{", b"null", b'{"custom_id": 3}', "é\ud7ff".encode(), b'"custom_id": "1"']),
        st.integers(0, 40).map(lambda number: json.dumps({"custom_id": str(number)}).encode()),
        st.integers(0, 9).map(lambda number: json.dumps({"a": {"custom_id": "x"}, "custom_id": str(number)}).encode()),
    ),
    max_size=3 * SHARE_LINES,
)


@given(LINES, st.integers(1, 50), st.booleans())
def test_shares_cover_each_line_once_and_mark_what_comes_again(lines: list[bytes], part_bytes: int, ends: bool) -> None:
    text = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    parts = [text[start : start + part_bytes] for start in range(0, len(text), part_bytes)]
    cutter = Cutter()
    for part in parts:
        cutter.push(part)
    cutter.flush()
    marker = cutter.marker(cutter.suspects())
    for part in parts:
        marker.push(part)
    marker.flush()

    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    assert cutter.lines == len(kept) == sum(span.lines for span in cutter.spans)
    seen: set[str] = set()
    place = 0
    for span in cutter.spans:
        inside = text[span.first_byte : span.first_byte + span.bytes].split(b"\n")
        found = [(span.first_line + index, line) for index, line in enumerate(inside) if line.strip()]
        assert (span.first_place, found) == (place, kept[place : place + span.lines])
        assert 0 < span.lines <= SHARE_LINES
        repeated = []
        for index, (_, line) in enumerate(found):
            custom_id = custom_id_of(line)
            if custom_id is not None:
                if custom_id in seen:
                    repeated.append(index)
                seen.add(custom_id)
        assert list(span.repeats) == repeated
        place += span.lines


@given(
    st.integers(1, SHARE_LINES).flatmap(
        lambda n: st.tuples(st.just(n), st.dictionaries(st.integers(0, n - 1), st.booleans()))
    )
)
def test_a_note_tells_what_was_put_into_it(case: tuple[int, dict[int, bool]]) -> None:
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


EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20)).map(
        lambda item: pb.JobEvent(
            job_id="job", at_unix_ns=7, progress=pb.Progress(share=item[0], completed=item[1], failed=item[2])
        )
    )
)


@given(EVENTS, st.lists(st.integers(0, 30)))
def test_events_that_come_again_change_no_job(events: list[pb.JobEvent], again: list[int]) -> None:
    def fold(found: list[pb.JobEvent]) -> tuple[int, int]:
        book = JobBook()
        book.apply(pb.JobEvent(job_id="job", created=pb.Created()))
        for event in found:
            job = book.apply(event)
        return (job.completed, job.failed) if found and job else (0, 0)

    repeated = list(events)
    repeated += [events[number % len(events)] for number in again if events]
    assert fold(repeated) == fold(events)


@given(
    st.builds(
        Load,
        free=st.integers(0, 100),
        bound=st.integers(0, 100),
        people_waiting=st.integers(0, 3),
        lines_waiting=st.integers(0, 40),
    ),
    st.floats(0.01, 1),
    st.integers(1, 64),
)
def test_batch_has_nothing_while_people_wait_and_leaves_room_otherwise(load: Load, share: float, most: int) -> None:
    found = allowed(load, share, most)
    assert found <= most
    assert found == 0 or not load.people_waiting
    assert found <= max(LOOK_AHEAD, share * (load.free + load.bound))


@dataclass(frozen=True)
class Item:
    arrival_unix_ns: int
    resumed: bool
    batch: bool


@given(st.lists(st.builds(Item, arrival_unix_ns=st.integers(0, 9), resumed=st.booleans(), batch=st.booleans())))
def test_no_batch_line_comes_before_a_person(items: list[Item]) -> None:
    found = order(items)
    assert [item.batch for item in found] == sorted(item.batch for item in items)
    people = [item for item in items if not item.batch]
    assert [item for item in found if not item.batch] == order(people)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_line_or_a_reason(text: bytes) -> None:
    line = read_line(text, number=3, place=2, endpoint="/v1/completions", repeated=False)
    assert (line.number, line.place) == (3, 2)
    assert line.refusal is not None
