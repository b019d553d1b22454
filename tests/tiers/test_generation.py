"""Generations: a tier has the blocks of its own name for the weights, and no others.

Each block of these engines says which weights computed it. Whatever is pushed, reset, stored and
loaded by whom: no engine is served a block of other weights than it has.
"""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload import CPUOffloadingManager
from kvoffload.testing.tiers import PATIENCE_S, run
from kvoffload.tiers import (
    DirectoryTier,
    FileTier,
    MemoryTier,
    Namespace,
    ObjectTier,
    RedisTier,
    Region,
    RemoteTier,
    State,
    Status,
    Tier,
    TieredStore,
    TierOptions,
    open_tier,
)
from kvoffload.tiers.deletion import delete_blocks
from kvoffload.tiers.generation import Generation, GenerationSource
from tests.tiers.attack import report, rounds
from tests.tiers.inside import ask_anew, attached, descriptors, is_busy
from tests.tiers.servers import make_bucket, redis_server, s3_options, s3_server
from tests.tiers.test_remote_parts import DictStore

BLOCK = 4096
NAMESPACE = Namespace("weights", BLOCK)
KEYS = [b"key-%d" % number for number in range(4)]

Opener = Callable[[int, str], Tier]
"""Opens the tier of an engine with a number, and a generation."""


# -- names ---------------------------------------------------------------------------------------


def test_a_generation_is_its_name() -> None:
    assert Generation.of("") == ("", 0)
    assert Generation.of("step 5").number == Generation.of("step 5").number != 0
    assert len({Generation.random().number for _ in range(100)}) == 100
    assert Generation.of("é" * 64).name == "é" * 64


@pytest.mark.parametrize(("name", "which"), [("slots.tbl", "the table"), ("namespace.json",) * 2])
@pytest.mark.parametrize("left", [b"", b"x" * 100, b"{}", NAMESPACE.json.encode()[:-1], None])
def test_a_damaged_slab_opens_empty_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, which: str, left: bytes | None
) -> None:
    url = f"slab:{tmp_path}?capacity=1MB"
    is_cut = left is None and name == "slots.tbl"  # behind its header
    for restored in (0, 0, 2):
        with open_tier(url, NAMESPACE) as tier:
            assert tier.stats()["restored"] == restored
            attached(tier, 4)
            run(tier, tier.put(KEYS[:2], [0, 1]))
        if not caplog.messages:
            (file,) = tmp_path.rglob(name)
            cut = file.read_bytes()[: 4096 if is_cut else 1]
            file.write_bytes(cut if left is None else left)
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        f"its blocks are dropped: {which} is {'cut short' if is_cut else 'damaged'}"
    ]


def test_seals_that_are_lost_or_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_tier(url := f"slab:{tmp_path}?capacity=1MB", NAMESPACE) as tier:
        attached(tier, 4)
        run(tier, tier.put(KEYS[:3], [0, 1, 2]))
        tier.forget("other")
        tier.forget("")
        run(tier, tier.put(KEYS[2:3], [2]))  # in another slot, the first
        tier.discard(KEYS[2:3])
    (table,) = tmp_path.rglob("slots.tbl")
    with open_tier(url, NAMESPACE) as tier:
        assert tier.stats()["restored"] == 0, "a discarded block does not come back"
        attached(tier, 4)
        run(tier, tier.put(KEYS[:2], [0, 1]))
    found = bytearray(table.read_bytes())
    found[4224:4288] = found[4160:4224]  # one key twice, as after a power cut
    table.write_bytes(found)
    with open_tier(url, NAMESPACE) as tier:
        tier.discard(KEYS[1:2])
    found = table.read_bytes()
    flipped = found.replace(b"KV\1", b"KV\2")
    for damaged, restored in ((found, 1), (found[: 4096 + 2 * 64], 1), (flipped, 0)):
        table.write_bytes(damaged)
        with open_tier(url, NAMESPACE) as tier:
            assert tier.stats()["restored"] == restored
            assert tier._medium._written.all() == (damaged == flipped)  # a put clears it first
    for name in ("step 1", "", "step 1"):  # the first drops all
        open_tier(url, NAMESPACE, name).close()
    table.unlink()
    open_tier(url, NAMESPACE).close()
    assert [line.partition("dropped: ")[2] for line in caplog.messages] == [
        "the table is cut short",
        "",  # seals that are damaged
        "they are of generation '', this start has 'step 1'",
        "the table is missing",
    ]


