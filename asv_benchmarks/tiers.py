"""Compare the slab tier with vLLM's ``fs`` tier and its C extension, raw calls and memcpy.

Prints a table of ratios; all sides run in one process and take turns. Needs an environment with
vLLM, which ``.ci/vllm-env`` makes, and a folder on the disk in question, with a few GB of room::

    $(.ci/vllm-env) setup.py build_ext --inplace
    $(.ci/vllm-env) asv_benchmarks/tiers.py [--quick] [--rows PATTERN] [--folder FOLDER]

Without vLLM only the rows that do not name ``fs`` are printed, and those of the checksums only with
the ``xxhash`` package.

A *put* is the time from the submission of a job of new blocks to its end, a *get* likewise. The
sides have the same bytes in the same memory and write to the same file system, past the page cache;
the slab has room for four jobs, so that most puts evict, and ``fs`` starts each round without the
files of the round before. *Raw* is ``preadv`` and ``pwritev`` of the same bytes at the same places
by eight threads, 8 MiB a call, without sums and seals. The *busy thread* counts in Python; its
share is its count per second while the tiers move blocks, over that while nothing else runs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from kvoffload.tiers import FileTier, MemoryTier, Namespace, Region, State, Tier

# vLLM's C extension for files names CUDA's libraries and uses none of them.
UNUSED_LIBRARIES = ("libnvrtc.so.13", "libc10_cuda.so", "libtorch_cuda.so")


def stand_in_for_cuda() -> None:
    """Load empty libraries under the names that the extension needs, if these are missing."""
    try:
        import torch
    except ImportError:
        return
    if torch.version.cuda is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in UNUSED_LIBRARIES:
            path = f"{folder}/{name}"
            subprocess.run(
                ["gcc", "-shared", f"-Wl,-soname,{name}", "-o", path, "-xc", "/dev/null"],
                check=True,
            )
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


stand_in_for_cuda()

try:
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.fs import io as fs_io
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
except ImportError:
    FileSystemTierManager = None

KIB, MIB = 1024, 1024 * 1024
SIZES = {"160 KiB": (160 * KIB, 64), "1 MiB": (MIB, 64), "5 MiB": (5 * MIB, 24)}
"""Blocks by name: bytes, and blocks per job."""
SLAB_JOBS = 4
RAW_CALL = 8 * MIB
THREADS = 8


@dataclass(frozen=True)
class Row:
    """One line of the table: `must` bounds `value`, from below unless `at_most`."""

    name: str
    value: float
    must: float | None = None
    at_most: bool = False
    unit: str = "x"

    def verdict(self) -> str:
        if self.must is None:
            return ""
        holds = self.value <= self.must if self.at_most else self.value >= self.must
        bound = "at most" if self.at_most else "at least"
        kept = "kept" if holds else "not kept in this run; on a busy machine figures vary"
        return f"{bound} {self.must:g}: {kept}"


def make_keys(first: int, count: int) -> list[bytes]:
    """Make keys of 36 bytes: a digest and a group suffix."""
    return [sha256(b"%d" % i).digest() + b"\0\0\0\0" for i in range(first, first + count)]


def interleave(
    sides: dict[str, Callable[[int], Any]],
    rounds: int,
    after: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the median time of each side in seconds; the sides take turns, in changing order."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    gc.collect()
    for number in range(rounds + 2):
        for name in names if number % 2 else reversed(names):
            start = time.perf_counter()
            sides[name](number)
            spent = time.perf_counter() - start
            if number >= 2:  # the first rounds make files and fault memory in
                times[name].append(spent)
        after()
    return {name: statistics.median(spent) for name, spent in times.items()}


def clock(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- sides -----------------------------------------------------------------------------------------


class Ours:
    """A tier of this library."""

    def __init__(self, tier: Tier, region: Region) -> None:
        self.tier = tier
        tier.attach(region)

    def wait(self, jobs: list[int]) -> None:
        if not self.tier.wait(jobs, 60):
            raise RuntimeError("a job has not ended")
        for done in self.tier.poll():
            if done.status.any():
                raise RuntimeError(f"{done.op}: {done.status}")

    def put(self, keys: list[bytes], ids: np.ndarray) -> None:
        self.wait([self.tier.put(keys, ids, 60)])

    def get(self, *jobs: tuple[list[bytes], np.ndarray]) -> None:
        self.wait([self.tier.get(keys, ids, 60) for keys, ids in jobs])

    def close(self) -> None:
        self.tier.close()


class Fs:
    """vLLM's own tier of files."""

    def __init__(self, folder: Path, region: Region) -> None:
        self.folder = folder
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=region.block_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="benchmark",
            model=OffloadingModelConfig("benchmark", "bfloat16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        view = memoryview(region.array.reshape(region.num_blocks, region.block_bytes))
        self.manager = FileSystemTierManager(spec, view, "fs", str(folder))
        self.next_job = 0

    def submit(self, keys: list[bytes], ids: np.ndarray, *, load: bool) -> None:
        self.next_job += 1
        job = TransferJob(self.next_job, keys, ids, load, ReqContext("benchmark"))
        (self.manager.submit_load if load else self.manager.submit_store)(job)

    def wait(self) -> None:
        self.manager.drain_jobs()
        for result in self.manager.get_finished_jobs():
            if not result.success:
                raise RuntimeError("fs failed")

    def put(self, keys: list[bytes], ids: np.ndarray) -> None:
        self.submit(keys, ids, load=False)
        self.wait()

    def get(self, *jobs: tuple[list[bytes], np.ndarray]) -> None:
        for keys, ids in jobs:
            self.submit(keys, ids, load=True)
        self.wait()

    def find(self, key: bytes) -> bool:
        """Look a key up, including the steps until its answer."""
        context = ReqContext("benchmark")
        while True:
            found = self.manager.lookup(key, context)
            if found is not LookupResult.RETRY:
                self.manager.on_request_finished(context)
                return found is LookupResult.HIT
            self.manager.on_schedule_end(ScheduleEndContext([], []))
            time.sleep(0)

    def time_of_lookups(self, keys: list[bytes], number: int) -> float:
        """Return the seconds that a new request's lookups take, without the steps between them."""
        context, lookup = ReqContext(f"request {number}"), self.manager.lookup
        spent = clock(lambda: [lookup(key, context) for key in keys])
        self.manager.on_schedule_end(ScheduleEndContext([], []))
        while lookup(keys[-1], context) is LookupResult.RETRY:
            time.sleep(0.001)
            self.manager.on_schedule_end(ScheduleEndContext([], []))
        spent += clock(lambda: [lookup(key, context) for key in keys])
        spent += clock(lambda: self.manager.on_request_finished(context))
        return spent

    def empty(self) -> None:
        """Remove all files."""
        for path in self.folder.rglob("*.bin"):
            path.unlink()

    def close(self) -> None:
        self.manager.shutdown()


class Raw:
    """System calls, without anything else."""

    def __init__(self, path: Path, nbytes: int, region: Region) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, nbytes)
        self.memory = memoryview(region.array)
        self.threads = ThreadPoolExecutor(THREADS)

    def move(self, call: Callable[..., int], nbytes: int, at: int) -> None:
        def one(start: int) -> None:
            piece = self.memory[start : min(start + RAW_CALL, nbytes)]
            if call(self.fd, [piece], at + start) != len(piece):
                raise RuntimeError("a short call")

        list(self.threads.map(one, range(0, nbytes, RAW_CALL)))

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.fd)


