"""Compare the tiers beyond one machine with bare use of their client libraries.

Starts a ``redis-server`` and moto's server, which stands in for S3, on the loopback. Prints a table
of ratios: the bare side's time divided by the tier's, so that 1 is as fast as bare and more is
faster, and the same ratio of this process's CPU time. All sides run in one process and take turns;
each figure is a median::

    python asv_benchmarks/remote_tiers.py [--quick] [--rows PATTERN] [--folder FOLDER]

The bare sides do what a careful user of the library would do for the same blocks in the same
memory, without seals, deadlines or verdicts: Redis by four threads with pipelines of
eight blocks (``SET NX``, ``GET`` and a copy) and by one script for queries; files by eight threads,
each with a new file, a link and an unlink, or an open and a read; objects by 64 requests at once in
one event loop. moto's server is written in
Python and takes most of the time of its rows: they show the tier's cost per request, not the speed
of S3. The rows of `object_server`, which keeps objects in memory, show more of the client: the
tier's runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from kvoffload.testing.tiers import run
from kvoffload.tiers import DirectoryTier, Namespace, ObjectTier, RedisTier, Region
from kvoffload.tiers.remote.redis import FIND
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.seal import xxh3_64
from tests.tiers.servers import (
    Server,
    make_bucket,
    redis_server,
    s3_options,
    s3_server,
)

KIB, MIB = 1024, 1024 * 1024
SIZES = {"16 KiB": 16 * KIB, "160 KiB": 160 * KIB, "1 MiB": MIB}
PATIENCE_S = 600.0
QUERIES = (64, 1024, 4096)


class Side:
    """A tier or a bare client, with a region: `put` and `get` move all blocks of a batch."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def put(self, keys: list[bytes]) -> None:
        raise NotImplementedError

    def get(self, keys: list[bytes]) -> None:
        raise NotImplementedError

    def find(self, keys: list[bytes]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class TierSide(Side):
    """A tier, called as an engine calls it."""

    def __init__(self, region: Region, tier: RemoteTier) -> None:
        super().__init__(region)
        self.tier = tier
        tier.attach(region)
        run(tier, tier.query([b"first"], PATIENCE_S))

    def put(self, keys: list[bytes]) -> None:
        done = run(self.tier, self.tier.put(keys, range(len(keys)), PATIENCE_S))
        assert not done.status.any(), done.status

    def get(self, keys: list[bytes]) -> None:
        done = run(self.tier, self.tier.get(keys, range(len(keys)), PATIENCE_S))
        assert not done.status.any(), done.status

    def find(self, keys: list[bytes]) -> None:
        self.tier._medium.verdicts.clear()
        done = run(self.tier, self.tier.query(keys, PATIENCE_S))
        assert done.status.max() <= 1, done.status

    def close(self) -> None:
        self.tier.close(PATIENCE_S)


class BareRedis(Side):
    """redis-py with the same pipelines."""

    def __init__(self, region: Region, port: int) -> None:
        from redis import Redis

        super().__init__(region)
        self.clients = [Redis(port=port) for _ in range(4)]
        self.threads = ThreadPoolExecutor(4)

    def _each(self, work: Callable[[Any, range], None], count: int) -> None:
        runs = [range(start, min(count, start + 8)) for start in range(0, count, 8)]

        def serve(number: int) -> None:
            for part in runs[number::4]:
                work(self.clients[number], part)

        list(self.threads.map(serve, range(4)))

    def put(self, keys: list[bytes]) -> None:
        def work(client: Any, part: range) -> None:
            pipeline = client.pipeline(transaction=False)
            for place in part:
                pipeline.set(keys[place], self.region.views(place)[0], nx=True)
            pipeline.execute()

        self._each(work, len(keys))

    def get(self, keys: list[bytes]) -> None:
        def work(client: Any, part: range) -> None:
            pipeline = client.pipeline(transaction=False)
            for place in part:
                pipeline.get(keys[place])
            for place, data in zip(part, pipeline.execute(), strict=True):
                self.region.views(place)[0][:] = data

        self._each(work, len(keys))

    def find(self, keys: list[bytes]) -> None:
        for start in range(0, len(keys), 1024):
            part = keys[start : start + 1024]
            self.clients[0].eval(FIND, len(part), *part)

    def close(self) -> None:
        self.threads.shutdown()
        for client in self.clients:
            client.close()


class BareFiles(Side):
    """Files through system calls."""

    def __init__(self, region: Region, folder: Path) -> None:
        super().__init__(region)
        self.folder = folder
        folder.mkdir()
        self.threads = ThreadPoolExecutor(8)

    def put(self, keys: list[bytes]) -> None:
        def work(place: int) -> None:
            path = f"{self.folder}/{keys[place].hex()}"
            fd = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, self.region.views(place)[0])
            os.close(fd)
            os.link(path + ".tmp", path)
            Path(path + ".tmp").unlink()

        list(self.threads.map(work, range(len(keys))))

    def get(self, keys: list[bytes]) -> None:
        def work(place: int) -> None:
            fd = os.open(f"{self.folder}/{keys[place].hex()}", os.O_RDONLY)
            os.preadv(fd, self.region.views(place), 0)
            os.close(fd)

        list(self.threads.map(work, range(len(keys))))

    def find(self, keys: list[bytes]) -> None:
        def work(key: bytes) -> bool:
            return Path(f"{self.folder}/{key.hex()}").exists()

        list(self.threads.map(work, keys))

    def close(self) -> None:
        self.threads.shutdown()


