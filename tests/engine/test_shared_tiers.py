"""Two engines over one tier: what one stores the other loads, in both directions, token for token.

Both run at once, each in processes of its own. The tier is a directory, or a Redis server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from tests.engine.load import Client, plan
from tests.engine.metrics import Metrics
from tests.engine.runs import CHUNK_BYTES, tiering
from tests.engine.server import HOST, ROOT, Server
from tests.tiers.servers import redis_server

NUM_TURNS = 12
NUM_CONVERSATIONS = 4
NUM_CHUNKS = 400  # in host memory: all that is asked
NAME = "shared"
SEEDS = (0, 1)  # of what the first and the second engine are the first to be asked
STILL_S = 1.0  # a tier in which nothing has appeared for so long has what was stored
PATIENCE_S = 300.0


def wait_until_still(count: Callable[[], int]) -> int:
    """Wait until no more blocks appear; return how many there are."""
    end = time.monotonic() + PATIENCE_S
    found, since = count(), time.monotonic()
    while time.monotonic() < min(since + STILL_S, end):
        time.sleep(0.05)
        if (now := count()) != found:
            found, since = now, time.monotonic()
    return found


class Engine:
    """A server that is asked, and what its metrics say of each plan."""

    def __init__(self, server: Server) -> None:
        self.server, self.metrics = server, Metrics({})

    def ask(self, seed: int) -> tuple[list[tuple[int, ...]], dict[str, float]]:
        """Return the tokens, and how much was computed, loaded and read from the tier for them."""
        answers = Client(self.server).one_by_one(plan(NUM_TURNS, seed, NUM_CONVERSATIONS))
        self.server.settle()
        before, self.metrics = self.metrics, self.server.metrics()
        counted = [
            {
                "computed": each.computed_tokens,
                "loaded": each.loaded_tokens,
                "read": each.tier("bytes_total", NAME, op="get"),
            }
            for each in (before, self.metrics)
        ]
        new = {name: value - counted[0][name] for name, value in counted[1].items()}
        return [answer.token_ids for answer in answers], new


def redis_tier(stack: ExitStack, packages: Path) -> tuple[str, str, Callable[[], int]]:
    """Start a server; return the type of a tier over it, its address, and what counts its blocks.

    The client goes into a folder alone, without what is installed beside it.
    """
    client = find_spec("redis")
    if client is None:
        pytest.skip("the package redis is not installed")
    (packages / "redis").symlink_to(Path(client.origin).parent)
    options = ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
    server = stack.enter_context(redis_server(*options))
    from redis import Redis

    connection = stack.enter_context(Redis(HOST, server.port))
    return "KVOffloadRedisTier", f"redis://{HOST}:{server.port}/0?name={NAME}", connection.dbsize


def directory_tier(stack: ExitStack, path: Path) -> tuple[str, str, Callable[[], int]]:
    """Return the type of a tier over a directory, its address, and what counts its blocks."""
    url = f"dir:{path}?capacity=1GiB&name={NAME}"
    return "KVOffloadSharedTier", url, lambda: sum(1 for _ in path.rglob("*.kv"))


@pytest.mark.parametrize(
    "tier", [pytest.param(directory_tier, marks=pytest.mark.nightly), redis_tier]
)
def test_what_one_engine_stores_another_loads_with_the_same_tokens(tier, model, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    with ExitStack() as stack:
        kind, url, count = tier(stack, shared)
        extra = tiering(NUM_CHUNKS * CHUNK_BYTES, {"type": kind, "url": url})
        servers = []
        for folder in (tmp_path / "first", tmp_path / "second"):  # both at once
            # Where `engine_environment` puts what vLLM is to load.
            path = ":".join(map(str, (ROOT, folder / "plugin", shared)))
            servers.append(Server(model, folder, extra, variables={"PYTHONPATH": path}))
            stack.callback(servers[-1].kill)
            servers[-1].start()
        for server in servers:
            server.wait()
        engines = [Engine(server) for server in servers]
        blocks = 0
        for seed, (storing, loading) in zip(SEEDS, [engines, engines[::-1]], strict=True):
            tokens, alone = storing.ask(seed)
            assert alone["read"] == 0  # nobody had stored it: it was computed
            stored = wait_until_still(count)
            assert stored > blocks
            blocks = stored

            again, shared_with = loading.ask(seed)
            assert again == tokens
            assert shared_with["read"] >= CHUNK_BYTES
            assert shared_with["loaded"] > alone["loaded"]
            assert shared_with["computed"] < 0.5 * alone["computed"]
        for engine in engines:
            assert engine.metrics.tier("evicted_total", NAME, reason="corrupt") == 0