# -- groups of rows --------------------------------------------------------------------------------


class Bench:
    """A group of rows, with a folder and a number of rounds."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.count = 0

    def fresh(self) -> Path:
        self.count += 1
        path = self.folder / str(self.count)
        path.mkdir()
        return path

    def region(self, num_blocks: int, block_bytes: int) -> Region:
        region = Region.allocate(num_blocks, block_bytes)
        rng = np.random.default_rng(0)
        region.array[:] = rng.integers(0, 256, region.nbytes, np.uint8)
        return region

    def slab(self, region: Region, num_blocks: int, **options: Any) -> Ours:
        namespace = Namespace("benchmark", region.block_bytes)
        capacity = num_blocks * region.block_bytes
        return Ours(
            FileTier(self.fresh(), capacity, threads=THREADS, namespace=namespace, **options),
            region,
        )

    def transfers(self, busy: bool = False) -> Iterator[Row]:
        """Compare puts and gets of every size with ``fs`` and with raw calls."""
        for name, (block_bytes, count) in SIZES.items():
            if not busy or name == "160 KiB":
                yield from self.transfers_of(name, block_bytes, count, busy)

    def transfers_of(self, name: str, block_bytes: int, count: int, busy: bool) -> Iterator[Row]:
        region = self.region(count, block_bytes)
        ids, nbytes = np.arange(count), count * block_bytes
        sides: dict[str, Any] = {"ours": self.slab(region, SLAB_JOBS * count)}
        if FileSystemTierManager is not None:
            sides["fs"] = Fs(self.fresh(), region)
        raw = Raw(self.fresh() / "raw.dat", SLAB_JOBS * nbytes, region)
        keys_of = [make_keys(count * number, count) for number in range(self.rounds + 2)]
        last, before = keys_of[-1], region.array.copy()
        spinner = Spinner() if busy else None

        def watched(key: str, call: Callable[[int], Any]) -> Callable[[int], Any]:
            if spinner is None:
                return call
            return lambda number: spinner.measure(key, lambda: call(number))

        puts, gets, fours = {}, {}, {}
        quarters = [
            (last[start : start + count // 4], ids[start : start + count // 4])
            for start in range(0, count, count // 4)
        ]
        for key, side in sides.items():
            puts[key] = watched(key, lambda number, side=side: side.put(keys_of[number], ids))
            gets[key] = lambda _, side=side: side.get((last, ids))
            fours[key] = lambda _, side=side: side.get(*quarters)
        if not busy:
            puts["raw"] = lambda number: raw.move(os.pwritev, nbytes, number % SLAB_JOBS * nbytes)
            gets["raw"] = lambda _: raw.move(os.preadv, nbytes, 0)
        empty = sides["fs"].empty if "fs" in sides else lambda: None
        put = interleave(puts, self.rounds, empty)
        for side in sides.values():
            side.put(last, ids)
        get, four = interleave(gets, self.rounds), interleave(fours, self.rounds)
        if not np.array_equal(region.array, before):
            raise RuntimeError("the bytes read differ from those stored")
        if spinner is not None:
            yield from self.busy_rows(put, get, spinner)
        else:
            yield from self.quiet_rows(name, nbytes, put, get, four)
        for side in (*sides.values(), raw):
            side.close()
        self.clear()

    def quiet_rows(
        self,
        name: str,
        nbytes: int,
        put: dict[str, float],
        get: dict[str, float],
        four: dict[str, float],
    ) -> Iterator[Row]:
        if "fs" in put:
            must = {"160 KiB": 8, "1 MiB": 2.5, "5 MiB": 1.4}[name]
            yield Row(f"put {name}, fs / ours", put["fs"] / put["ours"], must)
            must_get = None if name == "5 MiB" else 1.15
            yield Row(f"get {name}, one job, fs / ours", get["fs"] / get["ours"], must_get)
            yield Row(f"get {name}, four jobs, fs / ours", four["fs"] / four["ours"], 0.95)
        for op, times in (("put", put), ("get", get)):
            yield Row(f"{op} {name}, raw / ours", times["raw"] / times["ours"], 0.9)
            yield Row(f"{op} {name}, ours", nbytes / times["ours"] / 1e9, unit="GB/s")

    def busy_rows(
        self, put: dict[str, float], get: dict[str, float], spinner: Spinner
    ) -> Iterator[Row]:
        shares = spinner.shares()
        spinner.stop()
        if "fs" not in put:
            return
        yield Row("put 160 KiB beside a busy thread, fs / ours", put["fs"] / put["ours"], 8)
        yield Row("get 160 KiB beside a busy thread, fs / ours", get["fs"] / get["ours"], 1.5)
        yield Row("busy thread during puts, of idle, ours", shares["ours"], unit="")
        yield Row("busy thread during puts, of idle, fs", shares["fs"], unit="")
        yield Row("busy thread during puts, ours / fs", shares["ours"] / shares["fs"], 2)

    def busy(self) -> Iterator[Row]:
        """Compare puts and gets beside a busy thread."""
        yield from self.transfers(busy=True)

    def memory(self) -> Iterator[Row]:
        """Compare the memory tier and a staged slab with memcpy."""
        block_bytes, count = SIZES["1 MiB"]
        region, target = self.region(count, block_bytes), np.empty(block_bytes * count, np.uint8)
        namespace = Namespace("benchmark", block_bytes)
        tier = Ours(MemoryTier(2 * count * block_bytes, threads=2, namespace=namespace), region)
        staged = self.slab(region, SLAB_JOBS * count, staged=True)
        direct = self.slab(region, SLAB_JOBS * count)
        ids = np.arange(count)
        keys_of = [make_keys(count * number, count) for number in range(self.rounds + 2)]
        puts = interleave(
            {
                "memory": lambda number: tier.put(keys_of[number], ids),
                "staged": lambda number: staged.put(keys_of[number], ids),
                "direct": lambda number: direct.put(keys_of[number], ids),
                "memcpy": lambda _: np.copyto(target, region.array),
            },
            self.rounds,
        )
        while (staged.tier.lookup(keys_of[-1]) != State.HIT).any():  # a staged put ends before that
            staged.tier.wait([], 0)
        gets = interleave(
            {
                "memory": lambda _: tier.get((keys_of[-1], ids)),
                "staged": lambda _: staged.get((keys_of[-1], ids)),
                "direct": lambda _: direct.get((keys_of[-1], ids)),
                "memcpy": lambda _: np.copyto(target, region.array),
            },
            self.rounds,
        )
        for op, times in (("put", puts), ("get", gets)):
            yield Row(f"{op} 1 MiB, memory tier, memcpy / ours", times["memcpy"] / times["memory"])
            yield Row(
                f"{op} 1 MiB, staged slab, direct / staged", times["direct"] / times["staged"]
            )
        for side in (tier, staged, direct):
            side.close()
        self.clear()

    def restart(self) -> Iterator[Row]:
        """Compare the time from nothing to 64 blocks of 1 MiB in memory, after a restart."""
        if FileSystemTierManager is None:
            return
        block_bytes, count = SIZES["1 MiB"]
        region = self.region(count, block_bytes)
        keys, ids = make_keys(0, count), np.arange(count)
        slab_path, fs_path = self.fresh(), self.fresh()
        namespace = Namespace("benchmark", block_bytes)
        capacity = 1000 * block_bytes

        def open_slab() -> Ours:
            return Ours(FileTier(slab_path, capacity, namespace=namespace), region)

        for side in (open_slab(), Fs(fs_path, region)):
            side.put(keys, ids)
            side.close()
        opened: list[Any] = []

        def ours(_: int) -> None:
            side = open_slab()
            opened.append(side)
            if (side.tier.lookup(keys) != State.HIT).any():
                raise RuntimeError("the slab is cold")
            side.get((keys, ids))

        def fs(_: int) -> None:
            side = Fs(fs_path, region)
            opened.append(side)
            if not all(side.find(key) for key in keys):
                raise RuntimeError("fs is cold")
            side.get((keys, ids))

        def close() -> None:
            while opened:
                opened.pop().close()

        times = interleave({"ours": ours, "fs": fs}, max(3, self.rounds // 2), close)
        ratio = times["ours"] / times["fs"]
        yield Row("restart to 64 x 1 MiB in memory, ours / fs", ratio, 0.75, at_most=True)
        yield Row("restart to 64 x 1 MiB in memory, ours", times["ours"] * 1000, unit="ms")
        self.clear()

    def open(self) -> Iterator[Row]:
        """Compare opening 100,000 blocks with a walk over as many files of ``fs``."""
        count, block_bytes = 100_000, 4 * KIB
        region = self.region(1000, block_bytes)
        path, namespace = self.fresh(), Namespace("benchmark", block_bytes)
        keys, ids = make_keys(0, count), np.arange(1000)

        def open_slab() -> FileTier:
            return FileTier(path, count * block_bytes, namespace=namespace)

        side = Ours(open_slab(), region)
        for start in range(0, count, 1000):
            side.put(keys[start : start + 1000], ids)
        side.close()
        files = self.fresh()
        for key in keys:
            name = key[:32].hex()
            folder = files / name[:3] / f"{name[3:5]}_g0"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.bin").touch()

        opened: list[FileTier] = []

        def ours(_: int) -> None:
            opened.append(open_slab())
            if opened[-1].num_restored != count:
                raise RuntimeError("blocks are missing")

        def walk(_: int) -> None:
            found = sum(len(names) for _, _, names in os.walk(files))
            if found != count:
                raise RuntimeError("files are missing")

        def close() -> None:
            while opened:
                opened.pop().close()

        times = interleave({"ours": ours, "walk": walk}, max(3, self.rounds // 2), close)
        ratio = times["ours"] / times["walk"]
        yield Row("open 100,000 blocks, ours / a walk over fs", ratio, 0.15, at_most=True)
        yield Row("open 100,000 blocks, ours", times["ours"] * 1000, unit="ms")
        self.clear()

    def lookups(self) -> Iterator[Row]:
        """Compare lookups of stored keys, each key for the first time in its request.

        ``fs`` answers the first call with RETRY and asks its files meanwhile; the calls are timed,
        the engine's step between them is not.
        """
        block_bytes, count = 4 * KIB, 10_000
        region = self.region(1000, block_bytes)
        ours = self.slab(region, count)
        keys = make_keys(0, count)
        for start in range(0, count, 1000):
            ours.put(keys[start : start + 1000], np.arange(1000))
        asked = make_keys(0, 1000)
        state, together = ours.tier.state, ours.tier.lookup
        times: dict[str, list[float]] = {"one by one": [], "together": [], "fs": []}
        fs = None
        if FileSystemTierManager is not None:
            fs = Fs(self.fresh(), region)
            fs.put(asked, np.arange(1000))
        for number in range(10 * self.rounds):
            times["one by one"].append(clock(lambda: [state(key) for key in asked]))
            times["together"].append(clock(lambda: together(asked)))
            if fs is not None:
                times["fs"].append(fs.time_of_lookups(asked, number))
        for name in ("one by one", "together"):
            ours_s = statistics.median(times[name])
            yield Row(f"lookup of a key, {name}", ours_s * 1e6 / len(asked), unit="us")
            if fs is not None:
                ratio = ours_s / statistics.median(times["fs"])
                yield Row(f"lookup of a key, {name}, ours / fs", ratio, 0.5, at_most=True)
        ours.close()
        if fs is not None:
            fs.close()
        self.clear()

    def sums(self) -> Iterator[Row]:
        """Compare XXH3-64 with the ``xxhash`` package, in one thread."""
        try:
            import xxhash

            from kvoffload._core.io import xxh3_64
        except ImportError:
            return
        data = memoryview(np.random.default_rng(0).bytes(64 * MIB))
        sizes = {"4 KiB": 4 * KIB, "160 KiB": 160 * KIB, "1 MiB": MIB, "64 MiB": 64 * MIB}
        for name, nbytes in sizes.items():
            pieces = [data[at : at + nbytes] for at in range(0, 16 * MIB, nbytes)]
            times = interleave(
                {
                    "ours": lambda _, pieces=pieces: [xxh3_64(piece, 1) for piece in pieces],
                    "package": lambda _, pieces=pieces: [
                        xxhash.xxh3_64_intdigest(piece, 1) for piece in pieces
                    ],
                },
                10 * self.rounds,
            )
            ratio = times["package"] / times["ours"]
            yield Row(f"XXH3-64 of {name}, xxhash / ours", ratio, 0.5)
            yield Row(
                f"XXH3-64 of {name}, ours",
                sum(map(len, pieces)) / times["ours"] / 1e9,
                unit="GB/s",
            )

    def clear(self) -> None:
        """Remove the files of a group."""
        for path in self.folder.iterdir():
            shutil.rmtree(path)


class Spinner:
    """A thread that counts in Python, like a busy scheduler."""

    def __init__(self) -> None:
        self.count = 0
        self.running = True
        self.rates: dict[str, list[float]] = {"idle": [], "ours": [], "fs": []}
        self.thread = threading.Thread(target=self.spin, daemon=True)
        self.thread.start()

    def spin(self) -> None:
        while self.running:
            self.count += 1

    def measure(self, name: str, call: Callable[[], None]) -> None:
        start, before = time.perf_counter(), self.count
        call()
        self.rates[name].append((self.count - before) / (time.perf_counter() - start))

    def shares(self) -> dict[str, float]:
        """Return the rate beside each side, as a share of the idle rate."""
        for _ in range(20):
            self.measure("idle", lambda: time.sleep(0.02))
        rates = {name: statistics.median(found) for name, found in self.rates.items() if found}
        return {name: rate / rates["idle"] for name, rate in rates.items()}

    def stop(self) -> None:
        self.running = False
        self.thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--rows", default="", help="only groups whose name matches this pattern")
    parser.add_argument(
        "--switch-interval",
        type=float,
        default=sys.getswitchinterval(),
        help="seconds after which a busy thread releases the interpreter's lock",
    )
    parser.add_argument("--folder", help="where to write; by default a temporary folder")
    chosen = parser.parse_args()
    sys.setswitchinterval(chosen.switch_interval)
    if FileSystemTierManager is None:
        print("no vLLM: rows against its fs tier are left out", file=sys.stderr)
    elif not fs_io._HAS_FSIO_C:
        print("note: fs runs without its C extension", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kvoffload-tiers-", dir=chosen.folder) as folder:
        bench = Bench(Path(folder), 5 if chosen.quick else 21)
        groups = ("transfers", "busy", "memory", "restart", "open", "lookups", "sums")
        for name in groups:
            if not re.search(chosen.rows, name):
                continue
            for row in getattr(bench, name)():
                print(f"{row.name:58} {row.value:8.2f} {row.unit:4} {row.verdict()}", flush=True)


if __name__ == "__main__":
    main()