class BareObjects(Side):
    """obstore with as many requests at once."""

    def __init__(self, region: Region, options: dict[str, Any]) -> None:
        import obstore

        super().__init__(region)
        self.client = obstore
        self.bucket = obstore.store.from_url("s3://blocks/bare", **options)
        self.loop = asyncio.new_event_loop()

    def _each(self, work: Callable[[int], Any], count: int) -> None:
        limit = asyncio.Semaphore(64)

        async def one(place: int) -> None:
            async with limit:
                await work(place)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(place) for place in range(count)))

        self.loop.run_until_complete(all_of_them())

    def put(self, keys: list[bytes]) -> None:
        def work(place: int) -> Any:
            data = bytes(self.region.views(place)[0])
            return self.client.put_async(
                self.bucket, keys[place].hex(), data, mode="create", use_multipart=False
            )

        self._each(work, len(keys))

    def get(self, keys: list[bytes]) -> None:
        async def work(place: int) -> None:
            answer = await self.client.get_async(self.bucket, keys[place].hex())
            self.region.views(place)[0][:] = memoryview(await answer.bytes_async())

        self._each(work, len(keys))

    def close(self) -> None:
        self.loop.close()


def ratio(
    sides: tuple[Side, Side], work: Callable[[Side, int], None], rounds: int
) -> tuple[float, float, float]:
    """Return the bare side's time over the tier's, the same of CPU time, and the tier's time.

    Seconds, medians; CPU time is this process's.
    """
    times: list[list[float]] = [[], []]
    used: list[list[float]] = [[], []]
    gc.collect()
    for number in range(rounds + 1):
        for place in (0, 1) if number % 2 else (1, 0):
            start, used_before = time.perf_counter(), time.process_time()
            work(sides[place], number)
            if number:  # the first round faults memory in and connects
                times[place].append(time.perf_counter() - start)
                used[place].append(time.process_time() - used_before)
    tier, bare = (statistics.median(spent) for spent in times)
    tier_used, bare_used = (statistics.median(spent) for spent in used)
    return bare / tier, bare_used / tier_used, tier


def batch(size: int, count: int, number: int) -> list[bytes]:
    return [b"%d-%d-%016d" % (size, number, place) for place in range(count)]


def measure(
    name: str, opener: Callable[[Namespace, Region], tuple[Side, Side]], quick: bool, sizes: Any
) -> Iterator[tuple[str, float, str]]:
    """Yield the rows of one medium: name, ratio, and the tier's own figure."""
    for label, size in sizes.items():
        count = 32 if quick else 64
        region = Region.allocate(count, size)
        region.array[:] = np.random.default_rng(0).integers(0, 256, region.nbytes, np.uint8)
        rounds = 3 if quick else 9
        namespace = Namespace("benchmark", size)
        sides = opener(namespace, region)
        found, cpu, spent = ratio(
            sides, lambda side, n, s=size, c=count: side.put(batch(s, c, n)), rounds
        )
        figure = f"{count * size / spent / 1e9:.2f} GB/s, processors' time {cpu:.2f} x"
        yield f"{name} put {label}", found, figure
        found, cpu, spent = ratio(
            sides, lambda side, n, s=size, c=count: side.get(batch(s, c, n)), rounds
        )
        figure = f"{count * size / spent / 1e9:.2f} GB/s, processors' time {cpu:.2f} x"
        yield f"{name} get {label}", found, figure
        if label == "16 KiB" and type(sides[1]).find is not Side.find:
            for keys in QUERIES:
                asked = batch(size, keys, 0)
                found, _, spent = ratio(sides, lambda side, _, a=asked: side.find(a), rounds)
                yield f"{name} query {keys} keys", found, f"{spent / keys * 1e6:.1f} us per key"
        for side in sides:
            side.close()


