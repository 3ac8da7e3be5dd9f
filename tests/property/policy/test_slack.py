"""Properties of prompt budgets from TPOT slack."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.step_time import StepTimeModel, StepWork, chunks_work
from libs.policy.worker.pace import (
    IN_HAND,
    MAX_HOLD_NS,
    MAX_JOINED_TPOTS,
    MAX_STEP_NS,
    MAX_STEP_TPOTS,
    TokenLine,
    largest,
    largest_batch,
    prefill_chunk,
    step_limit_ns,
)
from tests.property.policy.chunks import first_chunks

MS = 1_000_000
models = st.builds(
    StepTimeModel,
    st.floats(0, 3e7),
    st.floats(0, 1e6),
    st.floats(0, 10),
    st.floats(0, 5e7),
    st.floats(0, 1e6),
    st.floats(0, 1e3),
    interference=st.floats(0, 1),
    prefill_floor_ns=st.floats(0, 3e7),
)
decodes = st.builds(
    lambda batch, context: StepWork(decode_sequences=batch, decode_kv_tokens=batch * context),
    st.integers(1, 64),
    st.integers(1, 8192),
)
lines = st.builds(TokenLine, st.integers(0, 10**10), st.integers(MS, 500 * MS), st.integers(0, 500))
prompts = st.lists(
    st.builds(lambda start, tokens: (start, start + tokens), st.integers(0, 30_000), st.integers(1, 9000)), max_size=5
)
now = st.integers(0, 10**11)


@given(models, decodes, st.lists(lines, min_size=1, max_size=8), prompts, st.integers(0, 8192), now)
def test_a_chunk_meets_every_target_that_can_be_met_and_is_as_large_as_that_allows(  # noqa: PLR0917
    model: StepTimeModel,
    work: StepWork,
    running: list[TokenLine],
    waiting: list[tuple[int, int]],
    most: int,
    now_ns: int,
) -> None:
    tokens = prefill_chunk(model, work, running, waiting, most_tokens=most, waited_ns=0, now_ns=now_ns)
    room = min(most, sum(end - start for start, end in waiting))
    assert 0 <= tokens <= room
    alone_ns = model.decode_ns(work)
    kept = [line for line in running if now_ns + alone_ns <= line.due_ns]

    def step_ns(size: int) -> float:
        return model.step_ns(chunks_work(first_chunks(waiting, size), work))

    if tokens:
        assert step_ns(tokens) <= MAX_STEP_NS
        assert all(now_ns + step_ns(tokens) <= line.due_ns * (1 + 1e-12) for line in kept)
        late = [line for line in running if line not in kept and line.tpot_ns >= alone_ns]
        assert all(step_ns(tokens) <= line.tpot_ns for line in late), "a late one falls further behind"
    spare_ns = [line.due_ns - IN_HAND * line.tpot_ns * (line.tokens + 1) - now_ns for line in running]
    if min(spare_ns) >= alone_ns and tokens < room:
        held = [MAX_STEP_TPOTS * line.tpot_ns for line in running if line.tpot_ns >= alone_ns]
        longest_ns = min([MAX_STEP_NS, *held])
        assert step_ns(tokens + 1) > min(longest_ns, *spare_ns)


@given(models, decodes, st.lists(lines, min_size=1, max_size=8), prompts, st.integers(0, 8192), now, st.booleans())
def test_the_chunk_equals_the_result_of_a_search_over_all_sizes(  # noqa: PLR0917
    model: StepTimeModel,
    work: StepWork,
    running: list[TokenLine],
    waiting: list[tuple[int, int]],
    most: int,
    now_ns: int,
    held: bool,
) -> None:
    def step_ns(size: int) -> float:
        return model.step_ns(chunks_work(first_chunks(waiting, size), work))

    limit_ns = step_limit_ns(model.decode_ns(work), running, now_ns=now_ns)
    if held and waiting:
        limit_ns = max(limit_ns, 2 * model.decode_ns(work), step_ns(1))
    room = min(most, sum(end - start for start, end in waiting))
    assert prefill_chunk(
        model, work, running, waiting, most_tokens=most, waited_ns=MAX_HOLD_NS * held, now_ns=now_ns
    ) == largest(lambda size: step_ns(size) <= limit_ns, room)


@given(models, decodes, prompts, st.integers(1, 8192), st.integers(1, 8192))
def test_a_limit_that_a_chunk_uses_exactly_suffices_for_it(
    model: StepTimeModel, work: StepWork, waiting: list[tuple[int, int]], most: int, size: int
) -> None:
    room = min(most, sum(end - start for start, end in waiting))
    size = min(size, room)
    limit_ns = ceil(model.step_ns(chunks_work(first_chunks(waiting, size), work)))
    line = TokenLine(0, ceil(limit_ns / (1 - IN_HAND)) + 1, 0)
    if size and limit_ns <= MAX_STEP_NS and line.tpot_ns >= model.decode_ns(work):
        assert prefill_chunk(model, work, [line], waiting, most_tokens=most, waited_ns=0, now_ns=0) >= size


@given(models, decodes, st.lists(st.floats(0.5, 3), min_size=1, max_size=8), prompts, st.integers(1, 8192))
def test_prompts_held_for_long_continue_whatever_a_token_costs(
    model: StepTimeModel, work: StepWork, slacks: list[float], waiting: list[tuple[int, int]], most: int
) -> None:
    decode_ns = model.decode_ns(work)
    running = [TokenLine(0, max(round(slack * decode_ns), 1), 0) for slack in slacks]

    def tokens(waited_ns: int) -> int:
        return prefill_chunk(model, work, running, waiting, most_tokens=most, waited_ns=waited_ns, now_ns=0)

    held = tokens(MAX_HOLD_NS)
    assert held >= tokens(MAX_HOLD_NS - 1)
    assert bool(held) == bool(waiting)
    if held:
        held_ns, least_ns = (model.step_ns(chunks_work(first_chunks(waiting, size), work)) for size in (held, 1))
        assert held_ns <= max(MAX_STEP_NS, 2 * decode_ns, least_ns)


@given(models, decodes, st.lists(lines, max_size=8), prompts, now)
def test_more_slack_never_gives_a_smaller_chunk(
    model: StepTimeModel, work: StepWork, running: list[TokenLine], waiting: list[tuple[int, int]], now_ns: int
) -> None:
    ahead = [TokenLine(line.anchor_ns + 10**12, line.tpot_ns, line.tokens) for line in running]
    further = [TokenLine(line.anchor_ns + 2 * 10**12, line.tpot_ns, line.tokens) for line in running]
    sizes = [
        prefill_chunk(model, work, each, waiting, most_tokens=8192, waited_ns=0, now_ns=now_ns)
        for each in (ahead, further)
    ]
    assert sizes[0] <= sizes[1]


@given(models, decodes, prompts)
def test_without_targets_or_decodes_no_prompt_is_held_back(
    model: StepTimeModel, work: StepWork, waiting: list[tuple[int, int]]
) -> None:
    room = min(512, sum(end - start for start, end in waiting))
    line = [TokenLine(0, 1, 0)]
    assert prefill_chunk(model, work, [], waiting, most_tokens=512, waited_ns=0, now_ns=5) == room
    assert prefill_chunk(model, StepWork(), line, waiting, most_tokens=512, waited_ns=0, now_ns=5) == room


def test_prompts_behind_hopeless_or_barely_met_sequences_do_not_starve() -> None:
    model = StepTimeModel(0, 10_000, 0, 10 * MS, 0, 0, 1.0)
    work = StepWork(decode_sequences=4)
    hopeless = [TokenLine(0, 5 * MS, 3)]
    assert prefill_chunk(model, work, hopeless, [(0, 512)], most_tokens=512, waited_ns=0, now_ns=10**12) == 512
    tight = [TokenLine(0, 10 * MS, 0)]
    assert prefill_chunk(model, work, tight, [(0, 512)], most_tokens=512, waited_ns=0, now_ns=0) == 0
    assert prefill_chunk(model, work, tight, [(0, 2048)], most_tokens=2048, waited_ns=MAX_HOLD_NS, now_ns=0) == 1000
    floor = StepTimeModel(0, 10_000, 0, 10 * MS, 0, 0, 1.0, prefill_floor_ns=15 * MS)
    assert prefill_chunk(floor, work, tight, [(0, 2048)], most_tokens=2048, waited_ns=MAX_HOLD_NS, now_ns=0) == 1500


@given(models, st.floats(0, 5e8), st.integers(1, 8192), st.integers(0, 512))
def test_the_largest_batch_meets_its_target_and_one_more_would_not(
    model: StepTimeModel, tpot_ns: float, each: int, most: int
) -> None:
    batch = largest_batch(model, tpot_ns, each, most)
    assert 0 <= batch <= most

    def step_ns(size: int) -> float:
        return model.decode_ns(StepWork(decode_sequences=size, decode_kv_tokens=size * each))

    assert not batch or step_ns(batch) <= tpot_ns
    assert batch == most or step_ns(batch + 1) > tpot_ns


@given(models, st.one_of(st.none(), decodes), st.lists(lines, min_size=1, max_size=8), prompts, st.integers(0, 8192),
       now, st.integers(MS, 500 * MS))  # fmt: skip
def test_beside_a_sequence_about_to_join_a_step_is_short_and_no_longer_than_without_it(  # noqa: PLR0917
    model: StepTimeModel,
    work: StepWork | None,
    running: list[TokenLine],
    waiting: list[tuple[int, int]],
    most: int,
    now_ns: int,
    tpot_ns: int,
) -> None:
    decoding, held = (work, running) if work is not None else (StepWork(), [])

    def chunk(coming_tpot_ns: int) -> int:
        return prefill_chunk(
            model, decoding, held, waiting, most_tokens=most, waited_ns=0, now_ns=now_ns, coming_tpot_ns=coming_tpot_ns
        )

    tokens = chunk(tpot_ns)
    assert 0 <= tokens <= chunk(0)
    if tokens:
        took_ns = model.step_ns(chunks_work(first_chunks(waiting, tokens), work))
        alone_ns = model.decode_ns(work) if work is not None else 0.0
        assert took_ns <= max(MAX_JOINED_TPOTS * tpot_ns, alone_ns) * (1 + 1e-9)


@given(models, prompts.filter(bool), now, st.integers(MS, 500 * MS))
def test_prompts_that_have_waited_continue_whatever_is_about_to_join(
    model: StepTimeModel, waiting: list[tuple[int, int]], now_ns: int, tpot_ns: int
) -> None:
    assert prefill_chunk(
        model, StepWork(), [], waiting, most_tokens=512, waited_ns=MAX_HOLD_NS, now_ns=now_ns, coming_tpot_ns=tpot_ns
    )