def test_a_file_is_read_at_the_start_and_at_each_reset(tmp_path: Path, caplog) -> None:
    path = tmp_path / "generation"
    path.write_text("step 1\n")
    source = GenerationSource("", path)
    assert source.first == "step 1"
    path.write_text("  step 2  ")
    assert source.after_reset() == "step 2"
    assert "tiers have generation 'step 2' from now on, as in its file" in caplog.text
    # Empty is a file that is being written; without a name there may be blocks of old weights.
    for content in (b"\xff", b"", b" \n"):
        path.write_bytes(content)
        assert len(source.after_reset()) == 32
    path.unlink()
    os.mkfifo(path)  # which nobody writes to
    assert source.after_reset() != source.after_reset()
    path.unlink()
    path.mkdir()
    before = descriptors()
    assert source.after_reset() != source.after_reset()
    assert descriptors() == before
    assert caplog.text.count("the generation could not be read") == 7
    assert "a random name: nothing is shared" in caplog.text


def test_without_a_file_the_name_after_a_reset_is_random(tmp_path: Path) -> None:
    source = GenerationSource("step 1")
    assert source.first == "step 1"
    assert source.after_reset() != source.after_reset()
    path = tmp_path / "generation"
    with pytest.raises(FileNotFoundError, match="generation_file must be readable: No such file"):
        GenerationSource("", path)
    for text in ("a\nb", "", "\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="generation_file must have one line of 1 to 64 pri"):
            GenerationSource("", path)
    with pytest.raises(ValueError, match="generation must not be given with generation_file"):
        GenerationSource("a", path)
    with pytest.raises(TypeError, match="generation_file must be a path, got 5"):
        GenerationSource("", 5)


# -- engines and weights -------------------------------------------------------------------------


class Engine:
    """An engine with weights, and a tier for the blocks that it computes."""

    def __init__(self, number: int, opener: Opener) -> None:
        self.number = number
        self.opener = opener
        self.region = Region.allocate(2 * len(KEYS), BLOCK)
        self.restart(0, "")

    def restart(self, weights: int, generation: str) -> None:
        """Start again from a checkpoint."""
        self.weights = weights
        self.tier = self.opener(self.number, generation)
        self.tier.attach(self.region)

    def push(self, weights: int, generation: str | None) -> None:
        """Get other weights; then the caches are reset."""
        self.weights = weights
        self.tier.forget(generation)

    def data(self, key: bytes) -> bytes:
        return (key + b" by weights %d" % self.weights).ljust(BLOCK, b".")

    def put(self, keys: list[bytes]) -> None:
        for place, key in enumerate(keys):
            self.region.write(place, self.data(key))
        run(self.tier, self.tier.put(keys, range(len(keys)), PATIENCE_S))

    def get(self) -> int:
        """Load all blocks and compare what is served; return how many that is."""
        while is_busy(self.tier):
            self.tier.wait([], 0.0005)
        self.tier.poll()
        if isinstance(self.tier, RemoteTier):
            ask_anew(self.tier)
        ids = range(len(KEYS), 2 * len(KEYS))
        done = run(self.tier, self.tier.get(KEYS, ids, PATIENCE_S))
        for place, (key, status) in enumerate(zip(KEYS, done.status.tolist(), strict=True)):
            assert status in (Status.OK, Status.MISS), Status(status)
            if status == Status.OK:
                found = self.region.read(len(KEYS) + place)
                assert found == self.data(key), f"{found[:40]!r} served to weights {self.weights}"
        return done.status.tolist().count(Status.OK)


def name_of(weights: int) -> str:
    """Return what the trainer calls weights."""
    return f"step {weights}" if weights else ""


def play(opener: Opener, chance: random.Random, steps: int, is_shared: bool) -> int:
    """Let two engines do anything in any order; return how many blocks were served.

    An engine finds what either has stored under its name. A slab has the blocks of one name.
    """
    engines = [Engine(number, opener) for number in range(2)]
    stored: defaultdict[tuple[int, str], set[bytes]] = defaultdict(set)
    newest = served = 0
    try:
        for _ in range(steps):
            engine = chance.choice(engines)
            step = chance.choice(["put", "put", "get", "push", "push back", "reset", "restart"])
            keys = chance.sample(KEYS, chance.randrange(1, len(KEYS))) if step == "put" else []
            if step == "put":
                engine.put(keys)
            elif step == "push":
                newest += chance.randrange(2)
                engine.push(newest, chance.choice([name_of(newest), name_of(newest), None]))
            elif step == "push back":
                weights = chance.randrange(newest + 1)
                engine.push(weights, name_of(weights))
            elif step == "reset":
                engine.tier.forget()
            elif step == "restart":
                assert engine.tier.close(PATIENCE_S)
                weights = chance.randrange(newest + 1)
                engine.restart(weights, name_of(weights))
            place, name = engine.number * (not is_shared), engine.tier.generation
            for other in [each for each in stored if each[0] == place and each[1] != name]:
                if not is_shared:
                    del stored[other]
            stored[place, name].update(keys)
            served += (found := engine.get())
            assert found == len(stored[place, name]), step
    finally:
        for engine in engines:
            engine.tier.close(PATIENCE_S)
    return served


def in_memory() -> Opener:
    values: dict[str, bytes] = {}

    def opener(number: int, generation: str) -> Tier:
        store = DictStore(NAMESPACE)
        store.values = values
        return RemoteTier(store, TierOptions(threads=1, generation=generation))

    return opener


def in_slabs(path: Path) -> Opener:
    options = {"namespace": NAMESPACE, "threads": 1}
    return lambda number, name: FileTier(path / str(number), 8 * BLOCK, generation=name, **options)


def opener_of(kind: type[RemoteTier], *place: object, **options) -> Opener:
    """Return what opens tiers of a kind on one place."""
    options |= {"namespace": NAMESPACE, "threads": 1}
    return lambda _, generation: kind(*place, generation=generation, **options)


def in_directory(path: Path) -> Opener:
    return opener_of(DirectoryTier, path, 2**24)


def play_all(
    opener_of: Callable[[int], Opener], stated: int, seed: int, steps: int, is_shared: bool = True
) -> None:
    times = rounds(stated)
    played = [play(opener_of(n), random.Random(seed + n), steps, is_shared) for n in range(times)]
    report(f"{times} sequences of two engines, {sum(played)} blocks served")
    assert sum(played) > times


@pytest.mark.attack
def test_no_block_of_other_weights_is_served_in_memory(seed: int) -> None:
    """Stated: 10,000 sequences."""
    play_all(lambda _: in_memory(), 10_000, seed, 12)


@pytest.mark.parametrize("made", [in_slabs, in_directory])
def test_no_block_of_other_weights_is_served_from_a_disk(
    tmp_path: Path, made: Callable[[Path], Opener], seed: int
) -> None:
    is_shared = made is in_directory
    play_all(lambda number: made(tmp_path / str(number)), 100, seed, 20, is_shared)


def test_a_put_that_hangs_over_a_forget_is_the_old_generation_s() -> None:
    opener = in_memory()
    one, other = Engine(0, opener), Engine(1, opener)
    goes_on, store = threading.Event(), one.tier._medium.store.store

    def hang(*arguments: object) -> None:
        assert goes_on.wait(PATIENCE_S)
        store(*arguments)

    one.tier._medium.store.store = hang
    one.put(KEYS)
    one.push(1, "step 1")
    other.push(1, "step 1")
    goes_on.set()
    assert (one.get(), other.get()) == (0, 0)
    other.push(0, "")
    assert other.get() == 4, "it was right for the weights that it was computed with"
    for engine in (one, other):
        engine.tier.close(PATIENCE_S)


def test_a_store_s_tiers_all_get_the_same_generation(tmp_path: Path) -> None:
    tiers = [
        MemoryTier(2**20, namespace=NAMESPACE, enable_events=True),
        DirectoryTier(tmp_path, 2**20, namespace=NAMESPACE, enable_events=True),
    ]
    with TieredStore(Region.allocate(4, BLOCK), CPUOffloadingManager(1, 4), tiers) as store:
        for _ in range(2):  # the second changes nothing
            assert store.forget("step 7") is True
        for tier in tiers:
            assert [event.reason for event in tier.take_events()] == ["forgotten"]
        assert [tier.generation for tier in tiers] == ["step 7"] * 2
        assert store.forget() is True
        assert len({tier.generation for tier in tiers}) == 1
        assert tiers[0].generation != "step 7"


def test_what_was_discarded_does_not_come_back_with_its_generation(tmp_path: Path) -> None:
    """Not even if nothing could be removed before the generation changed."""
    with in_directory(tmp_path)(0, "") as tier:
        tier.discard(KEYS[:1])  # there are no threads
        tier.forget("step 1")
        attached(tier, 4)
        tier.forget("")
        assert tier.state(KEYS[0]) == State.MISS


# -- the deletion of blocks ----------------------------------------------------------------------


@pytest.fixture(
    params=["directory", *(pytest.param(k, marks=pytest.mark.servers) for k in ("redis", "s3"))]
)
def place(request, tmp_path: Path, monkeypatch) -> Iterator[tuple[Opener, str]]:
    """Give what opens tiers at a place where other things are, which stay, and its address."""
    if request.param == "directory":
        (tmp_path / "of the user").write_text("precious")
        (tmp_path / ("a" * 32)).symlink_to(tmp_path)
        yield in_directory(tmp_path), f"dir:{tmp_path}"
        assert (tmp_path / "of the user").read_text() == "precious"
        assert (tmp_path / ("a" * 32)).is_symlink()
    elif request.param == "redis":
        redis = pytest.importorskip("redis", reason="the tier needs the redis extra")
        with (
            redis_server("--maxmemory", "256mb") as server,
            redis.Redis(port=server.port) as client,
        ):
            client.set("kvoffload:of:the:user", "precious")
            url = f"redis://127.0.0.1:{server.port}"
            yield opener_of(RedisTier, url, prefix="a*b"), f"{url}?prefix=a*b"
            assert client.get("kvoffload:of:the:user") == b"precious"
    else:
        pytest.importorskip("obstore", reason="the tier needs the objects extra")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        with s3_server() as server:
            make_bucket(server)
            endpoint = f"endpoint=http://127.0.0.1:{server.port}&region=us-east-1&http=true"
            opener = opener_of(ObjectTier, "s3://blocks/kv", **s3_options(server))
            yield opener, f"s3://blocks/kv?{endpoint}"


def test_blocks_are_deleted(place: tuple[Opener, str]) -> None:
    """One generation of two, then all."""
    opener, url = place
    engine = Engine(0, opener)
    for weights in range(2):
        engine.push(weights, name_of(weights))
        engine.put(KEYS)
        assert engine.get() == 4
    assert delete_blocks(url, "nobody's") == (0, 0)
    gone = delete_blocks(url, "step 1")
    assert gone.blocks == 4
    assert 4 * BLOCK < gone.nbytes <= 8 * BLOCK
    assert engine.get() == 0
    engine.push(0, "")
    assert engine.get() == 4
    assert delete_blocks(url).blocks == 4
    assert engine.get() == 0
    engine.put(KEYS)
    assert engine.get() == 4, "the tier goes on"
    engine.tier.close(PATIENCE_S)
