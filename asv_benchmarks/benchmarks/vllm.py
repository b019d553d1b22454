"""Requests of 512 chunks through the manager of vLLM's interface, if vLLM is installed."""

from __future__ import annotations

from typing import Any

from .common import FreshRequests, block_hashes, public

CHUNKS = 512


class Cycle(FreshRequests):
    """All calls of vLLM's scheduler for a request, on a full cache of 20,000 chunks."""

    number = 4
    manager: Any = None

    def setup(self) -> None:
        """Fill the cache once; make new requests for each sample."""
        self.context, key = public("vllm.v1.kv_offload.base", "ReqContext", "make_offload_key")
        if self.manager is None:
            create = public("kvoffload.integrations.vllm", "KVOffloadManager")
            self.manager = create(20_480, "lru")
            for first in range(0, 20_480, CHUNKS):
                self.store(*self.named([key(hash_, 0) for hash_ in block_hashes(first, CHUNKS)]))
            self.resident = [key(hash_, 0) for hash_ in block_hashes(20_480 - CHUNKS, CHUNKS)]
        self.renew(CHUNKS)
        self.fresh = [self.named([key(each, 0) for each in request]) for request in self.requests]
        self.known = [self.named(self.resident) for _ in range(self.number)]

    def named(self, keys: list[Any]) -> tuple[Any, list[Any]]:
        """Return a context for the keys, with their positions."""
        self.first += 1
        context = self.context(str(self.first))
        for index, key in enumerate(keys):
            context.set_offload_key_position(key, (index + 1) * 16)
        return context, keys

    def store(self, context: Any, keys: list[Any]) -> None:
        self.manager.on_new_request(context)
        output = self.manager.prepare_store(keys, context)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)

    def time_store(self) -> None:
        self.store(*self.fresh.pop())

    def time_load(self) -> None:
        context, keys = self.known.pop()
        self.manager.on_new_request(context)
        for key in keys:
            self.manager.lookup(key, context)
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