def measure_sweep(folder: Path, count: int) -> Iterator[tuple[str, float, str]]:
    """Yield the time of a sweep that removes nothing, against a bare walk with a stat per file."""
    with DirectoryTier(folder, 2**40, namespace=Namespace("sweep", 4096)) as tier:
        tier.attach(Region.allocate(1, 4096))
        done = run(tier, tier.query([b"first"], PATIENCE_S))
        assert not done.nbytes
        for place in range(count):
            key = b"%036d" % place
            folder = tier.folder / f"{0:016x}" / f"{xxh3_64(key) & 0xFF:02x}"
            folder.mkdir(0o700, parents=True, exist_ok=True)
            (folder / f"{key.hex()}.kv").touch()
        sweeps, walks = [], []
        for _ in range(5):
            start = time.perf_counter()
            while tier.sweep() is None:
                pass
            sweeps.append(time.perf_counter() - start)
            start = time.perf_counter()
            for entry in tier.folder.rglob("*.kv"):
                entry.stat()
            walks.append(time.perf_counter() - start)
    spent = statistics.median(sweeps)
    yield (
        f"directory sweep {count} blocks",
        statistics.median(walks) / spent,
        f"{spent / count * 1e6:.1f} us per block",
    )


def show(rows: Iterator[tuple[str, float, str]]) -> None:
    for name, found, figure in rows:
        print(f"{name:<34} {found:6.2f} x   {figure}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, small batches")
    parser.add_argument("--rows", default="", help="only media whose name has this pattern")
    parser.add_argument("--folder", type=Path, help="where the shared directory is made")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvoffload-bench-", dir=options.folder))

    def open_directory(namespace: Namespace, region: Region) -> tuple[Side, Side]:
        part = folder / str(namespace.block_bytes)
        tier = DirectoryTier(part, 2**40, namespace=namespace, ack="stored")
        return TierSide(region, tier), BareFiles(region, part.with_suffix(".bare"))

    def over_redis(port: int) -> Callable[[Namespace, Region], tuple[Side, Side]]:
        def opener(namespace: Namespace, region: Region) -> tuple[Side, Side]:
            tier = RedisTier(f"redis://127.0.0.1:{port}", namespace=namespace, ack="stored")
            return TierSide(region, tier), BareRedis(region, port)

        return opener

    def over_s3(settings: dict[str, Any]) -> Callable[[Namespace, Region], tuple[Side, Side]]:
        def opener(namespace: Namespace, region: Region) -> tuple[Side, Side]:
            tier = ObjectTier("s3://blocks/tier", namespace=namespace, ack="stored", **settings)
            return TierSide(region, tier), BareObjects(region, settings)

        return opener

    print(f"{'tier against the bare client':<34} {'ratio':>8}   the tier's own figure")
    try:
        if re.search(options.rows, "directory"):
            show(measure("directory", open_directory, options.quick, SIZES))
            show(measure_sweep(folder / "sweep", 2_000 if options.quick else 20_000))
        if re.search(options.rows, "redis"):
            with redis_server("--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru") as server:
                show(measure("redis", over_redis(server.port), options.quick, SIZES))
        if re.search(options.rows, "s3"):
            with s3_server() as server:
                make_bucket(server)
                small = {label: SIZES[label] for label in ("16 KiB", "160 KiB")}
                settings = s3_options(server)
                show(measure("s3 (moto)", over_s3(settings), options.quick, small))
            program = str(Path(__file__).with_name("object_server.py"))
            with Server(lambda port, _: [sys.executable, program, str(port)]) as server:
                sizes = {label: SIZES[label] for label in ("160 KiB", "1 MiB")}
                sizes["5 MiB"] = 5 * MIB
                settings = s3_options(server)
                show(measure("s3 (in memory)", over_s3(settings), options.quick, sizes))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
