"""A conformance suite for tiers, and a tier that fails on demand.

`TierConformance` holds the contract of `Tier` as tests: subclass it in a test file, implement
`open_tier`, and pytest finds the rest. `tier_machine` compares a tier with a dict, step by step, in
orders that hypothesis chooses. `FaultyTier` delays, fails, hangs and flips bits on demand.

The suite needs no package; `tier_machine` needs hypothesis.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import threading
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvoffload import CachePolicy
from kvoffload._checks import check_int
from kvoffload.errors import describe
from kvoffload.tiers.base import Done, State, Status, Tier
from kvoffload.tiers.engine.contract import WRITE
from kvoffload.tiers.engine.jobs import Jobs
from kvoffload.tiers.engine.tier import ComposedTier
from kvoffload.tiers.folder import status_of
from kvoffload.tiers.local.index import Index, Policy, check_num_slots
from kvoffload.tiers.namespace import Namespace, check_namespace
from kvoffload.tiers.native import io
from kvoffload.tiers.options import TierKeywords, TierOptions
from kvoffload.tiers.region import Region, staging_buffers
from kvoffload.tiers.seal import SEAL_BYTES, stored_key

from ._expect import equal, raises, require

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FaultyTier", "TierConformance", "tier_machine"]

PATIENCE_S = 300.0
"""Deadline of jobs, and seconds after which a test calls one that has not ended a hang."""


# -- a bad tier ----------------------------------------------------------------------------------


class _FaultyStore:
    """Blocks with their seals, by slot, behind calls that misbehave on demand."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}
        self.delay_s = 0.0
        # Errors of the next calls; `next` is atomic, and calls have threads of their own.
        self.failures: dict[str, Iterator[int]] = {"put": iter(()), "get": iter(())}
        self.running = threading.Event()
        self.running.set()

    def call(
        self, op: int, keys: list[bytes], slots: list[int], buffers: list[memoryview], **_: Any
    ) -> list[int]:
        """Read or write the one block of a call; return its status."""
        (_key,), (slot,), (buffer,) = keys, slots, buffers
        status = self._trouble("put" if op == WRITE else "get")
        if status == Status.OK and op == WRITE:
            self.values[slot] = bytes(buffer)
        elif status == Status.OK:
            buffer[:] = self.values[slot]
        return [status]

    def chore(self, kind: int, data: bytes) -> Status:  # noqa: ARG002
        """Do nothing."""
        return Status.OK

    def _trouble(self, op: str) -> Status:
        self.running.wait()
        if self.delay_s:
            time.sleep(self.delay_s)
        error = next(self.failures[op], None)
        return Status.OK if error is None else status_of(OSError(error, os.strerror(error)))


class _FaultyMedium(Index):
    """The threads of a store that misbehaves; while it hangs, it confirms no `forget`."""

    def __init__(self, jobs: Jobs, namespace: Namespace, policy: Policy, num_slots: int) -> None:
        super().__init__(jobs, namespace, policy, num_slots)
        self.store = _FaultyStore()

    def open_pool(self, region: Region) -> Any:
        """Start the threads."""
        options, namespace = self.jobs.options, self.namespace
        buffers = staging_buffers(options.staging_bytes, namespace.block_bytes + SEAL_BYTES)
        calls = io.CallStore(
            self.store,
            block_bytes=namespace.block_bytes,
            slot_bytes=buffers.block_bytes,
            fingerprint=namespace.fingerprint,
            blocks_per_call=1,
            keys_per_query=1,
        )
        return io.Pool(region, calls, options.threads, buffers, ack_copied=options.ack_copied)

    def confirm(self) -> bool:
        """Return whether the medium does not hang."""
        return self.store.running.is_set()


