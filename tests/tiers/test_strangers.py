"""What strangers leave on a shared directory, and what users put in a namespace: made up at random.

Whatever lies there, a block that is served has the bytes that were stored under its key, in its
namespace, since the last `forget`; calls end with a status, not an exception; and nothing outside
the directory is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.testing.tiers import block_bytes_of, run
from kvoffload.tiers import DirectoryTier, Namespace, Region, Status
from kvoffload.tiers.seal import xxh3_64
from tests.fuzz.scratch import scratch
from tests.tiers.inside import ask_anew, doubt, number_of, settle
from tests.tiers.seals import Seal

BLOCK = 4096
OURS, OTHERS = Namespace("ours", BLOCK), Namespace("others", BLOCK)
KEYS = [b"a", b"key of sixteen b", b"k" * 40, b"\0"]
TIMES = st.sampled_from([0, -1, 1, 2**31, 2**34, 2**40, -(2**40)])
"""Times of change, seconds; from 2262 on, nanoseconds of them have more than 63 bits."""
NAMES = ("namespace.json", "0" * 16, "sweep.lock", "x.tmp", "f" * 16, "strange")


def data_of(key: bytes, namespace: Namespace, generation: int = 0) -> bytes:
    return block_bytes_of(namespace.model.encode() + bytes([generation]) + key, BLOCK)


class Engine:
    """An engine with a tier in the directory."""

    def __init__(self, path: Path, namespace: Namespace = OURS) -> None:
        self.namespace = namespace
        self.tier = DirectoryTier(
            path, 1024 * BLOCK, threads=1, namespace=namespace, ack="stored", sweep_s=1e6
        )
        self.region = Region.allocate(len(KEYS), BLOCK)
        self.tier.attach(self.region)

    def put(self, generation: int = 0) -> None:
        for place, key in enumerate(KEYS):
            self.region.write(place, data_of(key, self.namespace, generation))
        run(self.tier, self.tier.put(KEYS, range(len(KEYS))))

    def get(self, generation: int = 0) -> list[Status]:
        self.tier.health(reset=True)
        ask_anew(self.tier)
        doubt(self.tier)
        self.region.array[:] = 0xA5
        done = run(self.tier, self.tier.get(KEYS, range(len(KEYS))))
        settle(self.tier)  # what is corrupt is dropped behind a job
        statuses = [Status(status) for status in done.status.tolist()]
        for place, (key, status) in enumerate(zip(KEYS, statuses, strict=True)):
            if status == Status.OK:
                stored = data_of(key, self.namespace, generation)
                assert self.region.read(place) == stored, f"WRONG BYTES under {key!r}"
        return statuses

    def sweep(self) -> None:
        with contextlib.suppress(OSError):
            self.tier.sweep()


class Act(NamedTuple):
    """What a stranger does next; all is drawn at once, whatever there is."""

    kind: int
    place: int
    data: bytes
    size: int
    time: int
    bit: int


DRAWN = st.builds(
    Act,
    st.integers(0, 8),
    st.integers(0, 63),
    st.binary(max_size=80),
    st.sampled_from([0, 1, 4096, 8192, 2**20]),
    TIMES,
    st.integers(0, 2**16),
)
STEPS = st.sampled_from(["get", "put", "sweep", "forget", "open"])


class Stranger:
    """Who writes to the folder of a namespace, as the draws say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outside = folder.parent.parent / "outside"
        self.drawn: Act
        self.number = 0  # of the generation that is attacked

    def clear(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def overwrite(self, path: Path) -> None:
        self.clear(path)
        path.write_bytes(self.drawn.data)

    def link(self, path: Path) -> None:
        self.clear(path)
        target = (self.outside, self.outside / "precious", path)[self.drawn.bit % 3]
        path.symlink_to(target)

    def pipe(self, path: Path) -> None:
        self.clear(path)
        os.mkfifo(path)

    def make_folder(self, path: Path) -> None:
        self.clear(path)
        (path / "deep").mkdir(parents=True)

    def enlarge(self, path: Path) -> None:
        if path.is_file() and not path.is_symlink():
            os.truncate(path, self.drawn.size)

    def date(self, path: Path) -> None:
        if path.exists() and not path.is_symlink():
            with contextlib.suppress(OSError, OverflowError):
                os.utime(path, (0, self.drawn.time))

    def flip(self, path: Path) -> None:
        if path.is_file() and not path.is_symlink() and 0 < path.stat().st_size <= 2**16:
            data = bytearray(path.read_bytes())
            data[self.drawn.bit // 8 % len(data)] ^= 1 << self.drawn.bit % 8
            path.write_bytes(data)

    def plant_others(self, path: Path) -> None:
        """Put sealed blocks of another namespace where ours would lie."""
        with contextlib.suppress(OSError):
            for key in KEYS:
                block = data_of(key, OTHERS)
                place = self.folder / f"{self.number:016x}" / f"{xxh3_64(key) & 0xFF:02x}"
                if not Path(os.path.realpath(place)).is_relative_to(self.folder.resolve()):
                    return  # an earlier act has put a link there
                place.mkdir(parents=True, exist_ok=True)
                seal = Seal.of(OTHERS.fingerprint, key, block).pack(self.number)
                (place / f"{key.hex()}.kv").write_bytes((block + seal).ljust(2 * BLOCK, b"\0"))

    def act(self, drawn: Act) -> None:
        """Do one thing to what is there or a tier would look for; some the system refuses."""
        self.drawn = drawn
        with contextlib.suppress(OSError):
            known = [*(self.folder / name for name in NAMES), *sorted(self.folder.rglob("*"))]
            path = known[drawn.place % len(known)]
            if path.parent.resolve().is_relative_to(self.folder.resolve()):
                ACTS[drawn.kind](self, path)


ACTS = (
    Stranger.overwrite,
    Stranger.clear,
    Stranger.link,
    Stranger.pipe,
    Stranger.make_folder,
    Stranger.enlarge,
    Stranger.date,
    Stranger.flip,
    Stranger.plant_others,
)


@given(acts=st.lists(st.tuples(DRAWN, STEPS), min_size=1, max_size=8))
def test_whatever_lies_in_a_directory_no_wrong_block_is_served(acts: list[tuple[Act, str]]) -> None:
    with scratch() as name:
        root = Path(name).resolve()
        outside = root / "outside"
        outside.mkdir()
        (outside / "precious").write_bytes(b"precious")
        with contextlib.ExitStack() as closing:
            ours, others = Engine(root / "kv"), Engine(root / "kv", OTHERS)
            closing.enter_context(ours.tier)
            closing.enter_context(others.tier)
            ours.put()
            others.put()
            assert ours.get() == others.get() == [Status.OK] * len(KEYS)
            stranger = Stranger(ours.tier.folder)
            generation = 0
            for drawn, step in acts:
                stranger.act(drawn)
                if step == "put":
                    ours.put(generation)
                elif step == "sweep":
                    ours.sweep()
                elif step == "forget":
                    generation += 1
                    assert ours.tier.forget(f"step {generation}")
                    stranger.number = number_of(ours.tier)
                elif step == "open":
                    late = closing.enter_context(Engine(root / "kv").tier)
                    late.close()
                ours.get(generation)
            assert others.get() == [Status.OK] * len(KEYS), "another namespace is not concerned"
        assert [path.name for path in outside.iterdir()] == ["precious"]
        assert (outside / "precious").read_bytes() == b"precious"
        assert sorted(path.name for path in root.iterdir()) == ["kv", "outside"]


def test_blocks_of_the_far_future_are_swept_like_others(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path, 2 * BLOCK, threads=1, namespace=OURS, sweep_s=1e6)
    with tier:
        engine = Engine(tmp_path)  # with room for more, so that it does not sweep
        with engine.tier:
            engine.put()
        blocks = sorted(tier.folder.rglob("*.kv"))
        for block, seconds in zip(blocks, (2**34, -(2**34), 2**33, 1), strict=True):
            os.utime(block, (0, seconds))
        assert tier.sweep() == 2
        assert len(list(tier.folder.rglob("*.kv"))) == 2


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from([b"bytes", {1}, "\ud800", "x" * 5000, -0.0, 1, True, 1.0]),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.thorough
@given(left=PLAIN, right=PLAIN, field=st.sampled_from(["weights", "layout", "groups", "parallel"]))
def test_a_namespace_is_refused_or_equal_where_its_fingerprint_is(
    left: object, right: object, field: str
) -> None:
    made = []
    for value in (left, right, left):
        try:
            made.append(Namespace("model", BLOCK, **{field: value}))
        except (TypeError, ValueError) as error:
            said = str(error)
            assert said.startswith(field), said
            assert said.isprintable(), said
            assert len(said) < 600, said
    for one in made:
        assert json.loads(one.json)["block_bytes"] == BLOCK
        for other in made:
            same = one.fingerprint == other.fingerprint
            assert (one == other) == same == (one.json == other.json)
            assert not same or hash(one) == hash(other)
