"""What constructors, calls, addresses and options of tiers refuse, in the words of the caller."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffload import CPUOffloadingManager
from kvoffload._sizes import parse_size
from kvoffload.testing.tiers import FaultyTier, run
from kvoffload.tiers import (
    DirectoryTier,
    FileTier,
    MemoryTier,
    Namespace,
    ObjectTier,
    RedisTier,
    Region,
    RemoteTier,
    Tier,
    TieredStore,
    TierError,
    TierOptions,
    open_tier,
    read_options,
    weights_identity,
)
from tests.tiers.test_remote_parts import DictStore

pytestmark = pytest.mark.fast

BLOCK = 4096
NAMESPACE = Namespace("model", BLOCK)
KINDS = "url must start with one of az, dir, gs, memory"
NAME = "generation must be at most 64 printable characters"
SLAB = "slab:/nonexistent?capacity=1MB"


def memory(capacity: int | str = 8192, *arguments: object, **options: object) -> MemoryTier:
    return MemoryTier(capacity, *arguments, **{"namespace": NAMESPACE, **options})


def opened() -> Tier:
    """Return a tier with a region of eight blocks."""
    tier = memory()
    tier.attach(Region.allocate(8, BLOCK))
    return tier


def faulty() -> FaultyTier:
    return FaultyTier(8192, namespace=NAMESPACE)


def store(write: object = "through", tiers: object = (), **change: object) -> TieredStore:
    made = {"region": Region.allocate(8, BLOCK), "manager": CPUOffloadingManager(16, 8), **change}
    return TieredStore(made.pop("region"), made.pop("manager"), tiers, write, **made)


def used() -> CPUOffloadingManager:
    manager = CPUOffloadingManager(16, 8)
    manager.prepare_store([b"k"])
    return manager


def parts(*given: object, nbytes: int = 15) -> Region:
    return Region.of_parts(bytearray(nbytes), list(given), 3)


def namespace(**fields: object) -> Namespace:
    return Namespace(**{"model": "model", "block_bytes": BLOCK, **fields})


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth % 2 else depth and {"in": nested(depth - 1)}


ADDRESSES = [
    *((url, KINDS) for url in ("", "/nvme/kv", "tape:/dev/st0")),
    ("slab:?capacity=1MB", "a slab must have a folder"),
    ("slab:/nonexistent", "option capacity must be given"),
    ("slab:/nonexistent?capacity=lots", "option capacity must be bytes"),
    (f"{SLAB}&place=2", "option 'place' must be one of capacity"),
    (f"{SLAB}&capacity=2MB", "option 'capacity' must be given once"),
    ("s3://bucket?endpoint=http://host", "endpoint must begin with https: unless http is yes"),
    ("slab://kv?capacity=1MB", "a folder must be written as slab:kv or slab:/kv, got slab://"),
    ("slab:/nonexistent?capacity", "options must read option=value"),
    (f"{SLAB}&threads=two", "option threads must be a whole number"),
    (f"{SLAB}&staged=maybe", "option staged must be yes or no, got 'maybe'"),
    (f"{SLAB}&ack=never", "ack must be 'copied' or 'stored'"),
    ("slab:/nonexistent?capacity=4095", "capacity_bytes must be >= 4096, got 4095"),
    (f"{SLAB}&policy=best", "url: policy must be one of"),
    ("memory:/there?capacity=1MB", "memory must have no place"),
    ("dir:?capacity=1MB", "a directory must be given"),
    ("dir:/nonexistent", "option capacity must be given"),
    ("dir:/nonexistent?capacity=1MB&namespace=lru", "option 'namespace' must be one of"),
    ("dir:/nonexistent?capacity=1MB&sweep=0", "sweep_s must be a number > 0"),
    ("dir:/nonexistent?capacity=4095", "capacity_bytes must be >= 4096, got 4095"),
    ("redis:host", "^url must read redis://host"),
    ("redis://host/x", "^url must have a database number as its path, as in /0, got '/x'$"),
    (
        "rediss://host?ca=/nonexistent",
        "^url: option ca must be a file of certificates, got '/nonexistent'$",
    ),
    ("redis://host/0/1", "number as its path, as in /0, got '/0/1'$"),
    ("rediss://host/-1", "number as its path, as in /0, got '/-1'$"),
    ("redis://host/1234567890", "number as its path, as in /0, got '/1234567890'$"),
    ("redis://host?scheme=1MB", "option 'scheme' must be one of"),
    ("s3:bucket", "^url must begin with .* name a bucket"),
]

VALUES: list[tuple[Callable[[], object], str]] = [
    # regions
    (lambda: Region(b"read-only", 3), "buffer must be writable"),
    (lambda: Region(bytearray(10), 0), "block_bytes must be >= 1, got 0"),
    (lambda: Region(bytearray(10), 11), "1 or more blocks, got 10 bytes"),
    (lambda: Region.windows(bytearray(10), 3, 0), "step must be >= 1, got 0"),
    (lambda: Region.windows(bytearray(10), 0, 3), "block_bytes must be >= 1"),
    (lambda: Region.windows(bytearray(10), 11, 3), "1 or more blocks"),
    (lambda: Region.windows(b"read-only", 3, 1), "buffer must be writable"),
    (lambda: Region(np.zeros((4, 4), np.uint8)[:, ::2], 2), "C-contiguous"),
    (lambda: Region.allocate(0, 4096), "num_blocks must be >= 1, got 0"),
    (lambda: Region.allocate(1, 2**32), "block_bytes must be <= 4294967295"),
    (lambda: Region(bytearray(8), 4).read(2), "block_id must be <= 1, got 2"),
    (lambda: Region(bytearray(8), 4).write(0, b"abc"), "have 4 bytes, got 3"),
    (parts, "parts must not be empty"),
    (lambda: parts((0, 5)), r"parts\[0\] must have 3 numbers, got \(0, 5\)"),
    (lambda: parts((0, 2, 3)), r"parts\[0\] stride must be >= 3, got 2"),
    (lambda: parts((0, 5, 3), (2, 5, 2)), r"parts\[0\] and parts\[1\] must not overlap"),
    (lambda: parts((-1, 5, 3)), r"parts\[0\] offset must be >= 0, got -1"),
    (lambda: parts((0, 6, 5)), "buffer must hold 3 or more blocks, got 15 bytes, 2 blocks"),
    # namespaces and generations
    (lambda: namespace(block_bytes=0), "block_bytes must be >= 1, got 0"),
    (lambda: namespace(hash_seed=math.nan), "hash_seed must be finite, got nan"),
    (lambda: namespace(layout=2**4096), "whole numbers of at most 4096 bits"),
    (lambda: namespace(layout=nested(9)), "not be nested more than 8 deep"),
    *((lambda name=name: open_tier("memory:?capacity=1MB", NAMESPACE, name), NAME)
      for name in ("x" * 65, "two\nlines", "\ud800")),
    (lambda: memory().forget("x" * 65), NAME),
    (lambda: open_tier("memory:?capacity=1MB&generation=step%205", NAMESPACE, "step 5"),
     "generation must be given once"),
    # options
    (lambda: TierOptions(threads=0), "^threads must be >= 1, got 0$"),
    (lambda: TierOptions(threads=1025), "^threads must be <= 1024, got 1025$"),
    (lambda: TierOptions(staging_bytes=-1), "^staging_bytes must be >= 0, got -1$"),
    (lambda: TierOptions(ack="sent"), "^ack must be 'copied' or 'stored', got 'sent'$"),
    (lambda: TierOptions(max_queued_bytes=-1), "^max_queued_bytes must be >= 0, got -1$"),
    (lambda: TierOptions(generation="a\nb"), rf"^{NAME}, got 'a\\nb'$"),
    (lambda: read_options({"thread": "8"}), "option 'thread' must be one of threads, queue, name"),
    (lambda: read_options({"staging": "8 parsecs"}),
     "option staging must be bytes, as 4096, .*got '8 parsecs'"),
    *((lambda size=size: parse_size(size), "must be bytes")
      for size in ("", "-1", "1e9", "5 parsecs", "NaN", "1.2.3", "9" * 30)),
    # tiers
    *((lambda kind=kind: kind("a\0b", 8192, namespace=NAMESPACE),
       "^path must not have a null character, got ") for kind in (FileTier, DirectoryTier)),
    (lambda: memory("40K"), "^capacity_bytes must be bytes, as 4096, .*got '40K'"),
    (lambda: memory(max_queued_bytes="much"), "^max_queued_bytes must be bytes, as .*got 'much'"),
    (lambda: memory("1000TB"), r"^capacity_bytes / block bytes must be <= 21474"),
    (lambda: opened().get([b"1", b"2", b"3"], [5, 1, 5]), r"^ids must be distinct, got 5 twice$"),
    *((lambda value=value: opened().put([b"2"], [1], deadline_s=value), "^deadline_s must be > 0")
      for value in (-(10**400), -math.inf, math.nan)),
    *((lambda value=value: opened().wait([], value), "^timeout_s must be >= 0, got ")
      for value in (-(10**400), -math.inf, math.nan)),
    (lambda: faulty().fail("write", 1), "op must be 'put' or 'get', got 'write'"),
    (lambda: faulty().fail("put", -1), "count must be >= 0, got -1"),
    (lambda: faulty().delay(-0.5), "seconds must be >= 0, got -0.5"),
    # a store
    (lambda: store("back"), "write must be 'through' or 'demote', got 'back'"),
    (lambda: store(region=Region.allocate(7, BLOCK)), "8 or more blocks, got 7"),
    (lambda: store("demote"), "9 or more blocks, got 8"),
    (lambda: store(manager=used()), "manager must be empty, got 1 blocks"),
    (lambda: store(tiers=[tier := memory(), tier]), "tiers must be distinct, got .MemoryTier"),
    (lambda: store().wait(-1), "timeout_s must be >= 0, got -1"),
    (lambda: store().forget("new", timeout_s=-1), "timeout_s must be >= 0, got -1"),
]  # fmt: skip

TYPES: list[tuple[Callable[[], object], str]] = [
    (lambda: Region(bytearray(10), True), "must be an integer, got True"),
    (lambda: Region(5, 11), "buffer must be memory, such as bytes, got 5"),
    (lambda: Region(bytearray(8), 4).write(0, "abcd"), "data must be memory"),
    (lambda: Region.of_parts(bytearray(10), 5), "parts must be iterable, got 5"),
    (lambda: namespace(weights=object()), "weights must hold text, numbers"),
    (lambda: namespace(groups=[{1: 2}]), r"groups\[0\] must have text as keys, got 1"),
    (lambda: namespace(salt=b"bytes"), "salt must hold text"),
    (lambda: namespace(tokens_per_block="16"), "tokens_per_block must be an integer, got '16'"),
    (lambda: weights_identity(3), "source must be a path or a name, got 3"),
    (lambda: TierOptions(threads=True), "^threads must be an integer, got True$"),
    (lambda: TierOptions(enable_events=1), "^enable_events must be True or False, got 1$"),
    (lambda: TierOptions(max_queued_bytes=0.5), "^max_queued_bytes must be an integer, got 0.5$"),
    (lambda: TierOptions(name=5), "^name must be text, got 5$"),
    (lambda: TierOptions(generation=5), "^generation must be text, got 5$"),
    (lambda: read_options(3), "^options must be a mapping, got 3$"),
    (lambda: read_options({"threads": 3}), "^option threads must be text, got 3$"),
    *((lambda kind=kind, path=path: kind(path, 8192, namespace=NAMESPACE),
       f"^path must be the path of a directory, got {path!r}")
      for kind in (FileTier, DirectoryTier) for path in (3, "")),
    (lambda: memory(40960.0), "^capacity_bytes must be an integer, got 4"),
    (lambda: FileTier("/nonexistent", 8192, int, namespace=NAMESPACE),
     "^policy must be a name, a CachePolicy subclass or"),
    (lambda: opened().health(reset="no"), r"^reset must be True or False, got 'no'$"),
    # one pass over an iterator would end the wait
    *((lambda jobs=jobs: opened().wait(jobs, 1), "^jobs must be a collection of jobs, got ")
      for jobs in (3, iter([1]))),
    (lambda: RemoteTier("dict"), "store must be a RemoteStore, got 'dict'"),
    *((lambda url=url, given=given: RedisTier(url, namespace=NAMESPACE, connection_options=given),
       "^connection_options must be arguments of redis.Connection$")
      for url, given in (("redis://:a@b", {"colour": "red"}), ("redis://b", {"port": "s3cr3t"}),
                         ("rediss://b", {"ssl_cert_reqs": "s3cr3t"}))),
    *((lambda kind=kind, url=url, name=name: kind(url, namespace=NAMESPACE, **{name: ["s3cr3t"]}),
       f"^{name} must be a mapping, got list$")
      for kind, url, name in ((RedisTier, "redis://b", "connection_options"),
                              (ObjectTier, "s3://bucket", "config"),
                              (ObjectTier, "s3://bucket", "client_options"))),
    (lambda: DictStore("model"), "namespace must be a Namespace, got 'model'"),
    (lambda: store(manager=object()), "manager must be a manager"),
    (lambda: store(region=bytearray(8)), "region must be a Region, got bytearray"),
    (lambda: store(promote=1), "promote must be True or False, got 1"),
    *((lambda given=given: store(tiers=given), "tiers must be a sequence of tiers, got 3")
      for given in (3, [3])),
    (lambda: store().forget(5), "generation must be text, got 5"),
    (lambda: open_tier(b"redis://:password@h", NAMESPACE), "^url must be text, got bytes$"),
]  # fmt: skip

CASES = [
    *((lambda url=url: open_tier(url, NAMESPACE), ValueError, said) for url, said in ADDRESSES),
    *((call, ValueError, said) for call, said in VALUES),
    *((call, TypeError, said) for call, said in TYPES),
    (lambda: Region.allocate(2**40, 2**31), MemoryError, "no memory for"),
]


@pytest.mark.parametrize(("call", "error", "said"), CASES)
def test_what_is_wrong_is_refused(
    call: Callable[[], object], error: type[Exception], said: str
) -> None:
    if any(
        word in said for word in ("redis", "bucket", "number as its path", "connection_options")
    ):
        pytest.importorskip("redis", reason="the tier needs the redis extra")
        pytest.importorskip("obstore", reason="the tier needs the objects extra")
    with pytest.raises(error, match=said):
        call()
    assert not Path("/nonexistent").exists()


def test_a_path_is_named_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    slab = Path("folder", NAMESPACE.fingerprint.hex())
    FileTier("folder", 8192, namespace=NAMESPACE).close()
    (slab / "blocks.dat").unlink()
    (slab / "blocks.dat").mkdir()
    for path, said in (
        ("file", r"^file/[0-9a-f]{32}: Not a directory$"),
        ("x" * 300, r"^x+(/[0-9a-f]{32})?: File name too long$"),  # Python 3.14 meets x first
        ("folder", f"^{slab}/blocks.dat: Is a directory$"),
    ):
        with pytest.raises(TierError, match=said):
            FileTier(path, 8192, namespace=NAMESPACE)


def test_numbers_of_any_size() -> None:
    assert namespace(layout=2**4096 - 1) != namespace(layout=nested(8))
    some = namespace(block_bytes=np.int64(BLOCK), groups=2, tokens_per_block=np.int64(16))
    assert "capacity_tokens" not in memory(namespace=some).stats()
    sizes = [parse_size(size) for size in ("4096", "2TB", "1.5 GiB")]
    assert sizes == [4096, 2 * 10**12, 3 * 2**29]
    with opened() as tier:
        run(tier, tier.put([b"1"], [0], deadline_s=10**400))
        assert tier.wait([], 10**400)
        assert tier.close(10**400)