class FaultyTier(ComposedTier):
    """A tier in memory that behaves like a faulty server or disk, on demand.

    It is staged, as tiers on servers are. A call moves one block.

    Parameters
    ----------
    capacity_bytes : int
        Most bytes of blocks that are kept.
    policy : str, type or CachePolicy
        Which blocks stay.
    namespace : Namespace
        The meaning of the bytes.
    **keywords
        The options of `TierOptions`; by default ``threads=4``, each of which a hang can hold up,
        and ``name="faulty"``.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: str | type[CachePolicy] | CachePolicy = "lru",
        *,
        namespace: Namespace,
        **keywords: Unpack[TierKeywords],
    ) -> None:
        block_bytes = check_namespace(namespace).block_bytes
        num_slots = check_num_slots(check_int("capacity_bytes", capacity_bytes, 0), block_bytes)
        options = TierOptions.of(keywords, name="faulty", threads=4)
        jobs = Jobs(options, block_bytes)
        medium = _FaultyMedium(jobs, namespace, policy, num_slots)
        self._store = medium.store
        self._slots = medium
        super().__init__(medium, num_slots * block_bytes)

    def delay(self, seconds: float) -> None:
        """Delay every call by `seconds` >= 0 from now on; ValueError for others."""
        if not seconds >= 0:
            raise ValueError(f"seconds must be >= 0, got {describe(seconds)}")
        self._store.delay_s = seconds

    def fail(self, op: str, count: int, error: int = errno.EIO) -> None:
        """Make the next `count` calls of ``"put"`` or ``"get"`` end with an error.

        Raises
        ------
        TypeError, ValueError
            If `op` is neither, or `count` or `error` is not an integer >= 0.
        """
        if op not in ("put", "get"):
            raise ValueError(f"op must be 'put' or 'get', got {describe(op)}")
        count, error = check_int("count", count, 0), check_int("error", error, 0)
        self._store.failures[op] = repeat(error, count)

    def hang(self) -> None:
        """Block calls until `resume`."""
        self._store.running.clear()

    def resume(self) -> None:
        """Let blocked calls continue."""
        self._store.running.set()

    def flip(self, key: bytes, bit: int = 0) -> None:
        """Flip one bit of a block that is stored."""
        (slot,) = self._slots.slots_of([stored_key(key)])
        value = bytearray(self._store.values[slot])
        value[bit // 8] ^= 1 << bit % 8
        self._store.values[slot] = bytes(value)


# -- the suite -----------------------------------------------------------------------------------


def run(tier: Tier, job: int) -> Done:
    """Wait for a job, the only one whose end has not been polled, and return its end."""
    require(tier.wait([job], PATIENCE_S), f"job {job} has not ended in {PATIENCE_S} s")
    ends = [done for done in tier.poll() if done.job == job]
    equal(len(ends), 1, f"ends of job {job}")
    seconds = ends[0].seconds
    require(0 <= seconds < PATIENCE_S, f"seconds must be those since the call: {seconds}")
    return ends[0]


def run_with_lists_reused(
    tier: Tier,
    begin: Callable[..., int],
    keys: list[bytes],
    *ids: npt.NDArray[np.int64],
) -> None:
    """Run a job whose arguments the caller uses for something else as soon as it has begun."""
    given, into = keys.copy(), [each.copy() for each in ids]
    job = begin(given, *into, PATIENCE_S)
    given[0] = b"another"
    for each in into:
        each[:] = 0
    equal(run(tier, job).status.tolist(), [Status.OK] * len(keys), "statuses")


def calls_of(tier: Tier, region: Region) -> dict[str, Callable[[], object]]:
    """Return one call of each method that a closed tier, or one of another process, refuses."""
    return {
        "attach": lambda: tier.attach(region),
        "lookup": lambda: tier.lookup([b"k"]),
        "state": lambda: tier.state(b"k"),
        "query": lambda: tier.query([b"k"]),
        "put": lambda: tier.put([b"k"], [0]),
        "get": lambda: tier.get([b"k"], [0]),
        "fileno": tier.fileno,
        "wait": lambda: tier.wait([], 0),
        "touch": lambda: tier.touch([b"k"]),
        "discard": lambda: tier.discard([b"k"]),
        "forget": tier.forget,
    }


def refused_as_foreign(tier: Tier, region: Region) -> None:
    """Call every method of a tier of the parent of this process."""
    for call in (*calls_of(tier, region).values(), tier.poll, tier.take_events):
        said = raises(RuntimeError, "a call in a forked child", call)
        require(str(os.getppid()) in said, f"{said} must name the process")
    require(tier.stats(), "stats() must answer in a forked child")
    require(tier.health().reads and repr(tier), "health() and repr() must answer in a forked child")
    require(tier.close(0), "close() must be True in a forked child")


def block_bytes_of(key: bytes, nbytes: int) -> bytes:
    """Return the bytes that a test stores under a key, different for every key."""
    seed = int.from_bytes(key[-8:] + len(key).to_bytes(2, "big"), "big")
    return np.random.default_rng(seed).bytes(nbytes)


class TierConformance(ABC):
    """The contract of `Tier` as tests.

    Subclass it, name the class ``Test...``, and implement `open_tier`. A tier that keeps its blocks
    after a close implements `reopen_tier` too.
    """

    block_bytes = 4096
    """Bytes per block of the tiers that `open_tier` gives."""
    num_blocks = 32
    """Blocks that a tier has room for."""

    @abstractmethod
    def open_tier(self, num_blocks: int) -> Tier:
        """Return a new, empty tier with room for `num_blocks` blocks of `block_bytes`."""

    def reopen_tier(self) -> Tier | None:
        """Reopen the tier that was opened and closed last; return None if it keeps nothing."""
        return None

    # -- for the tests -----------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(
        self, num_blocks: int | None = None, region: Region | None = None
    ) -> Iterator[tuple[Tier, Region]]:
        """Give an empty tier and the region that is attached to it, by default of 64 blocks."""
        tier = self.open_tier(num_blocks or self.num_blocks)
        try:
            region = region or Region.allocate(64, self.block_bytes)
            tier.attach(region)
            yield tier, region
        finally:
            tier.close()

    @contextlib.contextmanager
    def filled(self, count: int) -> Iterator[tuple[Tier, Region, list[bytes]]]:
        """Give a tier with the blocks of `count` keys, as `opened` does, and the keys."""
        with self.opened() as (tier, region):
            keys = self.keys(count)
            self.store(tier, region, keys)
            yield tier, region, keys

    def keys(self, count: int, start: int = 0) -> list[bytes]:
        """Return keys like those of an engine: 36 bytes."""
        return [b"%032d" % index + b"\0\0\0\0" for index in range(start, start + count)]

    def data(self, key: bytes) -> bytes:
        """Return the bytes that belong to a key."""
        return block_bytes_of(key, self.block_bytes)

    def write(self, region: Region, keys: Sequence[bytes]) -> None:
        """Write the bytes of keys to the first blocks of a region."""
        for block_id, key in enumerate(keys):
            region.write(block_id, self.data(key))

    def store(self, tier: Tier, region: Region, keys: Sequence[bytes]) -> Done:
        """Put keys from the first blocks of the region; wait until they can be read."""
        self.write(region, keys)
        done = run(tier, tier.put(keys, np.arange(len(keys)), PATIENCE_S))
        self.settle(tier)
        return done

    def load(self, tier: Tier, region: Region, keys: Sequence[bytes]) -> list[Status]:
        """Get keys into the first blocks of the region; compare the bytes of those that are OK."""
        region.array[:] = 0
        done = run(tier, tier.get(keys, np.arange(len(keys)), PATIENCE_S))
        equal(done.op, "get", "op")
        statuses = [Status(value) for value in done.status.tolist()]
        for block_id, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            if status == Status.OK:
                require(region.read(block_id) == self.data(key), f"the bytes of {key!r} are wrong")
        moved = statuses.count(Status.OK) * self.block_bytes
        equal(done.nbytes, moved, "nbytes of the get")
        return statuses

    def expect(self, tier: Tier, region: Region, keys: Sequence[bytes], *statuses: Status) -> None:
        """Query keys and load them; their statuses must be these, or each the only one given."""
        done = run(tier, tier.query(keys, PATIENCE_S))
        expected = list(statuses) * (len(keys) if len(statuses) == 1 else 1)
        equal((done.op, done.status.tolist()), ("query", expected), "op and statuses of a query")
        equal(self.load(tier, region, keys), expected, "statuses")

    def all_are_hits(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Query keys; each must be a hit, in a batch and by itself."""
        require((self.states(tier, keys) == State.HIT).all(), "all must be HIT")
        require(all(tier.state(key) == State.HIT for key in keys), "all must be HIT")

    def states(self, tier: Tier, keys: Sequence[bytes]) -> npt.NDArray[np.int8]:
        """Query keys and look them up; do so again if an answer has expired in between."""
        until = time.monotonic() + PATIENCE_S
        while True:
            run(tier, tier.query(keys, PATIENCE_S))
            found = tier.lookup(keys)
            if not (found == State.UNKNOWN).any() or time.monotonic() >= until:
                return found

    def settle(self, tier: Tier) -> None:
        """Wait until no job is in progress: a staged put ends before its block can be read."""
        until = time.monotonic() + PATIENCE_S
        while tier.stats().get("unsettled_jobs") and time.monotonic() < until:
            tier.wait([], 0)
            time.sleep(0.001)

    @contextlib.contextmanager
    def reopened(self, region: Region) -> Iterator[Tier | None]:
        """Give the tier that was closed last, open again; None if it keeps nothing."""
        again = self.reopen_tier()
        try:
            if again is not None:
                again.attach(region)
            yield again
        finally:
            if again is not None:
                again.close()

    # -- what is there -----------------------------------------------------------------------

    def test_an_empty_tier_has_nothing(self) -> None:
        with self.opened() as (tier, region):
            keys = self.keys(5)
            done = run(tier, tier.query(keys, PATIENCE_S))
            equal(done.status.tolist(), [Status.MISS] * 5, "statuses of a query")
            for found in (done.status, tier.lookup(keys)):
                equal(found.dtype, np.dtype(np.int8), "dtype of statuses and states")
            require((self.states(tier, keys) == State.MISS).all(), "all must be MISS when queried")
            equal(self.load(tier, region, keys), [Status.MISS] * 5, "statuses")

    def test_blocks_come_back_as_they_were_stored(self) -> None:
        with self.opened() as (tier, region):
            keys = self.keys(20)
            done = self.store(tier, region, keys)
            require((done.status == Status.OK).all(), f"all must be OK, got {done.status}")
            equal(done.nbytes, 20 * self.block_bytes, "nbytes")
            equal(done.op, "put", "op")
            require(done.seconds, "a put takes some time")
            self.all_are_hits(tier, keys)
            for some in (keys, keys[::-1], keys[3:4], keys[1::2]):
                equal(self.load(tier, region, some), [Status.OK] * len(some), "statuses")
            absent = self.keys(20, 20)
            mixed = [key for pair in zip(keys, absent, strict=True) for key in pair]
            equal(self.load(tier, region, mixed), [Status.OK, Status.MISS] * 20, "statuses")

    def test_blocks_move_to_and_from_the_ids_that_are_named(self) -> None:
        with self.opened() as (tier, region):
            keys = self.keys(8)
            ids = np.array([40, 3, 17, 63, 0, 5, 4, 41])
            for key, block_id in zip(keys, ids.tolist(), strict=True):
                region.write(block_id, self.data(key))
            run_with_lists_reused(tier, tier.put, keys, ids)
            self.settle(tier)
            region.array[:] = 0
            into = np.array([9, 8, 7, 62, 50, 51, 1, 2])
            run_with_lists_reused(tier, tier.query, keys)
            run_with_lists_reused(tier, tier.get, keys, into)
            for key, block_id in zip(keys, into.tolist(), strict=True):
                require(region.read(block_id) == self.data(key), f"{key!r} is not in {block_id}")
            for block_id in set(range(region.num_blocks)).difference(into.tolist()):
                require(not any(region.read(block_id)), f"block {block_id} must not change")

    def test_what_is_present_is_not_written_again(self) -> None:
        with self.filled(4) as (tier, region, keys):
            region.array[:] = 7  # other bytes under the same keys: the caller breaks its word
            done = run(tier, tier.put(keys, [0, 1, 2, 3], PATIENCE_S))
            equal(done.status.tolist(), [Status.OK] * 4, "statuses")
            equal(done.nbytes, 0, "nbytes")
            self.settle(tier)
            equal(self.load(tier, region, keys), [Status.OK] * 4, "statuses")

    def test_keys_may_be_any_bytes(self) -> None:
        lengths = [0, 1, 2, 31, 32, 33, 36, 39, 40, 41, 42, 64, 1000]
        keys = [bytes(length) for length in lengths] + [b"\xff" * length for length in lengths[1:]]
        keys += [b"k", b"K", b" k", b"k ", b"k\n"]
        with self.opened() as (tier, region):
            self.store(tier, region, keys)
            equal(self.load(tier, region, keys), [Status.OK] * len(keys), "statuses")
            other = [key + b"\0" for key in keys if len(key) not in {0, 1, 31, 32, 39, 40, 41}]
            require((tier.lookup(other) != State.HIT).all(), "a longer key is another key")
            self.all_are_hits(tier, keys)

    def test_a_key_may_be_given_twice(self) -> None:
        with self.opened() as (tier, region):
            keys = self.keys(3)
            doubled = [keys[0], keys[1], keys[0], keys[2], keys[2]]
            done = self.store(tier, region, doubled)
            equal(done.status.tolist(), [Status.OK] * 5, "statuses")
            equal(done.nbytes, 3 * self.block_bytes, "nbytes")
            equal(self.load(tier, region, doubled), [Status.OK] * 5, "statuses")

    def test_empty_batches_are_jobs(self) -> None:
        with self.opened() as (tier, _):
            calls: list[Callable[[], int]] = [
                lambda: tier.put([], []),
                lambda: tier.get([], []),
                lambda: tier.query([]),
            ]
            jobs: list[int] = []
            for begin in calls:
                jobs.append(begin())
                require(tier.wait(jobs, PATIENCE_S), "jobs must end")
            ends = [(done.job, len(done.status), done.nbytes) for done in tier.poll()]
            equal(ends, [(job, 0, 0) for job in jobs], "jobs in order, statuses and bytes")
            equal(tier.lookup([]).tolist(), [], "lookup([])")
            for call in (tier.touch, tier.release, tier.discard):
                call([])
            tier.end_request([], [])

    def test_capacity_bounds_what_is_kept(self) -> None:
        with self.opened(16) as (tier, region):
            if tier.capacity_bytes is None:
                return
            larger, keys = self.keys(64, 64), self.keys(64)
            statuses = set(self.store(tier, region, larger).status.tolist())
            others = statuses - {Status.FULL, Status.DECLINED}
            equal(others, {Status.OK}, "statuses of blocks that are not FULL or DECLINED")
            require(Status.OK in self.load(tier, region, larger), "some must be readable")
            for start in range(0, 64, 8):
                self.store(tier, region, keys[start : start + 8])
            found = self.states(tier, keys)
            kept = [keys[index] for index in np.flatnonzero(found == State.HIT)]
            capacity = tier.capacity_bytes // self.block_bytes
            require(0 < len(kept) <= capacity, f"at most {capacity} blocks fit, got {len(kept)}")
            equal(self.load(tier, region, kept), [Status.OK] * len(kept), "statuses")

    # -- removal -----------------------------------------------------------------------------

    def test_discarded_blocks_are_gone_and_can_be_stored_again(self) -> None:
        with self.filled(6) as (tier, region, keys):
            tier.touch([*keys, b"unknown", b"", bytes(100), keys[0]])
            tier.end_request([*keys, b"unknown"], [b"own", keys[0]])
            tier.release([b"unknown", keys[0]])
            self.expect(tier, region, keys, Status.OK)
            tier.discard([b"unknown", *keys[:3]])
            self.expect(tier, region, keys, *[Status.MISS] * 3, *[Status.OK] * 3)
            done = self.store(tier, region, keys)
            equal(done.nbytes, 3 * self.block_bytes, "nbytes")
            equal(self.load(tier, region, keys), [Status.OK] * 6, "statuses")

    def test_what_is_discarded_while_it_is_stored_is_gone(self) -> None:
        with self.opened() as (tier, region):
            keys = self.keys(6)
            self.write(region, keys)
            job = tier.put(keys, range(6), PATIENCE_S)
            tier.discard(keys[:3])
            run(tier, job)
            self.settle(tier)
            self.expect(tier, region, keys, *[Status.MISS] * 3, *[Status.OK] * 3)

    def test_forget_drops_everything_and_holds_for_jobs_under_way(self) -> None:
        with self.filled(12) as (tier, region, stored):
            keys = [*stored, *self.keys(12, 12)]
            self.write(region, keys)
            jobs = [
                tier.put(keys[12:], range(12, 24), PATIENCE_S),
                tier.get(keys[:12], range(24, 36), PATIENCE_S),
            ]
            tier.forget()
            require((tier.lookup(keys) != State.HIT).all(), "nothing may be HIT")
            require(tier.wait(jobs, PATIENCE_S), "jobs must end")
            ends = {done.job: done for done in tier.poll()}
            got = ends[jobs[1]]
            require(Status.OK not in got.status.tolist(), "forgotten blocks must not be served")
            self.settle(tier)
            self.expect(tier, region, keys, Status.MISS)
            self.store(tier, region, keys[:20])
            self.expect(tier, region, keys, *[Status.OK] * 20, *[Status.MISS] * 4)

    # -- jobs --------------------------------------------------------------------------------

    def test_many_jobs_are_under_way_at_once_and_end_once(self) -> None:
        with self.opened(64) as (tier, region):
            keys = self.keys(48)
            self.write(region, keys)
            jobs = [tier.put(keys[i : i + 4], range(i, i + 4), PATIENCE_S) for i in range(0, 48, 4)]
            equal(len(set(jobs)), 12, "numbers of jobs")
            require(tier.wait(jobs, PATIENCE_S), "all must end")
            require(tier.wait([*jobs, 10**9], 0.0), "ended and unknown jobs count as ended")
            equal(sorted(done.job for done in tier.poll()), sorted(jobs), "jobs that ended")
            equal(tier.poll(), [], "a second poll")
            self.settle(tier)
            rng = np.random.default_rng(0)
            for _ in range(20):
                order = rng.permutation(48)
                region.array[:] = 0
                parts = np.split(order, [1, 2, 10, 30])
                jobs = [tier.get([keys[i] for i in part], part, PATIENCE_S) for part in parts]
                require(tier.wait(jobs, PATIENCE_S), "all must end")
                for done in tier.poll():
                    require((done.status == Status.OK).all(), f"all must be OK: {done.status}")
                for block_id, key in enumerate(keys):
                    require(region.read(block_id) == self.data(key), f"{key!r} is wrong")

    def test_the_descriptor_is_readable_while_there_is_news(self) -> None:
        with self.opened() as (tier, region):
            poller = select.poll()
            poller.register(tier.fileno(), select.POLLIN)
            tier.poll()
            equal(poller.poll(0), [], "events before a job")
            region.write(0, self.data(b"k"))
            job = tier.put([b"k"], [0], PATIENCE_S)
            require(poller.poll(PATIENCE_S * 1000), "it must become readable")
            require(tier.wait([job], PATIENCE_S), "the job must end")
            require(poller.poll(0), "it must stay readable until poll")
            tier.poll()
            self.settle(tier)
            tier.poll()
            equal(poller.poll(0), [], "events after poll")
            tier.query([b"k"], PATIENCE_S)
            require(poller.poll(PATIENCE_S * 1000), "a job without I/O is news too")

    def test_wrong_arguments_change_nothing(self) -> None:
        with self.filled(2) as (tier, region, keys):
            calls: list[tuple[type[Exception], Callable[[], object]]] = [
                (TypeError, lambda: tier.put(["text"], [0])),  # type: ignore[list-item]
                (TypeError, lambda: tier.put([bytearray(b"k")], [0])),  # type: ignore[list-item]
                (TypeError, lambda: tier.put(5, [0])),  # type: ignore[arg-type]
                (TypeError, lambda: tier.put([b"k"], [0.5])),  # type: ignore[list-item]
                (ValueError, lambda: tier.put([b"k"], [[0]])),  # type: ignore[list-item]
                (ValueError, lambda: tier.put([b"k"], [])),
                (ValueError, lambda: tier.put([b"k"], [64])),
                (ValueError, lambda: tier.put([b"k"], [-1])),
                (ValueError, lambda: tier.put([b"k"], [0], deadline_s=0)),
                (ValueError, lambda: tier.put([b"k"], [0], deadline_s=float("nan"))),
                (TypeError, lambda: tier.put([b"k"], [0], deadline_s=True)),
                (ValueError, lambda: tier.get(keys, [3, 3])),
                (ValueError, lambda: tier.get(keys, [3])),
                (TypeError, lambda: tier.query([1])),  # type: ignore[list-item]
                (TypeError, lambda: tier.state("text")),  # type: ignore[arg-type]
                (TypeError, lambda: tier.lookup([None])),  # type: ignore[list-item]
                (TypeError, lambda: tier.touch([1])),  # type: ignore[list-item]
                (TypeError, lambda: tier.discard([1])),  # type: ignore[list-item]
                (ValueError, lambda: tier.attach(Region.allocate(64, self.block_bytes))),
                (ValueError, lambda: tier.wait([], -1)),
                (TypeError, lambda: tier.forget(5)),  # type: ignore[arg-type]
                (ValueError, lambda: tier.forget("two\nlines")),
            ]
            before = tier.stats()
            for expected, call in calls:
                raises(expected, "a call with a wrong argument", call)
            equal(tier.poll(), [], "jobs that ended")
            equal(tier.stats(), before, "stats")
            equal(self.load(tier, region, keys), [Status.OK] * 2, "statuses")

    def test_a_tier_without_a_region_moves_nothing(self) -> None:
        tier = self.open_tier(4)
        try:
            raises(RuntimeError, "put without a region", lambda: tier.put([b"k"], [0]))
            raises(RuntimeError, "get without a region", lambda: tier.get([b"k"], [0]))
            other = Region.allocate(4, self.block_bytes + 4096)
            raises(ValueError, "another size of blocks", lambda: tier.attach(other))
        finally:
            tier.close()

    def test_close_ends_everything(self) -> None:
        with self.filled(8) as (tier, region, keys):
            job = tier.get(keys, range(8), PATIENCE_S)
            require(tier.close(PATIENCE_S), "nothing hangs")
            equal([done.job for done in tier.poll()], [job], "jobs that ended")
            require(tier.close(), "a second close does nothing")
            tier.stats()
            for name, call in calls_of(tier, region).items():
                raises(RuntimeError, f"{name} of a closed tier", call)

    def test_a_forked_child_is_refused_and_harms_nothing(self) -> None:
        with self.filled(8) as (tier, region, keys):
            with warnings.catch_warnings():  # of forking beside other threads
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                code = 1
                try:
                    signal.alarm(int(PATIENCE_S))  # a call that waits for a lock ends the child
                    refused_as_foreign(tier, region)
                    code = 0
                except BaseException:  # noqa: BLE001 # no test runner sees it
                    traceback.print_exc()
                finally:
                    os._exit(code)
            _, ended = os.waitpid(child, 0)
            equal(os.waitstatus_to_exitcode(ended), 0, "exit code of the child")
            equal(self.load(tier, region, keys), [Status.OK] * 8, "statuses")

    # -- regions -----------------------------------------------------------------------------

    def test_blocks_may_lie_in_parts_and_anywhere(self) -> None:
        size = self.block_bytes
        cut = size // 3
        memory = bytearray(64 * size + 64)
        spread = Region.of_parts(
            memory, [(1, cut, cut), (1 + 16 * cut, size - cut, size - cut)], 16
        )
        for other in (spread, Region(memoryview(memory)[7:], size)):
            with self.opened(region=other) as (tier, region):
                keys = self.keys(16)
                self.store(tier, region, keys)
                equal(self.load(tier, region, keys[::-1]), [Status.OK] * 16, "statuses")

    # -- what can be seen --------------------------------------------------------------------

    def test_counters_say_what_happened(self) -> None:
        with self.opened() as (tier, region):
            before = tier.stats()
            keys = self.keys(10)
            self.store(tier, region, keys[:6])
            self.load(tier, region, keys)
            tier.lookup(keys[:6])
            after = tier.stats()
            counted = {name: after[name] - before[name] for name in before}
            equal(counted["put_ok"], 6, "put_ok")
            equal(counted["put_bytes"], 6 * self.block_bytes, "put_bytes")
            equal((counted["get_ok"], counted["get_miss"]), (6, 4), "get_ok, get_miss")
            equal(counted["get_bytes"], 6 * self.block_bytes, "get_bytes")
            equal(after["queued_bytes"], 0, "queued_bytes")
            require(tier.health().ok, f"it must be healthy: {tier.health()}")

    # -- again -------------------------------------------------------------------------------

    def test_blocks_outlive_the_tier(self) -> None:
        with self.filled(20) as (tier, region, keys):
            tier.discard([b"unknown", *keys[:2]])
            require(tier.close(PATIENCE_S), "nothing hangs")
        with self.reopened(region) as again:
            if again is not None:
                self.expect(again, region, keys, *[Status.MISS] * 2, *[Status.OK] * 18)

    def test_blocks_of_a_generation_are_not_those_of_another(self) -> None:
        with self.opened() as (tier, region):
            keys = self.keys(20)
            tier.forget("another")
            equal(tier.generation, "another", "generation")
            self.store(tier, region, keys)
            require(tier.forget("another") in {True, False}, "forget() must return a bool")
            equal(self.load(tier, region, keys), [Status.OK] * 20, "statuses")
            tier.close(PATIENCE_S)
        with self.reopened(region) as again:
            if again is not None:
                self.expect(again, region, keys, Status.MISS)
                self.store(again, region, keys[:5])
                self.expect(again, region, keys, *[Status.OK] * 5, *[Status.MISS] * 15)


