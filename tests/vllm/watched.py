"""Managers of vLLM's interface with a watch, and whole requests for them."""

from __future__ import annotations

from vllm.v1.kv_offload.base import LookupResult, make_offload_key

from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.watch import Watch
from tests.vllm.requests import context

SECRET = bytes(range(64))


class Time:
    """A clock that is set."""

    now = 0.0

    def __call__(self):
        return self.now


def watch_all(**options):
    """Return a watch that samples every block, and whose clock stands."""
    options = {"max_rate": 1.0, "slots": 2**20, "secret": SECRET, "clock": Time()} | options
    return Watch(**options)


def watched(num_chunks, **options):
    manager_options = {
        name: options.pop(name)
        for name in ("cache_policy", "store_threshold", "max_tracker_size")
        if name in options
    }
    return KVOffloadManager(num_chunks, watch=watch_all(**options), **manager_options)


def keys_of(name, numbers):
    return [bytes(make_offload_key(b"%s%031d" % (name.encode(), n), 0)) for n in numbers]


class Request:
    """One request of vLLM: looked up from a position on, loaded, stored, finished."""

    count = 0

    def __init__(self, manager, keys, first=0, params=None):
        Request.count += 1
        self.manager, self.keys = manager, keys
        self.context = context(keys, f"r{Request.count}", params)
        manager.on_new_request(self.context)
        hits = []
        for key in keys[first:]:
            if manager.lookup(key, self.context) is not LookupResult.HIT:
                break
            hits.append(key)
        self.hits = hits

    def load(self):
        self.manager.prepare_load(self.hits, self.context)
        self.manager.complete_load(set(self.hits), self.context)

    def store(self, keys=None, success=True):
        output = self.manager.prepare_store(self.keys if keys is None else keys, self.context)
        if output is not None and output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), self.context, success)
        return output

    def finish(self):
        self.manager.on_request_finished(self.context)

    def run(self):
        if self.hits:
            self.load()
        self.store()
        self.finish()
