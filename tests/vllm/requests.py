"""Keys of chunks, and contexts of requests as vLLM's connector fills them."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.kv_offload.base import ReqContext, make_offload_key

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


class WithoutHints(ReqContext):
    """A context whose hints cannot even be read."""

    @property
    def kv_hints(self):
        raise RuntimeError("no hints")

    @kv_hints.setter
    def kv_hints(self, value):
        pass
