"""Managers with a watch on them, and what can be seen of that."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

from kvoffload.watch import Watch
from tests.blocks import block_hash

SECRET = bytes(range(1, 65))


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def requests(seed: int, count: int = 600) -> list[list[bytes]]:
    """Return chains that share documents, as chats do."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        document = min(int(rng.expovariate(0.1)), 60)
        length = rng.randrange(1, 20)
        found.append([block_hash(1000 * document + position) for position in range(length)])
    return found


def watched(twin: ModuleType, **options: Any) -> Any:
    """Return a twin whose managers each have a watch of their own."""

    def build(*arguments: Any, **keywords: Any) -> Any:
        watch = Watch(**{"secret": SECRET, **options})
        return twin.CPUOffloadingManager(*arguments, watch=watch, **keywords)

    return SimpleNamespace(CPUOffloadingManager=build)


def seen(manager: Any) -> dict[str, Any]:
    """Return all that the watch of a manager holds, as values that compare."""
    core = manager.watch._core
    return {
        **core.counts(),
        **core.overall(),
        "order": core.order(),
        "sources": list(core.sources),
        "lag": core.lag,
        "early": core.early,
        "transfers": core.open_transfers(),
        "due": core.due,
        "now": core.now(),
    }


def whole(twin: ModuleType, capacity: int, policy: str = "lru", **options: Any) -> Any:
    """Return a manager whose watch samples every block, in one structure."""

    class Whole(Watch):
        _QUARTERS = 1

    watch = Whole(
        **{"secret": SECRET, "slots": 2**20, "policy_slots": 2**20, "max_rate": 1.0, **options}
    )
    return twin.CPUOffloadingManager(16, capacity, policy, watch=watch)


def serve(manager: Any, hashes: list[bytes]) -> int:
    """Do what an engine does for one request; return the hits."""
    manager.touch(hashes)
    found = manager.lookup(hashes)
    if found:
        manager.prepare_load(hashes[:found])
        manager.complete_load(hashes[:found])
    output = manager.prepare_store(hashes)
    manager.touch(hashes)
    if output is not None:
        manager.complete_store(output.block_hashes_to_store)
    return found


def served(
    manager: Any, asked: list[list[bytes]], *, under_way: int = 0, reset_every: int = 0
) -> Any:
    """Serve requests with as many stores under way, and resets between them; return the manager."""
    stores: deque[Any] = deque()
    for index, hashes in enumerate(asked):
        if reset_every and index and index % reset_every == 0:
            manager.reset_cache()
            stores.clear()
        request = manager.begin(hashes)
        request.lookup()
        request.prepare_store()
        request.finish()
        stores.append(request)
        if len(stores) > under_way:
            stores.popleft().complete_store()
    return manager


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Answer requests for pages; give the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{httpd.server_port}"
        finally:
            httpd.shutdown()
            thread.join()
