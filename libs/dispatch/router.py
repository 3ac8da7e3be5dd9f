"""One binding round: prepares waiting choices and workers for the policy's `bind`."""

from collections.abc import Callable, Iterable, Sequence

from libs.dispatch.generation import Generation
from libs.policy.gateway.binding import RoutingPolicy, bind
from libs.policy.gateway.view import Ask, Binding, WorkerView, serves_decode


class Router:
    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy

    def round(
        self,
        waiting: Iterable[Generation],
        views: list[WorkerView],
        now_ns: int,
        *,
        quiet: frozenset[str],
        drop_stale_kv: Callable[[Generation], None],
        barred: frozenset[str] = frozenset(),
    ) -> list[Binding]:
        """Return bindings for `waiting`, in its order.

        `quiet` workers are used only if there are no others, `barred` ones never. `drop_stale_kv` is called for
        requests whose KV blocks no worker is left to pull.
        """

        def ask(generation: Generation) -> Ask:
            blocks = generation.placement.blocks
            if blocks is not None and not serves_decode(views, generation.model, blocks.kind):
                drop_stale_kv(generation)
            return _ask(generation, quiet)

        open_to_all = [view for view in views if view.id not in barred] if barred else views
        return self.bind(map(ask, waiting), open_to_all, now_ns)

    def bind(self, asks: Iterable[Ask], views: Sequence[WorkerView], now_ns: int) -> list[Binding]:
        """Return bindings in the order of `asks`, as far as there is room."""
        if not any(view.decode_credits for view in views):
            return []
        return bind(asks, views, self._policy, now_ns)


def _ask(generation: Generation, quiet: frozenset[str]) -> Ask:
    placement = generation.placement
    return Ask(
        sequence_id=placement.sequence_id,
        model=generation.model,
        tokens=generation.tokens,
        kv_kind=placement.blocks.kind if placement.blocks is not None else None,
        cached_tokens=generation.cached_hints,
        avoid=quiet.union(placement.avoid),
        batch=generation.batch,
    )
