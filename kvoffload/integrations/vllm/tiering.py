"""Host memory as the primary tier of vLLM's secondary tiers, and the spec that builds it.

A request whose chunks are in a secondary tier waits until all of them are in the primary one. In
vLLM itself a promotion may evict chunks that the request has just found, or that were promoted
before it for the same or another waiting request, and with little memory they evict each other
forever. Here a waiting request holds its chunks (see `Hold`) from its first promotion until it
loads, stores, is scheduled for the first time, finishes or is dropped. So every promotion advances
a waiting request, or finds no room, which also ends the wait.

A secondary tier is offered only chunks that the primary one stores, and is read through its chunks.
So with a secondary tier, the policy of the primary tier declines nothing while a chunk may leave.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from kvoffload._hold import Hold
from kvoffload.errors import describe
from kvoffload.policies.base import CachePolicy

from . import _upstream as vllm
from .manager import KVOffloadManager
from .spec import OwnPolicy

# Named once, since a walk looks up each chunk of a request.
_HIT = vllm.LookupResult.HIT
_lookup = KVOffloadManager.lookup


class _Held(NamedTuple):
    """The chunks held for a request, and its context."""

    hold: Hold[bytes]
    context: weakref.ref[vllm.ReqContext]  # which reports that the request was dropped


class KVOffloadPrimaryTier(KVOffloadManager):
    """A manager of host memory that vLLM's secondary tiers read and write.

    Parameters
    ----------
    num_chunks : int
        Chunks that fit in host memory.
    mmap_region : SharedOffloadRegion
        The memory, which `shutdown` releases.
    cache_policy, cache_policy_module_path, enable_events, info
        As for `KVOffloadManager`.
    """

    def __init__(  # noqa: PLR0917  (vLLM's own constructor)
        self,
        num_chunks: int,
        mmap_region: Any,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        info: Any = None,
    ) -> None:
        self._require_new()
        self._held: dict[str, _Held] = {}  # by the id of a request that waits for promotions
        self._dropped: list[str] = []  # requests whose contexts are gone
        # The walk under way: the request that looks up its chunks, the first key, and those found.
        self._walker: vllm.ReqContext | None = None
        self._first = b""
        self._found: dict[bytes, None] = {}
        self._walk: Hold[bytes] | None = None  # what the request holds
        self._expects = False  # and whether that includes what is ready further on
        self._mmap_region = mmap_region
        self._memory: memoryview = mmap_region.create_kv_memoryview()
        try:
            super().__init__(
                num_chunks,
                cache_policy,
                cache_policy_module_path,
                enable_events=enable_events,
                info=info,
            )
        except BaseException:
            self._memory.release()
            raise

    def decline_nothing(self) -> None:
        """Store every chunk for which another may leave, even if its session ends."""
        self._require_ready()
        self._stores_all = True
        policy = self._rules.policy
        if isinstance(policy, CachePolicy):
            policy.set_declining(False)

    def prepare_read(
        self, keys: Collection[bytes], req_context: vllm.ReqContext
    ) -> vllm.LoadStoreSpec:
        """Pin chunks that a secondary tier will read, without an access of the request."""
        return self._prepare_read(keys, req_context)

    def complete_read(self, keys: Collection[bytes], req_context: vllm.ReqContext) -> None:
        """Release the pins of `prepare_read`."""
        self.complete_load(keys, req_context)

    def lookup(self, key: bytes, req_context: vllm.ReqContext) -> vllm.LookupResult:
        """Return whether one chunk is resident and readable; no order changes.

        A request that waits for promotions holds the chunk.
        """
        answer: vllm.LookupResult = _lookup(self, key, req_context)
        if req_context is not self._walker:
            self._end_walk()
            held = None if req_context is None else self._held.get(req_context.req_id)
            self._walker, self._first = req_context, key
            self._walk = None if held is None else held.hold
        if answer is _HIT:
            if self._walk is None:
                self._found[key] = None
            elif key not in self._walk.keys:
                with suppress(MemoryError):  # then it may be evicted, as in vLLM
                    self._walk.add([key])
        return answer

    def _end_walk(self) -> None:
        """End the walk under way, and let go of what dropped requests hold."""
        self._require_ready()
        with suppress(MemoryError):  # then a later call releases them
            if self._expects and self._walk is not None:
                self._walk.end_walk()
            while self._dropped:
                self._let_go(self._dropped[-1])
                self._dropped.pop()
        self._walker = self._walk = None
        self._found = {}
        self._expects = False

    def prepare_write(
        self, keys: Collection[bytes], req_context: vllm.ReqContext
    ) -> vllm.PrepareStoreOutput | None:
        """Make room for chunks that a secondary tier will write; None if none of them is stored.

        Also return None if the policy stores none of them: vLLM treats an output without keys as a
        promotion under way, and would wait for it. From its first promotion on, the request holds
        the chunks that it finds.
        """
        self._require_ready()
        keys = list(keys)
        waits = req_context.req_id in self._held
        try:
            self._hold(req_context).make_room(len(keys))
            output = super().prepare_store(keys, req_context)
            if output is None or not (output.keys_to_store or all(map(self._chunk, keys))):
                return None
            waits = True
            return output
        finally:
            if not waits:
                self._let_go(req_context.req_id)

    def _hold(self, req_context: vllm.ReqContext) -> Hold[bytes]:
        """Return what a request holds, with what its walk found and what is ready further on."""
        self._require_ready()
        name = req_context.req_id
        held = self._held.get(name)
        if held is None or held.context() is not req_context:
            hold = Hold(self._pin, self._unpin, self._room) if held is None else held.hold
            gone = self._dropped
            held = _Held(hold, weakref.ref(req_context, lambda _: gone.append(name)))
            self._held[name] = held
        if req_context is self._walker and not self._expects:
            self._walk = held.hold
            self._expects = True
            chain = chain_of(req_context)
            start = chain.index(self._first) if self._first in chain else 0
            self._walk.add(filter(self._is_ready, self._found))
            self._walk.expect(filter(self._is_ready, chain[start:] + chain[:start][::-1]))
        return held.hold

    def _room(self) -> int:
        """Return the number of chunks that are free or may leave."""
        in_use, _ = self._usage()
        return int(self._num_chunks - in_use)

    def _is_ready(self, key: bytes) -> bool:
        status = self._chunk(key)
        return status is not None and status[0] >= 0

    def complete_write(
        self, keys: Collection[bytes], req_context: vllm.ReqContext, success: bool = True
    ) -> None:
        """Make the chunks of `prepare_write` readable, or drop them.

        If the request still waits for them, it holds them.
        """
        self._require_ready()
        keys = list(keys)
        statuses = {key: status for key in keys if (status := self._chunk(key)) and status[0] < 0}
        self.complete_store(keys, req_context, success)
        self._end_writes(chunk_id for _, chunk_id in statuses.values())  # vLLM prepares one by one
        held = self._held.get(req_context.req_id)
        if success and held is not None:
            with suppress(MemoryError):  # then they may be evicted, as in vLLM
                held.hold.add(statuses)

    def prepare_load(
        self, keys: Iterable[bytes], req_context: vllm.ReqContext
    ) -> vllm.LoadStoreSpec:
        """Pin chunks for reading, and count the access; the request waits no longer."""
        spec = super().prepare_load(keys, req_context)
        with suppress(MemoryError):  # then a later call releases them
            self._let_go(req_context.req_id)
        return spec

    def prepare_store(
        self, keys: Iterable[bytes], req_context: vllm.ReqContext
    ) -> vllm.PrepareStoreOutput | None:
        """Make room for the chunks that are absent; the request waits no longer."""
        self._end_walk()
        output = super().prepare_store(keys, req_context)
        with suppress(MemoryError):  # then a later call releases them
            self._let_go(req_context.req_id)
        return output

    def on_request_finished(self, req_context: vllm.ReqContext) -> None:
        """Count the keys that the request has used as one access, tail first."""
        self._let_go(req_context.req_id)
        self._end_walk()
        super().on_request_finished(req_context)

    def on_schedule_end(self, context: vllm.ScheduleEndContext) -> None:
        """End a scheduler step; requests scheduled for the first time wait no longer."""
        self._end_walk()
        for request_id in context.new_req_ids:
            self._let_go(request_id)

    def reset_cache(self) -> None:
        """Drop every chunk; counted offers, events and samples stay, ids start at 0 again."""
        super().reset_cache()
        self._held.clear()
        self._walk = None
        self._end_walk()

    def _let_go(self, request_id: str) -> None:
        """Release what a request holds."""
        self._require_ready()
        held = self._held.get(request_id)
        if held is None:
            return
        held.hold.let_go()
        del self._held[request_id]
        if self._walk is held.hold:
            self._walk = None
            self._expects = False

    def get_kv_memoryview(self) -> memoryview:
        """Return the memory, one row per chunk: ``(num_chunks, bytes per chunk)``."""
        self._require_ready()
        return self._memory

    def shutdown(self) -> None:
        """Release the memory. The manager is not used afterwards."""
        self._require_ready()
        super().shutdown()
        self._memory.release()
        self._mmap_region.cleanup()


class KVOffloadTieringSpec(OwnPolicy, vllm.TieringOffloadingSpec):  # type: ignore[misc]
    """A spec of vLLM's secondary tiers below a primary tier of this package.

    ``{"spec_name": "KVOffloadTieringSpec", "spec_module_path": "kvoffload.integrations.vllm"}`` in
    ``kv_connector_extra_config``; every option of vLLM's ``TieringOffloadingSpec`` is valid.

    Parameters
    ----------
    config : OffloadingConfig
        From vLLM.

    Raises
    ------
    TypeError, ValueError
        For keys that begin with ``kvoffload_`` and are unknown or have a wrong value. An unknown
        policy is an error of `get_manager`.
    """

    def __init__(self, config: vllm.OffloadingConfig) -> None:
        tiers = config.extra_config.get("secondary_tiers")
        named = {"kv_connector_extra_config": config.extra_config}
        if isinstance(tiers, list):  # else vLLM's own error says that it must be one
            named |= {f"secondary_tiers[{index}]": tier for index, tier in enumerate(tiers)}
        for name, options in named.items():
            if not isinstance(options, Mapping):
                raise TypeError(f"{name} must be an object, got {type(options).__name__}")
            backpressure = options.get("backpressure")
            if backpressure is not None and not isinstance(backpressure, Mapping):
                raise TypeError(
                    f"backpressure of {name} must be an object, got {describe(backpressure)}"
                )
        super().__init__(config)

    def _new_manager(self) -> vllm.OffloadingManager:
        """Build vLLM's tiering manager over this package's primary tier.

        Raise RuntimeError if vLLM's module does not have the class to replace.
        """
        if self._policy_text is None:
            return super()._new_manager()
        with vllm.primary_tier_exchanged(KVOffloadPrimaryTier):
            own_policy, self.eviction_policy = self.eviction_policy, self._policy_text
            try:
                manager = super()._new_manager()
            finally:
                self.eviction_policy = own_policy
        if not isinstance(manager.primary_tier, KVOffloadPrimaryTier):
            raise RuntimeError("kvoffload: vLLM did not build the primary tier by its known name")
        if manager.secondary_tiers:
            manager.primary_tier.decline_nothing()
            _tell_of_steps(manager)
        return manager


def _tell_of_steps(manager: Any) -> None:
    """Have vLLM's tiering manager tell the primary tier of each step's end, which it does not."""
    end_step = manager.on_schedule_end

    def on_schedule_end(context: vllm.ScheduleEndContext) -> None:
        manager.primary_tier.on_schedule_end(context)
        end_step(context)

    manager.on_schedule_end = on_schedule_end


def chain_of(req_context: vllm.ReqContext) -> list[bytes]:
    """Return the keys of a request by position, those of a position by group."""
    positions = positions_of(req_context)
    return sorted(positions, key=positions.__getitem__)


def positions_of(req_context: vllm.ReqContext) -> dict[bytes, int]:
    """Return the token position at which each chunk of a request ends."""
    positions: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return positions