# -- the machine ---------------------------------------------------------------------------------


def tier_machine(open_tier: Callable[[], Tier], block_bytes: int, num_keys: int = 24) -> Any:
    """Return a state machine that compares a tier with a dict; its ``TestCase`` is a test.

    Parameters
    ----------
    open_tier : callable
        Returns a new, empty tier.
    block_bytes : int
        Bytes per block.
    num_keys : int
        Number of keys that the steps choose from. If the tier has room for all, exactly the blocks
        that were stored and not dropped must be there; otherwise no others.

    Returns
    -------
    type
        A subclass of ``hypothesis.stateful.RuleBasedStateMachine``.
    """
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

    names = [b"key-%d" % index for index in range(num_keys - 2)] + [b"", b"long" * 30]
    batches = st.lists(st.sampled_from(names), max_size=12)

    class TierMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.tier = open_tier()
            self.region = Region.allocate(48, block_bytes)
            self.tier.attach(self.region)
            capacity = self.tier.capacity_bytes
            self.exact = capacity is None or capacity >= num_keys * block_bytes
            self.model: set[bytes] = set()  # keys that were stored, and not dropped
            self.jobs: dict[int, tuple[str, list[bytes], list[int], set[bytes]]] = {}
            self.free = list(range(48))
            self.crowded = False  # slots may still be held by jobs of before a `forget`

        def take(self, keys: list[bytes]) -> tuple[list[bytes], list[int]]:
            ids, self.free = self.free[: len(keys)], self.free[len(keys) :]
            return keys[: len(ids)], ids

        @rule(keys=batches)
        def put(self, keys: list[bytes]) -> None:
            keys, ids = self.take(keys)
            for key, block_id in zip(keys, ids, strict=True):
                self.region.write(block_id, block_bytes_of(key, block_bytes))
            job = self.tier.put(keys, ids, PATIENCE_S)
            self.jobs[job] = ("crowded put" if self.crowded else "put", keys, ids, set())

        @rule(keys=batches)
        def get(self, keys: list[bytes]) -> None:
            keys, ids = self.take(keys)
            # A staged put may end before its block can be read.
            there = {key for key in self.model if self.tier.state(key) == State.HIT}
            job = self.tier.get(keys, ids, PATIENCE_S)
            self.jobs[job] = ("get", keys, ids, there)

        @rule(keys=batches)
        def touch(self, keys: list[bytes]) -> None:
            self.tier.touch(keys)

        @rule(keys=batches)
        def discard(self, keys: list[bytes]) -> None:
            self.finish()
            self.tier.discard(keys)
            self.model.difference_update(keys)

        @rule()
        def forget(self) -> None:
            self.tier.forget()
            self.model.clear()
            for job, (op, keys, ids, _) in list(self.jobs.items()):
                self.jobs[job] = (f"forgotten {op}", keys, ids, set())
            self.crowded = True

        @rule()
        def finish(self) -> None:
            require(self.tier.wait(list(self.jobs), PATIENCE_S), "jobs must end")
            self.collect()

        @rule()
        def collect(self) -> None:
            for done in self.tier.poll():
                self.check(done, *self.jobs.pop(done.job))

        def check(
            self, done: Done, op: str, keys: list[bytes], ids: list[int], there: set[bytes]
        ) -> None:
            for key, block_id, status in zip(keys, ids, done.status.tolist(), strict=True):
                if op in ("put", "crowded put"):
                    may_be_full = not self.exact or op == "crowded put"
                    is_full = status in (Status.FULL, Status.DECLINED)
                    is_allowed = status == Status.OK or (is_full and may_be_full)
                    require(is_allowed, f"put of {key!r}: {Status(status).name}")
                    if status == Status.OK:
                        self.model.add(key)
                elif status == Status.OK and op.endswith("get"):
                    require(op == "get", f"{key!r} was served and had been forgotten")
                    is_right = self.region.read(block_id) == block_bytes_of(key, block_bytes)
                    require(is_right, f"the bytes of {key!r} are wrong")
                elif op == "get":
                    equal(status, Status.MISS, f"status of {key!r}")
                    require(key not in there or not self.exact, f"{key!r} is lost")
            self.free.extend(ids)

        @invariant()
        def nothing_comes_from_nowhere(self) -> None:
            if self.jobs or not hasattr(self, "tier"):
                return
            settled = not self.tier.stats().get("unsettled_jobs", 0)
            is_exact = self.exact and settled
            self.crowded = self.crowded and not settled
            for key, state in zip(names, self.tier.lookup(names).tolist(), strict=True):
                stored = key in self.model
                require(stored or state != State.HIT, f"{key!r} came from nowhere")
                require(not (stored and is_exact) or state != State.MISS, f"{key!r} is lost")

        def teardown(self) -> None:
            if hasattr(self, "tier"):
                require(self.tier.close(PATIENCE_S), "nothing hangs")

    return TierMachine
