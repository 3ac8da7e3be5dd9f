"""Tests of verdicts: the first cause, its advice, and none where no phase is short."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from libs.policy.planner.limits import EVERY
from libs.policy.planner.role_planning import Memory, PlannedWorker, assign
from libs.policy.pressure import WorkerProfile, Workload
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel
from libs.policy.verdict.advice import Action
from libs.policy.verdict.causes import CauseCode, causes, figure
from libs.policy.verdict.state import (
    CLEAR_DECODES,
    Grade,
    ModelState,
    RoleCounts,
    UnknownState,
    VerdictLimits,
    WorkerState,
    pressures,
)
from libs.policy.verdict.watch import VerdictWatch

MS = 1_000_000
S = 1_000 * MS
MODEL = StepTimeModel(8e6, 6e4, 0.0, 15e6, 3e5, 25.0, interference=1.0)
ENGINE = WorkerProfile(MODEL, chunk_tokens=2048, max_sequences=256, kv_tokens=400_000)
LIMITS = VerdictLimits()


def worker(name, role=Role.MIXED, **more):
    usual = {
        "budget_tokens": 0, "sequences": 0, "kv_tokens": 0, "prompt_tokens": 0, "slowness": 1.0, "kv_wait": 0.0,
        "kv_awaited": 0.0, "held_by_link": 0.0,
    }  # fmt: skip
    return WorkerState(id=name, role=role, **(usual | more))


def state(*, prompts=0.0, decodes=0, context=500, prefill=3, mixed=5, healthy=None, waits_s=1.0, **workers):
    """A model of gpu-0, gpu-1, ...; `healthy`: (prompts, decodes) without slow workers and links."""
    work = Workload(prompts, decodes, decodes * context, 50 * MS, waiting_ns=waits_s * S * prefill)
    standing = RoleCounts(prefill, mixed, 0)
    own = [
        worker(name, Role.PREFILL if place < prefill else Role.MIXED, **workers.get(name.replace("-", "_"), {}))
        for place, name in enumerate(f"gpu-{number}" for number in range(prefill + mixed))
    ]
    found = pressures(ENGINE, work, standing)
    well = work if healthy is None else replace(work, prompts=healthy[0], decodes=healthy[1])
    return ModelState(
        model="m", engine=ENGINE, work=work, standing=standing, workers=own, pressures=found,
        healthy=pressures(ENGINE, well, standing), horizon_ns=5 * S, waiting_tokens=90_000, running=decodes, held=0,
        queued=0, at_rest=False, ttft_ns=5 * S,
    )  # fmt: skip


def codes(subject):
    return [each.code for each in causes(subject, LIMITS) if each.grade.name == "FIRE"]


def test_a_workers_id_cannot_break_out_of_the_command_in_advice() -> None:
    action = Action(("decode-0", "x; reboot"), "mixed", 256, 0.5)
    assert action.command == "fulcrum role decode-0 'x; reboot' mixed:256"


def test_prompts_that_overload_few_workers_are_prefill_bound_and_the_command_relieves_them():
    found = causes(state(prompts=5.0, decodes=20), LIMITS)[0]
    assert found.code is CauseCode.PREFILL_BOUND
    assert found.action is not None
    assert found.action.command == f"fulcrum role {' '.join(found.action.workers)} prefill"
    after = state(prompts=5.0, decodes=20, prefill=3 + len(found.action.workers), mixed=5 - len(found.action.workers))
    assert max(after.pressures.prefill, after.pressures.decode) == pytest.approx(found.action.pressure_then)
    assert found.action.pressure_then <= 0.9
    assert "Prefill-bound: pressure 1.7 on 3 prefill workers" in found.sentence


def test_slow_workers_count_for_less_in_the_predicted_range_of_a_move():
    fast = causes(state(prompts=3.5, decodes=20), LIMITS)[0].action
    slow = {f"gpu_{number}": {"slowness": 3.0} for number in (3, 4, 5, 6, 7)}
    slowed = next(each.action for each in causes(state(prompts=3.5, decodes=20, **slow), LIMITS) if each.action)
    assert (len(fast.workers), len(slowed.workers)) == (1, 3)
    assert slowed.pressure_then == pytest.approx(fast.pressure_then)
    least, most = fast.pressure_range
    assert least < fast.pressure_then < most


def test_a_command_leaves_enough_decode_workers_to_receive_the_kv_of_all_prompts():
    subject = state(prompts=20.0, decodes=8, prefill=1, mixed=4)
    known = replace(subject, engine=replace(ENGINE, kv_token_ns=0.3 / ENGINE.chunk_speed))
    assert len(causes(subject, LIMITS)[0].action.workers) == 3
    assert len(causes(known, LIMITS)[0].action.workers) == 2  # three would fill the last link to 1.2


def test_faster_prefill_brings_decodes_and_the_advice_leaves_room_for_them():
    bound = state(prompts=6.0, decodes=250)
    assert bound.pressures.decode < 0.9
    action = causes(bound, LIMITS)[0].action
    moved = len(action.workers)
    more = (3 + moved) / 3
    then = state(prompts=6.0, decodes=round(250 * more), prefill=3 + moved, mixed=5 - moved)
    assert action.pressure_then == pytest.approx(max(then.pressures.prefill, then.pressures.decode), rel=0.01)


def test_waiting_sequences_add_pressure_up_to_the_rate_at_which_prompts_can_be_computed():
    work = Workload(5.0, 100, 50_000, 50 * MS, held=300, held_kv_tokens=150_000, held_prompts=10.0)
    few, many = (pressures(ENGINE, work, RoleCounts(prefill, 8 - prefill, 0)).sequences for prefill in (2, 6))
    assert (few, many) == (160, 280)
    assert pressures(ENGINE, replace(work, held_prompts=0.0), RoleCounts(2, 6, 0)).sequences == 400


def test_fewer_workers_than_advised_would_not_suffice():
    found = causes(state(prompts=5.0, decodes=20), LIMITS)[0]
    fewer = len(found.action.workers) - 1
    before = state(prompts=5.0, decodes=20, prefill=3 + fewer, mixed=5 - fewer)
    assert max(before.pressures.prefill, before.pressures.decode) > 0.9


def test_prompts_of_which_none_waits_are_no_queue_at_any_rate():
    assert codes(state(prompts=5.0, decodes=20, waits_s=0.0)) == []


def test_decodes_are_bound_by_tpot_or_by_kv_whichever_is_worse():
    assert codes(state(prompts=0.5, decodes=800)) == [CauseCode.DECODE_BOUND_TPOT]
    assert codes(state(prompts=0.5, decodes=300, context=8_000)) == [CauseCode.DECODE_BOUND_KV]
    found = causes(state(prompts=0.5, decodes=800), LIMITS)[0]
    assert found.action.role == "decode"


def test_a_shortage_that_no_split_relieves_is_too_small_and_names_the_sufficient_number():
    found = causes(state(prompts=6.0, decodes=800), LIMITS)[0]
    assert found.code is CauseCode.TOO_SMALL
    assert "would suffice" in found.sentence


def planned(subject, limits=EVERY):
    """The moves that a planner in mode auto would make now, as the role that workers take; empty for none."""
    own = [PlannedWorker(each.id, each.role, 0, True, 0, each.kv_tokens) for each in subject.workers]
    moves = assign(ENGINE, subject.work, own, Memory(), S, limits=limits).moves
    return {"decode" if each.role is Role.MIXED else "prefill" for each in moves}


@pytest.mark.parametrize("prefill", [1, 3, 5, 7])
def test_advice_never_goes_the_other_way_than_an_acting_planner(prefill):
    for prompts in (0.5, 2.0, 4.0, 7.0, 12.0, 30.0):
        for decodes in (10, 200, 400, 700, 1_200, 2_000):
            subject = state(prompts=prompts, decodes=decodes, prefill=prefill, mixed=8 - prefill)
            advised = {each.action.role for each in causes(subject, LIMITS) if each.action} - {"mixed"}
            assert not advised or planned(subject) <= advised, (prompts, decodes)


def test_roles_that_relieve_prompts_by_making_decodes_press_are_named_and_not_advised():
    subject = state(prompts=30.0, decodes=700, prefill=3, mixed=5)
    assert subject.pressures.cluster < subject.pressures.prefill
    found = causes(subject, LIMITS)[0]
    assert (found.code, found.action) == (CauseCode.TOO_SMALL, None)
    assert (
        f". The best roles would leave about {figure(subject.pressures.cluster)}, but slow running answers too much"
        in found.sentence
    )
    assert "No other roles" not in found.sentence


def test_a_sentence_predicts_no_move_where_a_planner_moves_workers_by_itself():
    subject = state(prompts=5.0, decodes=20)
    advised, left = (causes(replace(subject, acts=acts), LIMITS)[0] for acts in (False, True))
    assert "Moving 3 decode workers to prefill leaves a pressure of" in advised.sentence
    assert left.action == advised.action and advised.sentence.startswith(left.sentence)
    assert "Moving" not in left.sentence and left.sentence.endswith(" s.")


def test_a_busy_cluster_that_is_not_short_has_no_cause():
    assert codes(state(prompts=2.2, decodes=400)) == []


def test_a_slow_worker_comes_first_if_it_causes_the_shortage_and_second_otherwise():
    slow = {"gpu_4": {"slowness": 3.0}}
    assert codes(state(prompts=0.5, decodes=800, healthy=(0.5, 400), **slow)) == [
        CauseCode.SLOW_WORKER,
        CauseCode.DECODE_BOUND_TPOT,
    ]
    assert codes(state(prompts=5.0, decodes=20, **slow)) == [CauseCode.PREFILL_BOUND, CauseCode.SLOW_WORKER]


def test_if_most_workers_are_slow_none_is_named_slow():
    slow = {f"gpu_{number}": {"slowness": 2.0} for number in range(6)}
    assert codes(state(prompts=0.5, decodes=20, **slow)) == []


def test_several_workers_behind_a_slow_link_are_one_cause():
    behind = {f"gpu_{number}": {"kv_awaited": 0.9, "held_by_link": 2.0, "kv_awaited_s": 1.5} for number in (3, 4)}
    found = causes(state(prompts=0.5, decodes=20, **behind), LIMITS)
    assert [(each.code, each.workers) for each in found] == [(CauseCode.SLOW_LINK, ("gpu-3", "gpu-4"))]
    assert found[0].sentence.startswith("Slow link: up to 90% of the time, gpu-3 and gpu-4 wait for KV")
    assert ", which holds up 4 sequences. Check the network from gpu-0" in found[0].sentence
    alone = causes(state(prompts=0.5, decodes=20, gpu_3=behind["gpu_3"]), LIMITS)
    assert alone[0].sentence.startswith("Slow link: 90% of the time, gpu-3 waits for KV")


def test_kv_that_arrives_soon_is_no_cause_however_often_it_is_waited_for():
    behind = {"gpu_3": {"kv_awaited": 0.95, "held_by_link": 1.0, "kv_awaited_s": 0.2}}
    assert codes(state(prompts=0.5, decodes=20, **behind)) == []


LATE_KV = {"kv_awaited": 0.9, "held_by_link": 2.0, "kv_awaited_s": 1.5}


@pytest.mark.parametrize("short", ["gpu_0", "gpu_4"])  # the sender, the receiver
def test_a_slow_link_is_not_named_while_a_process_at_either_end_waits_for_a_cpu(short):
    def found(cpu_wait):
        own = {"gpu_4": dict(LATE_KV)}
        own.setdefault(short, {})["cpu_wait"] = cpu_wait
        return causes(state(prompts=0.5, decodes=20, **own), LIMITS)

    assert [each.code for each in found(0.38)] == [CauseCode.SHORT_OF_CPU]
    assert found(0.38)[0].workers == (short.replace("_", "-"),)
    assert [each.code for each in found(0.05)] == [CauseCode.SLOW_LINK], "its cores are idle"
    assert [each.code for each in found(None)] == [CauseCode.SLOW_LINK], "it reports nothing"


def test_a_slow_worker_is_not_named_while_it_waits_for_a_cpu_and_the_sentence_says_so():
    def found(cpu_wait):
        return causes(state(prompts=0.5, decodes=20, gpu_4={"slowness": 3.0, "cpu_wait": cpu_wait}), LIMITS)

    (cause,) = found(0.38)
    assert (cause.code, cause.workers) == (CauseCode.SHORT_OF_CPU, ("gpu-4",))
    assert cause.sentence == (
        "Short of CPU: worker gpu-4 waits for a CPU 38% of the time; its host has too few cores for what runs there, "
        "or its CPU limit is too low. Add cores, or move other work away."
    )
    assert [each.code for each in found(0.05)] == [CauseCode.SLOW_WORKER], "its cores are idle"
    assert [each.code for each in found(None)] == [CauseCode.SLOW_WORKER], "it reports nothing"


def test_one_worker_that_waits_for_a_cpu_does_not_excuse_another_slow_one():
    slow = {"gpu_4": {"slowness": 3.0, "cpu_wait": 0.4}, "gpu_5": {"slowness": 3.0, "cpu_wait": 0.0}}
    found = causes(state(prompts=0.5, decodes=20, **slow), LIMITS)
    assert [(each.code, each.workers) for each in found] == [
        (CauseCode.SHORT_OF_CPU, ("gpu-4",)),
        (CauseCode.SLOW_WORKER, ("gpu-5",)),
    ]


def test_between_the_thresholds_of_cpu_waits_a_cause_stands_and_none_begins():
    subject = state(prompts=0.5, decodes=20, gpu_4={"slowness": 3.0, "cpu_wait": 0.2})
    assert [(each.code, each.grade) for each in causes(subject, LIMITS)] == [
        (CauseCode.SHORT_OF_CPU, Grade.HOLD),
        (CauseCode.SLOW_WORKER, Grade.HOLD),
    ]


def test_waits_for_a_cpu_are_named_under_pressure_and_after_its_cause():
    short = {f"gpu_{number}": {"cpu_wait": 0.3 + number / 100} for number in range(8)}
    assert codes(state(prompts=0.5, decodes=20, **short)) == [], "they delay no request"
    found = causes(state(prompts=5.0, decodes=20, **short), LIMITS)
    assert [each.code for each in found] == [CauseCode.PREFILL_BOUND, CauseCode.SHORT_OF_CPU]
    assert "workers gpu-7, gpu-6, gpu-5, gpu-4 and 4 more wait for a CPU up to 37% of the time" in found[1].sentence


def look_through(watch, subject, times):
    return [watch.look([subject], round(at_s * S)).code for at_s in times]


def test_a_cause_is_named_once_it_has_lasted_and_stays_until_it_has_been_gone_for_a_while():
    watch, short, calm = VerdictWatch(LIMITS), state(prompts=5.0, decodes=20), state(prompts=1.0, decodes=20)
    assert look_through(watch, short, (1, 1.4, 1.8)) == [
        CauseCode.BALANCED,
        CauseCode.BALANCED,
        CauseCode.PREFILL_BOUND,
    ]
    assert look_through(watch, calm, (2, 3, 4.9, 5.1)) == [CauseCode.PREFILL_BOUND] * 3 + [CauseCode.BALANCED]


def test_a_momentary_shortage_is_not_named():
    watch, short, calm = VerdictWatch(LIMITS), state(prompts=5.0, decodes=20), state(prompts=1.0, decodes=20)
    for at_s in range(1, 9):
        assert watch.look([short if at_s % 2 else calm], at_s * S // 2).code is CauseCode.BALANCED


def test_a_slight_shortage_must_last_longer():
    watch = VerdictWatch(LIMITS)
    slight, clear = state(prompts=3.5, decodes=20), state(prompts=4.5, decodes=20)
    assert watched(watch, [slight] * 15).code is CauseCode.BALANCED
    assert watched(watch, [slight] * 6, from_ms=1_500).code is CauseCode.PREFILL_BOUND
    watch = VerdictWatch(LIMITS)
    assert watched(watch, [slight] * 10).code is CauseCode.BALANCED
    assert watched(watch, [clear], from_ms=1_000).code is CauseCode.PREFILL_BOUND


def test_a_queue_of_half_the_target_is_no_slight_shortage_at_any_prompt_pressure():
    for waits_s, code in ((2.4, CauseCode.BALANCED), (2.6, CauseCode.PREFILL_BOUND)):
        assert watched(VerdictWatch(LIMITS), [state(prompts=3.5, decodes=20, waits_s=waits_s)] * 10).code is code


def test_a_few_sequences_over_the_target_must_last_longer_and_a_flood_need_not():
    room = state(decodes=100).pressures.largest_batch
    slight, flood = state(decodes=room + 1), state(decodes=round(room * 1.3))
    watch = VerdictWatch(LIMITS)
    assert watched(watch, [slight] * 19).code is CauseCode.BALANCED
    assert watched(watch, [slight] * 2, from_ms=1_900).code is CauseCode.DECODE_BOUND_TPOT
    watch = VerdictWatch(LIMITS)
    assert watched(watch, [slight] * 10).code is CauseCode.BALANCED
    assert watched(watch, [flood], from_ms=1_000).code is CauseCode.DECODE_BOUND_TPOT
    watch = VerdictWatch(LIMITS)
    assert watched(watch, [flood] * 7).code is CauseCode.DECODE_BOUND_TPOT


@given(st.floats(1.0, 1.5), st.sampled_from([500, 8_000]))
def test_decode_shortages_are_named_soon_or_if_slight_after_two_seconds(pressure, context):
    one_of = state(decodes=100, context=context).pressures.decode / 100
    loaded = state(decodes=ceil(pressure / one_of), context=context)
    assume(loaded.pressures.decode >= 1)
    watch = VerdictWatch(LIMITS)
    named = next(at for at in range(0, 3_000, 100) if watch.look([loaded], at * MS).code is not CauseCode.BALANCED)
    assert named == (2_000 if loaded.pressures.decode < CLEAR_DECODES else 600)


def test_a_cluster_under_recent_pressure_is_not_called_balanced():
    watch, short = VerdictWatch(LIMITS), state(prompts=5.0, decodes=20)
    sentence = watch.look([short], S).sentence
    assert sentence.startswith("Balanced until a moment ago: prefill pressure 1.")
    assert watch.look([state(prompts=1.0, decodes=20)], 2 * S).sentence.startswith("Balanced: prefill pressure 0.")


def test_between_the_thresholds_a_cause_stays_and_none_begins():
    watch, near = VerdictWatch(LIMITS), state(prompts=2.8, decodes=20)
    assert set(look_through(watch, near, (1, 2, 3))) == {CauseCode.BALANCED}
    look_through(watch, state(prompts=5.0, decodes=20), (4, 5))
    assert set(look_through(watch, near, range(6, 20))) == {CauseCode.PREFILL_BOUND}


def test_advice_ends_a_second_after_its_cause_while_the_cause_is_named_for_longer():
    watch, calm = VerdictWatch(LIMITS), state(prompts=1.0, decodes=20)
    for at_ms in range(0, 2_000, 100):
        found = watch.look([state(prompts=5.0, decodes=20)], at_ms * MS)
    assert found.causes[0].action is not None
    assert watch.look([calm], 2_500 * MS).causes[0].action is not None, "it may dither about a threshold"
    left = watch.look([calm], 3_500 * MS)
    assert left.code is CauseCode.PREFILL_BOUND and left.causes[0].action is None


def test_one_shortage_replaces_another_once_it_has_lasted():
    watch = VerdictWatch(LIMITS)
    look_through(watch, state(prompts=5.0, decodes=20), (1, 2))
    other = state(prompts=0.5, decodes=800)
    assert look_through(watch, other, (3, 3.2, 3.7)) == [
        CauseCode.PREFILL_BOUND,
        CauseCode.PREFILL_BOUND,
        CauseCode.DECODE_BOUND_TPOT,
    ]


def test_without_work_the_cluster_is_idle_and_with_unmeasured_work_unknown():
    watch = VerdictWatch(LIMITS)
    assert watch.look([], S).code is CauseCode.IDLE
    assert watch.look([replace(state(), at_rest=True)], 2 * S).code is CauseCode.IDLE
    unknown = watch.look([UnknownState("m", "no gateway says what waits there", at_rest=False)], 3 * S)
    assert (unknown.code, unknown.sentence) == (CauseCode.UNKNOWN, "Not known: no gateway says what waits there.")


def test_an_unknown_state_stands_from_the_first_look_on():
    watch = VerdictWatch(LIMITS)
    unknown = UnknownState("m", "no gateway says what waits there", at_rest=False)
    assert watch.look([unknown], 7 * S).since_ns == 7 * S
    assert watch.look([unknown], 9 * S).since_ns == 7 * S


def test_a_pressure_just_above_one_is_a_shortage_only_with_a_queue():
    assert codes(state(prompts=3.3, decodes=20, waits_s=0.3)) == []
    assert codes(state(prompts=3.3, decodes=20, waits_s=0.9)) == [CauseCode.PREFILL_BOUND]
    assert codes(state(prompts=4.2, decodes=20, waits_s=0.3)) == [CauseCode.PREFILL_BOUND]


def test_a_cluster_that_is_too_small_stays_so_until_some_split_would_leave_room():
    watch, small, nearly = VerdictWatch(LIMITS), state(prompts=9.0, decodes=20), state(prompts=7.0, decodes=20)
    assert small.pressures.cluster > 1 > nearly.pressures.cluster > LIMITS.pressure.clear
    assert watched(watch, [small] * 20).code is CauseCode.PREFILL_BOUND, "one phase alone may press by a burst"
    assert watched(watch, [small] * 30, from_ms=2_000).code is CauseCode.TOO_SMALL
    assert watched(watch, [nearly] * 30, from_ms=5_000).code is CauseCode.TOO_SMALL
    fresh = VerdictWatch(LIMITS)
    for at_ms in range(0, 2_000, 100):
        found = fresh.look([nearly], at_ms * MS)
    assert found.code is CauseCode.PREFILL_BOUND


def watched(watch, subjects, *, from_ms=0):
    """Look at one state every tenth of a second, and return the last result."""
    for number, subject in enumerate(subjects):
        found = watch.look([subject], (from_ms + 100 * number) * MS)
    return found


def test_a_sentence_has_current_figures_while_its_cause_eases():
    watch = VerdictWatch(LIMITS)
    watched(watch, [state(prompts=5.0, decodes=20)] * 20)
    near = watched(watch, [state(prompts=2.8, decodes=20)], from_ms=2_000)
    assert near.sentence.startswith("Prefill-bound, easing: pressure 0.9 on 3 prefill workers")
    gone = watched(watch, [state(prompts=1.5, decodes=20, waits_s=0.0)], from_ms=2_100)
    assert gone.code is CauseCode.PREFILL_BOUND
    assert "easing: pressure 0.5 on 3 prefill workers" in gone.sentence and "0.0 s of work" in gone.sentence


def test_a_shortage_does_not_ease_while_a_worse_one_is_about_to_replace_it():
    watch = VerdictWatch(LIMITS)
    watched(watch, [state(prompts=5.0, decodes=20)] * 20)
    worse = watched(watch, [state(prompts=5.5, decodes=800)], from_ms=2_000)
    assert worse.sentence.startswith("Prefill-bound: pressure 1.8 on 3 prefill workers")
    small = VerdictWatch(LIMITS)
    watched(small, [state(prompts=9.0, decodes=800)] * 20)
    relieved = watched(small, [state(prompts=9.0, decodes=20, waits_s=0.0)], from_ms=2_000)
    assert relieved.sentence.startswith("Too small, easing: "), "no prompt waits any more"


def test_a_sentence_without_a_command_predicts_nothing():
    watch = VerdictWatch(LIMITS)
    watched(watch, [state(prompts=5.0, decodes=20)] * 20)
    easing = [watch.look([state(prompts=1.5, decodes=20)], at_ms * MS) for at_ms in range(2_000, 4_500, 100)]
    assert [each.causes[0].action is not None for each in easing] == ["leaves" in each.sentence for each in easing]


def test_a_command_stands_while_demand_varies_and_its_figures_follow():
    watch = VerdictWatch(LIMITS)
    first = watched(watch, [state(prompts=5.0, decodes=20)] * 20).causes[0].action
    kv = [{f"gpu_{3 + (number + place) % 5}": {"kv_tokens": place} for place in range(5)} for number in range(40)]
    varied = [state(prompts=4.7 + 0.1 * (number % 7), decodes=20, **kv[number]) for number in range(40)]
    found = [watch.look([each], (2_000 + 100 * number) * MS).causes[0].action for number, each in enumerate(varied)]
    assert {(each.id, each.command, each.since_ns, each.replaces) for each in found} == {
        (first.id, first.command, first.since_ns, "")
    }
    assert len({each.pressure_then for each in found}) == 7


def test_a_command_is_replaced_after_ten_seconds_by_a_clearly_better_one_that_names_it():
    watch = VerdictWatch(LIMITS)
    first = watched(watch, [state(prompts=4.0, decodes=20)] * 20).causes[0].action
    grown = [state(prompts=6.0, decodes=20)]
    still = watched(watch, grown * 80, from_ms=2_000).causes[0].action
    assert (still.id, still.command) == (first.id, first.command)
    more = watched(watch, grown * 20, from_ms=10_000).causes[0].action
    assert len(more.workers) > len(first.workers)
    assert (more.replaces, more.id != first.id, more.since_ns) == (first.command, True, first.since_ns + 10_000 * MS)


def test_a_command_ends_once_its_workers_have_moved():
    watch = VerdictWatch(LIMITS)
    first = watched(watch, [state(prompts=5.0, decodes=20)] * 20).causes[0].action
    count = len(first.workers)
    after = state(prompts=9.5, decodes=20, prefill=3 + count, mixed=5 - count)
    assert {each.id for each in after.workers if each.role is Role.PREFILL} > set(first.workers)
    found = watched(watch, [after], from_ms=2_000).causes[0].action
    assert found is None or not set(found.workers) & set(first.workers)


def test_the_number_of_missing_workers_stands_until_clearly_fewer_would_suffice():
    watch = VerdictWatch(LIMITS)
    numbers = []
    for number in range(30):
        found = watch.look([state(prompts=20.0 + (number % 5), decodes=20)], number * 100 * MS)
        numbers += [each.missing_workers for each in found.causes]
    assert len(set(numbers[5:])) == 1, "the most that was needed"
    fewer = watched(watch, [state(prompts=11.0, decodes=20)], from_ms=3_000).causes[0]
    assert 0 < fewer.missing_workers < numbers[-1] * 0.7
    assert f"{fewer.missing_workers} more worker" in fewer.sentence


@pytest.mark.parametrize(("share", "said"), [(0.0, False), (0.04, False), (0.37, True)])
def test_a_prefill_pool_that_images_fill_is_said_to_be(share, said):
    (found,) = causes(replace(state(prompts=5.0, decodes=10), encode_share=share), LIMITS)
    assert found.code is CauseCode.PREFILL_BOUND
    assert ("; images take 37% of prefill's time" in found.sentence) is said
