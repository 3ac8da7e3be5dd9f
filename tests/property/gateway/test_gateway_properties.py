"""Properties of binding, stop strings and credits under any input."""

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.gateway.binding import POLICIES, LeastLoaded, RoutingPolicy, bind
from libs.policy.gateway.outlook import CreditBalance
from libs.policy.gateway.view import Binding, BindingRequest, WorkerView
from services.gateway.request.choice import StopMatcher

MODELS = ("a", "b")
KINDS = ("k", "l")
policies = st.sampled_from([make() for make in POLICIES.values()])


@st.composite
def views(draw: st.DrawFn) -> list[WorkerView]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        role = draw(st.sampled_from(["prefill", "decode", "mixed", "standby"]))
        found.append(
            WorkerView(
                id=f"w{number}",
                model=draw(st.sampled_from(MODELS)),
                kv_kind=draw(st.sampled_from(KINDS)),
                takes_prefill=role == "prefill",
                takes_decode=role in ("decode", "mixed"),
                takes_both=role == "mixed",
                prefill_credits=draw(st.integers(0, 3)),
                decode_credits=draw(st.integers(0, 3)),
                load=draw(st.integers(0, 5)),
            )
        )
    return found


@st.composite
def asks(draw: st.DrawFn) -> list[BindingRequest]:
    return [
        BindingRequest(
            sequence_id=key,
            model=draw(st.sampled_from(MODELS)),
            tokens=draw(st.integers(1, 5000)),
            kv_kind=draw(st.sampled_from([None, None, *KINDS])),
            avoid=frozenset(draw(st.lists(st.sampled_from(["w0", "w1"]), max_size=2))),
        )
        for key in range(draw(st.integers(0, 12)))
    ]


def used_credits(bindings: list[Binding]) -> dict[tuple[str, str], int]:
    """Return the used credits, by worker and kind."""
    used: dict[tuple[str, str], int] = {}
    for binding in bindings:
        used[binding.decode_worker, "decode"] = used.get((binding.decode_worker, "decode"), 0) + 1
        if binding.prompt_worker not in (None, binding.decode_worker):
            assert binding.prompt_worker is not None
            used[binding.prompt_worker, "prefill"] = used.get((binding.prompt_worker, "prefill"), 0) + 1
    return used


@given(asks(), views(), policies)
def test_a_binding_is_covered_by_credits_and_fits_roles_model_and_blocks(
    waiting: list[BindingRequest], workers: list[WorkerView], policy: RoutingPolicy
) -> None:
    bindings = bind(waiting, workers, policy)
    by_id, by_key = {view.id: view for view in workers}, {ask.sequence_id: ask for ask in waiting}
    for (worker, kind), count in used_credits(bindings).items():
        held = by_id[worker].prefill_credits if kind == "prefill" else by_id[worker].decode_credits
        assert count <= held
    assert len({binding.sequence_id for binding in bindings}) == len(bindings)
    for binding in bindings:
        ask, decode = by_key[binding.sequence_id], by_id[binding.decode_worker]
        assert decode.model == ask.model
        if binding.prompt_worker is None:
            assert decode.takes_decode
            assert ask.kv_kind == decode.kv_kind
        elif binding.prompt_worker == binding.decode_worker:
            assert ask.kv_kind is None
            assert decode.takes_both
        else:
            prompt = by_id[binding.prompt_worker]
            assert ask.kv_kind is None
            assert prompt.takes_prefill
            assert decode.takes_decode
            assert (prompt.model, prompt.kv_kind) == (ask.model, decode.kv_kind)


@given(asks(), views(), policies)
def test_no_request_is_overtaken_within_a_model(
    waiting: list[BindingRequest], workers: list[WorkerView], policy: RoutingPolicy
) -> None:
    bound = {binding.sequence_id for binding in bind(waiting, workers, policy)}
    for model in MODELS:
        keys = [ask.sequence_id for ask in waiting if ask.model == model]
        taken = [key in bound for key in keys]
        assert taken == sorted(taken, reverse=True)


