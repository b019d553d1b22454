"""Two managers of vLLM's interface, side by side: every call goes to both, everything is compared.

The first is vLLM's own, the reference; the second is the one under test.
"""

from __future__ import annotations

import itertools
from typing import Any

from vllm.v1.kv_offload.base import PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvoffload.testing.policies import check_invariants
from tests.observation import observe


class DifferenceError(Exception):
    """Say where two managers differ."""


def plain(value: Any) -> Any:
    """Return what is observable of a result, in comparable form."""
    if isinstance(value, PrepareStoreOutput):
        return (
            "output",
            value.keys_to_store,
            plain(value.store_spec),
            value.evicted_keys,
        )
    if type(value) is CPULoadStoreSpec:
        return ("spec", str(value.block_ids.dtype), value.block_ids.shape, value.chunk_ids.tolist())
    return value


def lru_order(policy: Any) -> list[bytes]:
    """Return the keys of vLLM's or our LRU policy, oldest first."""
    if hasattr(policy, "_ranks"):
        return [
            key for key, _ in sorted(policy._ranks.items(), key=lambda item: (item[1], item[0]))
        ]
    return list(policy.chunks)


def statuses(manager: Any, keys: list[bytes]) -> dict[bytes, tuple[int, int]]:
    found = {}
    for key in keys:
        chunk = manager._policy.get(key)
        if chunk is not None:
            found[key] = (chunk.ref_cnt, chunk.chunk_id)
    return found


def seen(manager: Any, keys: list[bytes]) -> Any:
    """Return everything that can be seen of our manager."""
    return (
        statuses(manager, keys),
        [(list(event.keys), event.removed) for event in manager.events or ()],
        None if manager.counts is None else list(manager.counts.items()),
        list(manager.allocation_sizes_in_current_batch),
        manager.stores_skipped_in_current_batch,
        manager._usage(),
    )


def learned(manager: Any, context: ReqContext | None) -> Any:
    """Return the order of a manager's chunks, its ghosts, and what hangs on a context."""
    policy = manager._rules.policy
    return (
        observe(policy),
        policy.num_released,
        manager.hints_ignored_in_current_batch,
        list(manager._policy.chunks) if hasattr(policy, "_keys") else None,
        None if context is None else dict(context._state),
    )


def arc_state(policy: Any) -> dict[str, Any]:
    state: dict[str, Any] = {name: list(getattr(policy, name)) for name in ("t1", "t2", "b1", "b2")}
    state["target"] = policy.target_t1_size
    return state


class Pair:
    """Hold both managers and compare them after every call.

    Parameters
    ----------
    reference, tested : OffloadingManager
        The two managers, in equal states.
    keys : list of bytes
        Every key that will be used.
    shared : bool
        Whether both get the same request contexts, instead of one each.
    """

    def __init__(
        self, reference: Any, tested: Any, keys: list[bytes], shared: bool = False
    ) -> None:
        self.both = (reference, tested)
        self.keys = keys
        self.shared = shared
        self.history: list[str] = []
        self.evictions = 0
        self.refusals = 0

    def context(self, name: str) -> tuple[ReqContext, ReqContext]:
        first = ReqContext(name)
        return (first, first) if self.shared else (first, ReqContext(name))

    def set_position(self, contexts: Any, key: bytes, position: int) -> None:
        for context in contexts:
            context.set_offload_key_position(key, position)

    def call(self, method: str, *arguments: Any, contexts: Any = None, **keywords: Any) -> Any:
        """Call `method` of both; return the reference's result."""
        self.history.append(f"{method} {arguments} {keywords} {contexts and contexts[0].req_id}")
        results = []
        for number, manager in enumerate(self.both):
            more = () if contexts is None else (contexts[number],)
            results.append(getattr(manager, method)(*arguments, *more, **keywords))
        if plain(results[0]) != plain(results[1]):
            raise DifferenceError(
                f"{self.history[-1]}: {plain(results[0])} is not {plain(results[1])}"
            )
        if method == "prepare_store":
            self.refusals += results[0] is None
            self.evictions += results[0] is not None and bool(results[0].evicted_keys)
        self.compare()
        return results[0]

    def take_events(self, how_many: int | None) -> list[Any]:
        """Take events of both, the first `how_many` only."""
        self.history.append(f"take_events {how_many}")
        first, second = (
            list(itertools.islice(manager.take_events(), how_many)) for manager in self.both
        )
        if first != second:
            raise DifferenceError(f"events: {first} is not {second}")
        return first

    def stats(self) -> None:
        self.history.append("get_stats")
        first, second = (manager.get_stats().data for manager in self.both)
        if first != second:
            raise DifferenceError(f"stats: {first} is not {second}")

    def compare(self) -> None:
        """Compare everything that can be seen without a call."""
        first, second = self.both
        for name in (
            "medium",
            "events",
            "counts",
            "store_threshold",
            "max_tracker_size",
            "stores_skipped_in_current_batch",
            "allocation_sizes_in_current_batch",
        ):
            if getattr(first, name) != getattr(second, name):
                raise DifferenceError(
                    f"{name}: {getattr(first, name)} is not {getattr(second, name)}"
                )
        if first.counts is not None and list(first.counts) != list(second.counts):
            raise DifferenceError(
                f"order of counts: {list(first.counts)} is not {list(second.counts)}"
            )
        one, other = statuses(first, self.keys), statuses(second, self.keys)
        if one != other:
            raise DifferenceError(f"chunks: {one} is not {other}")
        if hasattr(first._policy, "_ranks"):
            one_order, other_order = lru_order(first._policy), lru_order(second._policy)
            if one_order != other_order:
                raise DifferenceError(f"order: {one_order} is not {other_order}")
        elif hasattr(first._policy, "b1"):
            one_lists, other_lists = arc_state(first._policy), arc_state(second._policy)
            if one_lists != other_lists:
                raise DifferenceError(f"lists: {one_lists} is not {other_lists}")
        if hasattr(second, "_check"):
            check_invariants(second)
