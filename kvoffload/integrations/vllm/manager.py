"""``KVOffloadManager``: vLLM's CPU offloading manager, with the compiled core inside.

The methods that the scheduler calls in every step are in the core, ``_manager_c``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvoffload._checks import MAX_NUM_BLOCKS, check_int
from kvoffload.managers._watching import watch_request
from kvoffload.policies._lists import set_target
from kvoffload.watch import Watch

from . import _upstream as vllm
from ._manager_c import RequestManagerCore  # type: ignore[import-not-found]
from .hints import IGNORED_METRIC
from .rules import make_rules
from .watching import WatchExport

#: Name in vLLM of the gauge of the tokens that host memory has room for.
CAPACITY_METRIC = "vllm:kvoffload:capacity_tokens"


class KVOffloadManager(RequestManagerCore, vllm.OffloadingManager):  # type: ignore[misc]
    """A manager of chunks in host memory for vLLM's offloading connector.

    With `cache_policy` ``"lru"`` and ``"arc"`` it decides like the installed vLLM's own manager;
    any other policy of the library gets one touch per request and key.

    Parameters
    ----------
    num_chunks : int
        Chunks that fit in host memory, ``0 ... 2**31 - 1``.
    cache_policy : str
        A policy of the library, with its options: ``"lru"``, ``"slru?protected=0.5"``.
    cache_policy_module_path : str or None
        As in vLLM. Ignored if `cache_policy` is known; otherwise an error, since foreign policies
        need vLLM's own manager.
    enable_events : bool
        Whether to collect events for `take_events`.
    store_threshold : int
        Number of offers of a key before it is stored; below 2 there is no threshold.
    max_tracker_size : int
        Most keys whose offers are counted.
    info : CPUOffloadingInfo or None
        Labels for vLLM's info metric, from 0.33 on.
    watch : Watch or None
        An observer, which changes no decision. A request is judged when it finishes: the keys that
        it loaded are hits, those that it offered are misses. Keys before the first position that it
        looked up were in the accelerator's own cache: they are used, but not counted as requested.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it.

    Notes
    -----
    Complexity: a call is linear in its keys, however many chunks are pinned. Thread-safety: as in
    vLLM, callers hold a lock or are one thread; a call during another, for example by a request's
    context, raises RuntimeError. The methods of its watch are safe in any thread.
    """

    _release: ClassVar[vllm.Release] = vllm.installed_release()
    _watch_export: WatchExport | None = None
    _capacity_tokens = 0  # of a model with one KV group; 0: a chunk has no one number of tokens

    def __init__(  # noqa: PLR0917  (vLLM's own constructor)
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        info: Any = None,
        watch: Watch | None = None,
    ) -> None:
        self._require_new()
        capacity = check_int("num_chunks", num_chunks, 0, MAX_NUM_BLOCKS)
        threshold = check_int("store_threshold", store_threshold)
        max_tracker_size = check_int("max_tracker_size", max_tracker_size)
        request = watch_request(watch, cache_policy)
        rules = make_rules(cache_policy, cache_policy_module_path, capacity, self._release)
        self._config_info = info.as_config_info() if info is not None else {}
        self._rules = rules
        self._policy = PolicyView(self, rules)
        self.medium = vllm.Medium.CPU
        self.events: list[Any] | None = [] if enable_events else None
        self.store_threshold = threshold
        self.max_tracker_size = max_tracker_size
        self.stores_skipped_in_current_batch = 0
        self.hints_ignored_in_current_batch = 0
        self.allocation_sizes_in_current_batch: list[int] = []
        self.counts: OrderedDict[bytes, int] | None = OrderedDict() if threshold >= 2 else None
        # Last: until then every method raises.
        self._setup(capacity, rules, vllm, self._release)
        if request is not None:
            self._look_on(request)

    def take_events(self) -> Iterator[Any]:
        """Return the events since the last call; the batch is detached when the first is taken.

        For a failed store, only keys that are absent by then are reported.
        """
        self._require_ready()
        return _take_events(self)

    def config_info(self) -> Sequence[Any]:
        """Return the labels of the info metric for this manager's only cache."""
        self._require_ready()
        return [self._config_info]

    def get_stats(self) -> vllm.OffloadingConnectorStats:
        """Return gauges of the cache's use, and the samples since the last call."""
        in_use, pending = self._usage()
        total = self._num_chunks
        usage = in_use / total if total else 0.0
        writing = pending / total if total else 0.0
        stats = vllm.OffloadingConnectorStats()
        stats.set_gauge(vllm.CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, usage)
        for size in self.allocation_sizes_in_current_batch:
            stats.observe_histogram(vllm.CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        stats.set_gauge(vllm.CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
        stats.set_gauge(
            vllm.CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, max(usage - writing, 0.0)
        )
        if self._capacity_tokens:
            stats.set_gauge(CAPACITY_METRIC, self._capacity_tokens)
        if self.hints_ignored_in_current_batch:
            stats.increase_counter(IGNORED_METRIC, self.hints_ignored_in_current_batch)
        if self.store_threshold >= 2:
            stats.increase_counter(
                vllm.CPUOffloadingMetrics.STORES_SKIPPED, self.stores_skipped_in_current_batch
            )
            self.stores_skipped_in_current_batch = 0
        self.allocation_sizes_in_current_batch.clear()
        self.hints_ignored_in_current_batch = 0
        if self._watch_export is not None:
            self._watch_export.add_to(stats)
        return stats


def _take_events(manager: KVOffloadManager) -> Iterator[Any]:
    if manager.events is None:
        return
    events, manager.events = manager.events, []
    for event in events:
        if not getattr(event, "metadata_only", False):
            yield event
            continue
        gone = [key for key in event.keys if manager._chunk(key) is None]
        if gone:
            yield replace(event, keys=gone)


class PolicyView:
    """A view of the state of a manager's policy; the statuses are copies.

    ``chunks`` (LRU), ``t1``, ``t2``, ``b1``, ``b2`` (ARC) are ordered dicts, least to most recent.
    """

    def __init__(self, manager: Any, rules: Any) -> None:
        self._manager = manager
        self._rules = rules

    @property
    def cache_capacity(self) -> int:
        """Chunks that the manager has room for."""
        capacity: int = self._manager._num_chunks
        return capacity

    @property
    def target_t1_size(self) -> float:
        """ARC's target for the number of chunks in T1; writable."""
        target: float = self._rules.policy.target_t1_size
        return target

    @target_t1_size.setter
    def target_t1_size(self, value: float) -> None:
        if not 0.0 <= float(value) <= self.cache_capacity:
            raise ValueError(f"target_t1_size must be in 0 ... {self.cache_capacity}, got {value}")
        set_target(self._rules.policy, float(value))

    def get(self, key: bytes) -> vllm.ChunkStatus | None:
        """Return a copy of the status of a resident chunk, or None."""
        found = self._manager._chunk(key)
        return None if found is None else _status(*found)

    def evict(
        self, n: int, protected: Collection[bytes]
    ) -> list[tuple[bytes, vllm.ChunkStatus]] | None:
        """Evict exactly `n` idle, unprotected chunks, or evict none and return None.

        Unlike vLLM's, it returns the chunk ids to the manager's pool.
        """
        evicted = self._manager._evict(n, protected)
        if evicted is None:
            return None
        return [(key, _status(0, chunk_id)) for key, chunk_id in evicted]

    def __getattr__(self, name: str) -> OrderedDict[bytes, Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        keys = self._manager._list(name)
        if name in ("b1", "b2"):
            return OrderedDict.fromkeys(keys)
        return OrderedDict((key, self.get(key)) for key in keys)


def _status(ref_cnt: int, chunk_id: int) -> vllm.ChunkStatus:
    status = vllm.ChunkStatus(chunk_id)
    status.ref_cnt = ref_cnt
    return status
