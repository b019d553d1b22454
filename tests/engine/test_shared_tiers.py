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
from tests.engine.runs import CHUNK_BYTES, PACKAGE
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
    """A tier that engines share.

    Attributes
    ----------
    type, url : str
        Of the secondary tier.
    count : callable
        Returns how many blocks it has.
    packages : str
        A folder of Python packages that the engines need for it.
    """

    type: str
    url: str
    count: Callable[[], int]
    packages: str = ""

    def server(self, model: Path, folder: Path) -> Server:
        """Return an engine above it, not yet started."""
        secondary = {"type": self.type, "module_path": PACKAGE, "url": self.url}
        extra = {
            "spec_name": "KVOffloadTieringSpec",
            "spec_module_path": PACKAGE,
            "cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [secondary],
        }
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


def ask(server: Server, seed: int) -> list[tuple[int, ...]]:
    """Return the tokens that a server answers to a plan."""
    answers = Client(server).one_by_one(plan(NUM_TURNS, seed, NUM_CONVERSATIONS))
    server.settle()
    return [answer.token_ids for answer in answers]


@dataclass
class Engine:
    """A server that is asked, and what its metrics say of each plan."""

    server: Server
    before: Metrics = field(default_factory=lambda: Metrics({}))

    def ask(self, seed: int) -> tuple[list[tuple[int, ...]], dict[str, float]]:
        """Return the tokens, and how much was computed, loaded and read from the tier for them."""
        tokens = ask(self.server, seed)
        now, before = self.server.metrics(), self.before
        self.before = now
        return tokens, {
            "computed": now.computed_tokens - before.computed_tokens,
            "loaded": now.loaded_tokens - before.loaded_tokens,
            "read": tier_value(now, "bytes_total", op="get")
            - tier_value(before, "bytes_total", op="get"),
        }


def tier_value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.tier(name, NAME, **labels)


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
            assert tier_value(engine.before, "evicted_total", reason="corrupt") == 0