@given(asks(), views(), policies)
def test_a_head_that_could_be_bound_is_bound(
    waiting: list[BindingRequest], workers: list[WorkerView], policy: RoutingPolicy
) -> None:
    bound = {binding.sequence_id for binding in bind(waiting, workers, policy)}
    for model in MODELS:
        head = next((ask for ask in waiting if ask.model == model), None)
        if head is None:
            continue
        mine = [view for view in workers if view.model == model]
        rooms = [view for view in mine if view.takes_decode and view.decode_credits]
        if head.kv_kind is not None:
            possible = any(view.kv_kind == head.kv_kind for view in rooms)
        else:
            prompts = [view for view in mine if view.takes_prefill and view.prefill_credits]
            possible = any(view.takes_both for view in rooms) or any(
                prompt.kv_kind == room.kv_kind for prompt in prompts for room in rooms
            )
        assert (head.sequence_id in bound) is possible


@given(st.lists(st.integers(0, 3), min_size=2, max_size=4), st.integers(1, 8))
def test_requests_go_to_the_least_loaded_worker(loads: list[int], count: int) -> None:
    workers = [WorkerView(f"w{i}", "a", "k", False, True, True, 0, 20, load) for i, load in enumerate(loads)]
    after = list(loads)
    for binding in bind([BindingRequest(key, "a") for key in range(count)], workers, LeastLoaded()):
        place = int(binding.decode_worker[1:])
        assert after[place] == min(after)
        after[place] += 1


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(1, 5)),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [(at + len(stop), at) for stop in stops for at in [text.find(stop)] if at >= 0]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    matcher, sent, stopped, rest = StopMatcher(stops), "", False, text
    for width in [*cuts, *[1] * len(text)]:
        piece, rest = rest[:width], rest[width:]
        part, stopped = matcher.push(piece)
        sent += part
        if stopped:
            break
        assert text.startswith(sent)
    assert (sent if stopped else sent + matcher.flush(), stopped) == expected


def vllm_text(tokens: list[str], stops: list[str], min_tokens: int) -> tuple[str, bool]:
    """Return the output of vLLM's detokenizer for tokens one by one (v1/engine/detokenizer.py, `update`)."""
    text = ""
    for count, token in enumerate(tokens, 1):
        text += token
        if count <= min_tokens or not token:
            continue
        for stop in stops:
            at = text.find(stop, 1 - len(token) - len(stop)) if len(text) >= len(stop) else -1
            if at >= 0:
                return text[:at], True
    return text, False


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.text("ab", min_size=1, max_size=4), st.integers(0, 12))
def test_stop_strings_ignore_the_text_of_min_tokens_as_in_vllm(tokens: list[str], stop: str, min_tokens: int) -> None:
    matcher, sent, stopped = StopMatcher([stop]), "", False
    for count, token in enumerate(tokens, 1):
        part, stopped = matcher.push(token, len(token) if count <= min_tokens else 0)
        sent += part
        if stopped:
            break
    assert (sent if stopped else sent + matcher.flush(), stopped) == vllm_text(tokens, [stop], min_tokens)


@given(st.lists(st.sampled_from(["grant", "recall", "use", "reserve", "release", "use_reserved"])))
def test_credits_are_never_used_twice(steps: list[str]) -> None:
    balance, granted, used, returned = CreditBalance(), 0, 0, 0
    for step in steps:
        if step == "grant":
            balance.grant(2)
            granted += 2
        elif step == "recall":
            balance.recall(1)
            returned += balance.give_back()
        elif (step in ("use", "reserve") and balance.free) or (
            step in ("release", "use_reserved") and balance.reserved
        ):
            getattr(balance, step)()
            used += step.startswith("use")
        assert balance.free >= 0
        assert balance.reserved >= 0
        assert 0 <= balance.owed <= balance.free + balance.reserved
        assert balance.free + balance.reserved + used + returned == granted


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 12), policies)
def test_batch_lines_leave_half_of_the_prompt_credits_to_people(
    free: int, there: int, lines: int, policy: RoutingPolicy
) -> None:
    held = free + there
    prefill = WorkerView("p", "a", "k", True, False, False, free, 0, 0, prompts=there, batch_prompts=there)
    decode = WorkerView("d", "a", "k", False, True, False, 0, 100, 0)
    bound = bind([BindingRequest(key, "a", batch=True) for key in range(lines)], [prefill, decode], policy)
    assert len(bound) == max(min(max(held // 2, 1) - there, free, lines), 0)
    people = bind([BindingRequest(key, "a") for key in range(lines)], [prefill, decode], policy)
    assert len(people) == min(free, lines)
