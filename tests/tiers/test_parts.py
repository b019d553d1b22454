"""The parts of tiers: regions, namespaces, seals, breakers, buffers, metrics, URLs."""

import dataclasses
import itertools
import json
import os
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvoffload.testing.tiers import run
from kvoffload.tiers import (
    DirectoryTier,
    FileTier,
    MemoryTier,
    Namespace,
    Region,
    Tier,
    open_tier,
    stored_key,
    weights_identity,
)
from kvoffload.tiers.engine.breaker import Breaker
from kvoffload.tiers.options import ENTRY_POINTS
from kvoffload.tiers.seal import SEAL_BYTES, stored_keys
from tests.isolated.scripts import run_script
from tests.strategies import LETTERS
from tests.tiers.inside import Clock, attached
from tests.tiers.seals import Seal

pytestmark = pytest.mark.fast


class TestRegion:
    def test_blocks_of_one_piece(self) -> None:
        memory = bytearray(1000)
        region = Region(memory, 300)
        assert (region.num_blocks, region.block_bytes, region.nbytes) == (3, 300, 1000)
        region.write(1, b"x" * 300)
        assert memory[300:600] == b"x" * 300
        assert region.read(1) == b"x" * 300
        assert not any(region.read(0) + region.read(2))
        assert repr(region) == "Region(3 blocks of 300 bytes)"

    def test_windows_overlap(self) -> None:
        """Wherever an allocator puts an object, a block starts there."""
        memory = bytearray(range(100))
        region = Region.windows(memory, 30, 10)
        assert (region.num_blocks, region.block_bytes, region.nbytes) == (8, 30, 100)
        assert region.parts == ((0, 10, 30),)
        assert region.read(7) == memory[70:]
        region.write(2, bytes(30))
        assert region.read(1) == bytes(range(10, 20)) + bytes(20)
        assert Region.windows(memory, 100, 1).num_blocks == 1
        assert Region.windows(memory, 10, 40).num_blocks == 3
        aligned = Region.allocate(4, 4096).array
        assert Region.windows(aligned, 8192, 4096).aligned
        assert not Region.windows(aligned, 8192, 2048).aligned

    def test_allocated_memory_is_aligned(self) -> None:
        region = Region.allocate(3, 4096)
        assert region.aligned
        assert not any(region.read(2))
        assert not Region.allocate(3, 4095).aligned
        assert not Region(memoryview(bytearray(10_000))[1:], 4096).aligned

    @settings(max_examples=300)
    @given(
        st.lists(
            st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 8)),
            min_size=1,
            max_size=4,
        ),
        st.integers(1, 4),
    )
    @example([(0, 8, 4), (4, 8, 4)], 3)
    def test_blocks_are_their_pieces_of_all_parts_which_may_not_overlap(
        self, parts, num_blocks
    ) -> None:
        """Layer by layer, as engines keep them: a block is a piece of every layer."""
        places = [
            [place for offset, stride, nbytes in parts
             for place in range(offset + block * stride, offset + block * stride + nbytes)]
            for block in range(num_blocks)
        ]  # fmt: skip
        memory = bytearray(range(200))
        if len({*itertools.chain(*places)}) < len([*itertools.chain(*places)]):
            with pytest.raises(ValueError, match=r"overlap|stride"):
                Region.of_parts(memory, parts, num_blocks)
            return
        region = Region.of_parts(memory, parts, num_blocks)
        assert (region.num_blocks, region.block_bytes) == (num_blocks, len(places[0]))
        for block, own in enumerate(places):
            assert region.read(block) == bytes(own)
        region.write(num_blocks - 1, bytes(range(200 - len(places[-1]), 200)))
        new = dict(zip(places[-1], range(200 - len(places[-1]), 200), strict=True))
        assert memory == bytes(new.get(place, place) for place in range(200))


