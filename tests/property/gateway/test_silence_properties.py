"""Properties of which silent workers a gateway avoids: never too many, and never the last ones."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.protocol import SIGN_OF_LIFE_MS
from libs.policy.gateway.view import (
    MAX_AWAY_SHARE,
    MAX_SILENT_MS,
    QUIET_SHARE,
    SILENT_MS,
    WorkerSilence,
    WorkerView,
    serves,
    whom_to_leave,
)

QUIET_MS = QUIET_SHARE * SILENT_MS

ROLES = {"prefill": (True, False, False), "decode": (False, True, False), "mixed": (False, True, True)}


@st.composite
def silences(draw: st.DrawFn) -> list[WorkerSilence]:
    found = []
    for place in range(draw(st.integers(0, 8))):
        model = draw(st.sampled_from(["a", "b"]))
        takes_prefill, takes_decode, takes_both = ROLES[draw(st.sampled_from(sorted(ROLES)))]
        view = WorkerView(
            id=f"w{place}",
            model=model,
            kv_kind=draw(st.sampled_from(["x", "y"])),
            takes_prefill=takes_prefill,
            takes_decode=takes_decode,
            takes_both=takes_both,
            prefill_credits=1,
            decode_credits=1,
            load=0,
        )
        silent_ms = draw(st.sampled_from([0.0, QUIET_MS, SILENT_MS - 1, SILENT_MS, 10 * SILENT_MS]))
        found.append(WorkerSilence(place, model, silent_ms, view if draw(st.booleans()) else None))
    return found


def counts(most: int = 4) -> st.SearchStrategy[Counter[str]]:
    return st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, most)).map(Counter)


@given(silences(), counts())
def test_only_silent_workers_are_avoided_and_the_others_serve_their_model(
    all_silences: list[WorkerSilence], away: Counter[str]
):
    leaving = whom_to_leave(all_silences, away)
    assert len({each.place for each in leaving}) == len(leaving)
    for each in leaving:
        assert each.silent_ms >= SILENT_MS
        responsive = [other.view for other in all_silences if other.silent_ms < SILENT_MS and other.view]
        assert serves(responsive, each.model)


@given(silences(), counts())
def test_at_most_a_share_of_a_models_workers_is_avoided_at_once(all_silences: list[WorkerSilence], away: Counter[str]):
    for model, leaving in Counter(each.model for each in whom_to_leave(all_silences, away)).items():
        workers = sum(each.model == model for each in all_silences) + away[model]
        assert away[model] + leaving <= max(1, MAX_AWAY_SHARE * workers)


@given(silences(), counts())
def test_no_worker_is_avoided_if_more_than_a_share_is_silent_at_once(
    all_silences: list[WorkerSilence], away: Counter[str]
):
    leaving = whom_to_leave(all_silences, away)
    for model in {each.model for each in all_silences}:
        of_model = [each for each in all_silences if each.model == model]
        quiet = sum(each.silent_ms >= QUIET_MS for each in of_model) + away[model]
        if quiet > max(1, MAX_AWAY_SHARE * (len(of_model) + away[model])):
            assert not [each for each in leaving if each.model == model]


@given(silences(), counts(), st.sets(st.integers(0, 7)))
def test_a_permanently_silent_worker_is_avoided_whatever_the_others_do(
    all_silences: list[WorkerSilence], away: Counter[str], endless: set[int]
):
    found = [replace(each, silent_ms=MAX_SILENT_MS) if each.place in endless else each for each in all_silences]
    left = {each.place for each in whom_to_leave(found, away)}
    assert left >= {each.place for each in found if each.place in endless}


@given(silences())
def test_one_silent_worker_beside_others_that_serve_is_always_avoided(all_silences: list[WorkerSilence]):
    quiet = [each for each in all_silences if each.silent_ms >= QUIET_MS]
    rest = [each.view for each in all_silences if each.silent_ms < SILENT_MS and each.view]
    if len(quiet) == 1 and quiet[0].silent_ms >= SILENT_MS and serves(rest, quiet[0].model):
        assert whom_to_leave(all_silences, Counter()) == quiet


def test_a_worker_is_silent_after_three_and_a_half_keepalive_intervals() -> None:
    assert SILENT_MS == 3.5 * SIGN_OF_LIFE_MS
