"""Helpers, and the differences between commits, found by the presence of names."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

POLICIES = ["lru", "arc", "hit-density"]
LENGTH = 128
"""Blocks per request."""
CAPACITY = 100_000
"""Blocks of a manager."""


def public(module: str, *names: str) -> Any:
    """Return a public name of a module, or several; a commit without them has no benchmark."""
    try:
        found = importlib.import_module(module)
        values = [getattr(found, name) for name in names]
    except (ModuleNotFoundError, AttributeError) as cause:
        if cause.name == "kvoffload" and isinstance(cause, ModuleNotFoundError):
            raise  # the package is not installed, rather than the name missing
        raise NotImplementedError(f"{module} lacks {', '.join(names)}") from cause
    return values[0] if len(values) == 1 else values


def block_hashes(first: int, count: int) -> list[bytes]:
    """Return `count` keys of 36 bytes: a digest and a group suffix, as engines make them."""
    return [
        hashlib.sha256(number.to_bytes(8, "big")).digest() + b"\0\0\0\0"
        for number in range(first, first + count)
    ]


def new_manager(policy: str, capacity: int, **options: Any) -> Any:
    """Return an empty compiled manager."""
    create, implementation = public("kvoffload", "CPUOffloadingManager", "IMPLEMENTATION")
    if implementation != "compiled":
        raise NotImplementedError("the extensions are not built")
    lacking = options.keys() - inspect.signature(create).parameters.keys()
    if lacking:
        raise NotImplementedError(f"managers lack {', '.join(sorted(lacking))}")
    try:
        return create(16, capacity, policy, **options)
    except ValueError as cause:
        raise NotImplementedError(f"no policy {policy}") from cause


def new_replay(policy: str, capacity: int) -> Callable[[Iterable[Any]], object]:
    """Return a replay of requests through an empty compiled manager."""
    replay = public("kvoffload.replay", "replay")
    try:
        create = public("kvoffload.replay", "Configuration")
    except NotImplementedError:  # until 0.4
        return lambda requests: replay(requests, new_manager(policy, capacity))
    configuration = create(policy=policy, host=capacity)
    return lambda requests: replay(requests, configuration, manager=new_manager(policy, capacity))


def fill(manager: Any, hashes: list[bytes], length: int = LENGTH) -> None:
    """Store blocks as requests, each touched after its store."""
    for start in range(0, len(hashes), length):
        request = hashes[start : start + length]
        output = manager.prepare_store(request)
        manager.touch(request)
        manager.complete_store(output.block_hashes_to_store)


def serve(manager: Any, hashes: list[bytes], **options: Any) -> int:
    """Serve a prompt as an engine does, with a request if managers have them; return the hits."""
    if not hasattr(manager, "begin"):  # before 0.4
        if options:
            raise NotImplementedError("no requests")
        return serve_by_calls(manager, hashes)
    request = manager.begin(hashes, **options)
    hits: int = request.lookup()
    if hits:
        request.prepare_load(0, hits)
        request.complete_load(0, hits)
    if request.prepare_store() is not None:
        request.complete_store()
    request.finish()
    return hits


def serve_by_calls(manager: Any, hashes: list[bytes]) -> int:
    """Serve a prompt with the calls that managers have had since 0.1."""
    manager.touch(hashes)
    hits: int = manager.lookup(hashes)
    if hits:
        manager.prepare_load(hashes[:hits])
        manager.complete_load(hashes[:hits])
    output = manager.prepare_store(hashes)
    manager.touch(hashes)
    if output is not None:
        manager.complete_store(output.block_hashes_to_store)
    return hits


class FreshRequests:
    """Requests of blocks that were never seen, each served once: the number of calls is fixed."""

    number = 8
    repeat = 8
    warmup_time = 0
    first = CAPACITY * 2

    def renew(self, length: int = LENGTH) -> None:
        """Make the requests of the next sample."""
        fresh = block_hashes(self.first, self.number * length)
        self.first += len(fresh)
        self.requests = [fresh[start : start + length] for start in range(0, len(fresh), length)]