class TestNamespace:
    FULL = Namespace(
        model="model",
        block_bytes=4096,
        engine="vllm 0.33.0",
        weights=[["a.safetensors", 10, 1]],
        kv_dtype="bfloat16",
        layout="HND",
        groups=[{"tokens": 16, "layers": ["0", "1"]}],
        hash_algorithm="sha256",
        hash_seed=0,
        tokens_per_hash=16,
        tokens_per_block=256,
        parallel={"tp": 2, "rank": 0},
        salt="a",
    )

    def test_every_field_counts(self) -> None:
        other = {
            "block_bytes": 8192,
            "tokens_per_hash": 32,
            "tokens_per_block": 512,
            "hash_seed": 1,
        }
        fields = [field for field in dataclasses.fields(Namespace) if field.init]
        assert len(fields) == 13
        found = {self.FULL.fingerprint}
        for field in fields:
            changed = {field.name: other.get(field.name, "other")}
            found.add(dataclasses.replace(self.FULL, **changed).fingerprint)
        assert len(found) == 1 + len(fields)

    def test_the_fingerprint_is_that_of_the_canonical_json(self) -> None:
        text = self.FULL.json
        assert self.FULL.fingerprint == blake2b(text.encode(), digest_size=16).digest()
        fields = json.loads(text)
        assert fields["format"] == 1
        assert list(fields) == sorted(fields)
        assert ": " not in text
        assert text.isascii()

    def test_weights_are_known_by_their_files(self, tmp_path: Path) -> None:
        assert weights_identity("org/model", "abc") == "org/model@abc"
        assert weights_identity("org/model") == "org/model"
        assert weights_identity(tmp_path) == str(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "a.safetensors").write_bytes(b"12345")
        (tmp_path / "notes.txt").write_text("not part of it")
        before = weights_identity(tmp_path)
        assert [row[:2] for row in before] == [["a.safetensors", 5], ["config.json", 2]]
        Namespace("m", 4096, weights=before)

    @pytest.mark.parametrize(
        "name",
        ["m.safetensors", "m.bin", "m.pt", "m.pth", "m.gguf", "m.h5", "sub/folder/m.bin",
         "model.safetensors.index.json", "config.json"],
    )  # fmt: skip
    @pytest.mark.parametrize("size", [0, 1, 400_000, 10_000_000])
    def test_weights_replaced_in_place_are_others(self, tmp_path, name, size) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        times = path.stat()
        whole, single = weights_identity(tmp_path), weights_identity(path)
        assert len(whole) == len(single) == 1
        assert (whole[0][0], single[0][0]) == (name, path.name)
        for place in {0, size // 3, size - 1} if size else {0}:
            with path.open("r+b") as file:  # a 60th part of it changes
                file.seek(place)
                file.write(b"x" * max(1, min(size // 60, size - place)))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            assert weights_identity(tmp_path) != whole
            assert weights_identity(path) != single
            path.write_bytes(bytes(size))
        assert weights_identity(tmp_path) == whole

    def test_a_folder_that_is_no_model_s_is_refused(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("kvoffload.tiers.namespace._MAX_ENTRIES", 3)
        for number in range(4):
            (tmp_path / f"{number}.txt").touch()
        with pytest.raises(ValueError, match="source must be a model's directory, of 3 files"):
            weights_identity(tmp_path)

    def test_many_files_of_weights_are_one_row(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("kvoffload.tiers.namespace._MAX_ROWS", 2)
        (tmp_path / ".cache").mkdir()
        for number in range(3):
            (tmp_path / f"{number}.bin").write_bytes(b"weights")
            (tmp_path / f".cache/{number}.bin").write_bytes(b"not part of it")
        os.mkfifo(tmp_path / "pipe.bin")
        before = weights_identity(tmp_path)
        assert [row[:2] for row in before] == [["3 files", 21]]
        (tmp_path / "1.bin").write_bytes(b"WEIGHTS")
        assert weights_identity(tmp_path) != before


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(LETTERS, max_size=20)
    | st.sampled_from([b"bytes", {1}, "\ud800", "x" * 5000, -0.0, 1, True, 1.0]),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(LETTERS, max_size=5) | st.integers(), inner, max_size=3),
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
            made.append(Namespace("model", 4096, **{field: value}))
        except (TypeError, ValueError) as error:
            said = str(error)
            assert said.startswith(field), said
            assert said.isprintable(), said
            assert len(said) < 600, said
    for one in made:
        assert json.loads(one.json)["block_bytes"] == 4096
        for other in made:
            same = one.fingerprint == other.fingerprint
            assert (one == other) == same == (one.json == other.json)
            assert not same or hash(one) == hash(other)


class TestSeal:
    def test_the_layout_is_as_documented(self, tmp_path: Path) -> None:
        """In a slab's table; the twin of seals in the tests makes the same."""
        namespace = Namespace("m", 4096)
        with FileTier(tmp_path, 2 * 4096, namespace=namespace) as tier:
            attached(tier, 1)
            run(tier, tier.put([b"key"], [0]))
            generation = tier._jobs.generation.number
            folder = tier.folder
        with (folder / "slots.tbl").open("rb") as file:
            file.seek(4096)
            packed = file.read(SEAL_BYTES)
        assert packed[:8] == b"KV\x01\x03\x00\x10\x00\x00"
        assert packed[8:48] == b"key".ljust(40, b"\0")
        assert packed == Seal.of(namespace.fingerprint, b"key", bytes(4096)).pack(generation)

    def test_keys_are_stored_as_they_are_or_digested(self) -> None:
        for length in range(1, 41):
            assert stored_key(b"k" * length) == b"k" * length
        for key in (b"", b"k" * 41, b"k" * 1000):
            stored = stored_key(key)
            assert stored[:32] == blake2b(key, digest_size=32).digest()
            assert len(stored) == 41  # no key that is stored as it is can be the same
        keys = [b"a", b"b"]
        assert stored_keys(keys) is keys
        assert stored_keys(iter(keys)) == keys
        assert stored_keys([b"a", b""]) == [b"a", stored_key(b"")]


CORRUPT = 20 * ["7/57"]
"""Seven corrupt blocks of any 64."""


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        (3 * ["allow", *4 * ["fail"], "succeed"], "closed"),
        ([*5 * ["fail"], "refuse"], "open"),
        # one probe at a time, after 1 s and then twice as late, to 60 s
        ([*5 * ["fail"], *(step for pause in (1, 2, 4, 8, 16, 32, 60, 60, 60)
                           for step in (pause - 0.5, "refuse", 0.5, "allow", "refuse", "fail"))],
         "open"),
        ([*5 * ["fail"], 1, "allow"], "probing"),
        ([*5 * ["fail"], 1, "allow", "fail", 2, "allow", "succeed"], "closed"),
        ([*2 * [*5 * ["fail"], 1, "allow", "succeed"]], "closed"),
        # a probe that was none is taken back
        (["trip", "refuse", 1, "allow", "withdraw", "allow"], "probing"),
        # eight corrupt of 64 stop it until it is reset
        (CORRUPT, "closed"),
        ([*CORRUPT, "1/0", 1000, "succeed", "refuse"], "stopped"),
        ([*CORRUPT, "1/0", "reset", "allow"], "closed"),
    ],
)  # fmt: skip
def test_a_breaker(steps: list[str | float], state: str) -> None:
    clock = Clock()
    breaker = Breaker(clock.time)
    for step in steps:
        if not isinstance(step, str):
            clock.now += step
        elif step in ("allow", "refuse"):
            assert breaker.would_allow() == breaker.allow() == (step == "allow")
        elif "/" in step:
            breaker.count_corrupt(*map(int, step.split("/")))
        else:
            getattr(breaker, step)()
    assert breaker.state == state
    assert breaker.closed == (state == "closed")


class TestOpening:
    NAMESPACE = Namespace("model", 4096)

    def test_a_slab(self, tmp_path: Path) -> None:
        url = f"slab:{tmp_path}/kv?capacity=1MiB&policy=slru%3Fprotected%3D0.3&staged=yes"
        url += "&name=nvme&generation=step%205"
        with open_tier(url, self.NAMESPACE) as tier:
            assert isinstance(tier, FileTier)
            assert tier.folder.parent == tmp_path / "kv"
            assert tier.generation == "step 5"
            assert (tier.name, tier.capacity_bytes, tier.num_slots) == ("nvme", 2**20, 256)

    def test_a_tier_of_an_installed_package(self, tmp_path: Path, monkeypatch) -> None:
        """Pip may leave of a package a folder with its entry points."""
        folder = tmp_path / "tape_tier-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tape-tier\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntape = tape_tier:open_tape\n")
        (tmp_path / "tape_tier.py").write_text(
            "from kvoffload.tiers import MemoryTier\n"
            "def open_tape(place, namespace, **options):\n"
            "    return MemoryTier(int(options['length']), namespace=namespace, name=place)\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        with open_tier("tape:/dev/st0?length=8192", self.NAMESPACE) as tier:
            assert (tier.name, tier.capacity_bytes) == ("/dev/st0", 8192)
        with pytest.raises(
            ValueError, match=r"must start with one of .*memory, .*slab, tape and a colon"
        ):
            open_tier("drum:", self.NAMESPACE)


def test_numpy_is_all_that_is_needed() -> None:
    script = """
        import sys
        for name in ("typing_extensions", "xxhash", "hypothesis", "pytest"):
            sys.modules[name] = None
        import kvoffload.tiers, kvoffload.testing.tiers
    """
    run_script(script, environment={"KVOFFLOAD_PURE_PYTHON": "0"})


@pytest.mark.parametrize("kind", ["slab", "memory", "dir"])
def test_sizes_are_numbers_or_text_as_in_a_url(kind: str, tmp_path: Path) -> None:
    namespace = Namespace("model", 4096)

    def opened(capacity: int | str) -> Tier:
        options = {"namespace": namespace, "max_queued_bytes": "2MiB"}
        if kind == "memory":
            return MemoryTier(capacity, **options)
        return (FileTier if kind == "slab" else DirectoryTier)(tmp_path / "kv", capacity, **options)

    for capacity in ("40 KiB", "0.04096MB", 40_960):
        with opened(capacity) as tier:
            assert tier.capacity_bytes == 40_960
            assert repr(tier).startswith(f"{type(tier).__name__}(")
            assert f"name={tier.name!r})" in repr(tier)
            assert "capacity_bytes=40960, " in repr(tier)
            if kind == "slab":
                assert str(tmp_path) in repr(tier)
