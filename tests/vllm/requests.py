"""Keys of chunks, and contexts of requests as vLLM's connector fills them."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

CHUNK_TOKENS = 16


def key(number: int, group: int = 0) -> bytes:
    """Return the key of a chunk."""
    return bytes(make_offload_key(b"%032d" % number, group))


def context(keys: Iterable[bytes], name: str = "r", params=None, hints=None) -> ReqContext:
    """Return the context of a request for chunks that follow each other."""
    made = ReqContext(name, params, hints)
    for place, one in enumerate(keys):
        made.set_offload_key_position(one, (place + 1) * CHUNK_TOKENS)
    return made


class Drive:
    """Requests through a manager of vLLM's interface, offered in parts of `part` chunks.

    Up to `in_flight` requests overlap.
    """

    def __init__(self, manager, part: int, in_flight: int = 1):
        self.manager = manager
        self.part = part
        self.in_flight = in_flight
        self.running: list = []
        self.hits = self.offered = self.stored = self.refused = 0

    def run(self, keys) -> list:
        """Run a request; return what was decided about it."""
        manager, made = self.manager, context(keys)
        manager.on_new_request(made)
        hits = 0
        while hits < len(keys) and manager.lookup(keys[hits], made) is LookupResult.HIT:
            hits += 1
        self.hits += hits
        decided: list = [hits]
        if hits:
            decided.append(manager.prepare_load(keys[:hits], made).block_ids.tolist())
        stored = []
        for start in range(hits, len(keys), self.part):
            offer = keys[start : start + self.part]
            absent = [one for one in offer if manager.lookup(one, made) is LookupResult.MISS]
            output = manager.prepare_store(offer, made)
            if output is None:
                self.refused += 1
                decided.append(None)
                continue
            # A leading part of what is absent, and a place for each key of it.
            assert output.keys_to_store == absent[: len(output.keys_to_store)]
            places = output.store_spec.block_ids.tolist()
            assert len(places) == len(output.keys_to_store)
            decided.append((output.keys_to_store, places, output.evicted_keys))
            self.offered += len(absent)
            stored += output.keys_to_store
        self.stored += len(stored)
        self.running.append((made, keys[:hits], stored))
        if len(self.running) >= self.in_flight:
            self.finish()
        return decided

    def finish(self) -> None:
        made, loaded, stored = self.running.pop(0)
        if loaded:
            self.manager.complete_load(loaded, made)
        self.manager.complete_store(stored, made)
        self.manager.on_request_finished(made)

    def end(self) -> None:
        while self.running:
            self.finish()


class WithoutHints(ReqContext):
    """A context whose hints cannot even be read."""

    @property
    def kv_hints(self):
        raise RuntimeError("no hints")

    @kv_hints.setter
    def kv_hints(self, value):
        pass
