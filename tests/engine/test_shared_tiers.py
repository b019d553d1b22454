"""Two engines over one tier: what one stores the other loads, in both directions, token for token.

Both run at once, each in processes of its own. The tier is a directory, or a Redis server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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


@dataclass
class Shared:
    """A secondary tier that engines share."""

    type: str
    url: str
    count: Callable[[], int]  # of the blocks that it has
    packages: str = ""  # a folder of Python packages that the engines need for it

    def server(self, model: Path, folder: Path) -> Server:
        """Return an engine above it, not yet started."""
        extra = tiering(NUM_CHUNKS * CHUNK_BYTES, {"type": self.type, "url": self.url})
        # Where `engine_environment` puts what vLLM is to load.
        path = [str(ROOT), str(folder / "plugin"), *filter(None, [self.packages])]
        return Server(model, folder, extra, variables={"PYTHONPATH": ":".join(path)})

    def wait_until_stored(self) -> int:
        """Wait until no more blocks appear; return how many there are."""
        end = time.monotonic() + PATIENCE_S
        count, since = self.count(), time.monotonic()
        while time.monotonic() < min(since + STILL_S, end):
            time.sleep(0.05)
            if (now := self.count()) != count:
                count, since = now, time.monotonic()
        return count


@contextmanager
def directory(folder: Path) -> Iterator[Shared]:
    """Yield a directory."""
    path = folder / "shared"
    url = f"dir:{path}?capacity=1GiB&name={NAME}"
    yield Shared("KVOffloadSharedTier", url, lambda: sum(1 for _ in path.rglob("*.kv")))


@contextmanager
def redis(folder: Path) -> Iterator[Shared]:
    """Yield a Redis server."""
    client = find_spec("redis")
    if client is None:
        pytest.skip("the package redis is not installed")
    packages = folder / "packages"  # the client alone, without what is installed beside it
    packages.mkdir()
    (packages / "redis").symlink_to(Path(client.origin).parent)
    options = ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(*options) as server:
        from redis import Redis

        with Redis(HOST, server.port) as connection:
            url = f"redis://{HOST}:{server.port}/0?name={NAME}"
            yield Shared("KVOffloadRedisTier", url, connection.dbsize, str(packages))


@dataclass
class Engine:
    """A server that is asked, and what its metrics say of each plan."""

    server: Server
    before: Metrics = field(default_factory=lambda: Metrics({}))

    def ask(self, seed: int) -> tuple[list[tuple[int, ...]], dict[str, float]]:
        """Return the tokens, and how much was computed, loaded and read from the tier for them."""
        answers = Client(self.server).one_by_one(plan(NUM_TURNS, seed, NUM_CONVERSATIONS))
        self.server.settle()
        now, before = self.server.metrics(), self.before
        self.before = now
        read, read_before = (each.tier("bytes_total", NAME, op="get") for each in (now, before))
        return [answer.token_ids for answer in answers], {
            "computed": now.computed_tokens - before.computed_tokens,
            "loaded": now.loaded_tokens - before.loaded_tokens,
            "read": read - read_before,
        }


@pytest.mark.parametrize(
    "tier",
    [pytest.param(directory, marks=pytest.mark.nightly), redis],
    ids=["directory", "redis"],
)
def test_what_one_engine_stores_another_loads_with_the_same_tokens(tier, model, tmp_path):
    with tier(tmp_path) as shared, ExitStack() as stack:
        servers = [shared.server(model, tmp_path / name) for name in ("first", "second")]
        for server in servers:  # both at once
            stack.callback(server.kill)
            server.start()
        for server in servers:
            server.wait()
        engines = [Engine(server) for server in servers]
        blocks = 0
        for seed, (storing, loading) in zip(SEEDS, [engines, engines[::-1]], strict=True):
            tokens, alone = storing.ask(seed)
            assert alone["read"] == 0  # nobody had stored it: it was computed
            stored = shared.wait_until_stored()
            assert stored > blocks
            blocks = stored

            again, shared_with = loading.ask(seed)
            assert again == tokens
            assert shared_with["read"] >= CHUNK_BYTES
            assert shared_with["loaded"] > alone["loaded"]
            assert shared_with["computed"] < 0.5 * alone["computed"]
        for engine in engines:
            assert engine.before.tier("evicted_total", NAME, reason="corrupt") == 0
