"""A user's own policy or backend behind the trusted protocol of the Python skeleton.

The skeleton calls built-in parts without checks. These adapters give users' parts the same
interface, check their results, and clean up when they break their contract.

Invariants
    The policy adapter's ledger ``_resident`` holds the live status of every block that the manager
    has made resident, regardless of the policy, so that a faulty policy loses no slot. Blocks that
    the policy's code has dropped when it raises are inserted again: a block that the manager holds
    and the policy does not know could never be evicted.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Generic

from kvoffload.backends._cpu_py import keep_slot
from kvoffload.backends.base import Backend
from kvoffload.errors import BackendError, PolicyError, describe, describe_hash
from kvoffload.policies.base import CachePolicy
from kvoffload.types import BlockHash, BlockStatus, Hints, Spec_co

_Victims = list[tuple[BlockHash, BlockStatus]]


class EvictionFaultError(Exception):
    """A policy's fault, and the victims that had left before it was found."""

    def __init__(self, victims: _Victims, error: PolicyError) -> None:
        super().__init__(error)
        self.victims = victims
        self.error = error


class UserPolicy:
    """A user's ``CachePolicy`` behind the trusted protocol, and the ledger of resident blocks."""

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        self._resident: dict[BlockHash, BlockStatus] = {}

    @property
    def num_ghosts(self) -> int:
        """Number of ghosts if the policy reports it, else 0."""
        num_ghosts = getattr(self.policy, "num_ghosts", 0)
        return num_ghosts if isinstance(num_ghosts, int) else 0

    def _touch(self, batch: list[BlockHash]) -> None:
        with self._restoring():
            self.policy.touch(list(batch))

    def _begun(self, batch: list[BlockHash], hints: Hints | None) -> None:
        with self._restoring():
            self.policy.begun(list(batch), hints)

    def _extended(self, batch: list[BlockHash]) -> None:
        if self._touches_as_built_in():
            with self._restoring():
                self.policy._extend_alone(list(batch))  # type: ignore[attr-defined]
        else:
            self._touch(batch)

    def _touches_as_built_in(self) -> bool:
        """Return whether the policy derives from a built-in one without overriding `touch`."""
        kind = type(self.policy)
        built_in = next((one for one in kind.__mro__ if "_extend_alone" in vars(one)), None)
        return built_in is not None and kind.touch is built_in.touch  # type: ignore[attr-defined]

    def _missed(self, hashes: list[BlockHash]) -> None:
        with self._restoring():
            self.policy.missed(list(hashes))

    def _finished(self, batch: list[BlockHash], hints: Hints | None) -> None:
        with self._restoring():
            self.policy.finished(list(batch), hints)

    def _take_back(self, batch: list[BlockHash]) -> None:
        """Do nothing: the policy tracks its released blocks itself."""

    def _release(self, batch: list[BlockHash]) -> None:
        with self._restoring():
            self.policy.release(list(batch))

    def _insert(self, blocks: Mapping[BlockHash, BlockStatus]) -> None:
        tried: list[BlockHash] = []
        try:
            for block_hash, status in blocks.items():
                tried.append(block_hash)
                self._make_resident(block_hash, status)
            self.policy.inserted(list(blocks))
        except BaseException:
            # The last block may have been inserted nevertheless: nothing else would ever remove it.
            for block_hash in reversed(tried):
                self._withdraw(block_hash)
            raise

    def _make_resident(self, block_hash: BlockHash, status: BlockStatus) -> None:
        self.policy.insert(block_hash, status)
        live = self.policy.get(block_hash)
        if not isinstance(live, BlockStatus):
            raise PolicyError(
                f"{type(self.policy).__name__}.get must return the status of block "
                f"{describe_hash(block_hash)} after insert, got {describe(live)}"
            )
        keep_slot(live, status)
        self._resident[block_hash] = live

    def _withdraw(self, block_hash: BlockHash) -> None:
        """Drop a block, also from the policy if that has it."""
        self._resident.pop(block_hash, None)
        with suppress(Exception):
            self.policy.remove(block_hash)

    def _remove(self, hashes: Collection[BlockHash]) -> None:
        with self._restoring():
            for block_hash in hashes:
                self.policy.remove(block_hash)
        for block_hash in hashes:
            del self._resident[block_hash]

    def _make_room(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, _Victims] | None:
        name = type(self.policy).__name__
        with self._restoring():
            room = self.policy.make_room(list(hashes), num_free, frozenset(protected))
            count, victims = (0, []) if room is None else _unpack(name, room)
            left, fault = self._judge(victims, protected)
            if fault is None and room is not None:
                shortfall = max(0, count - num_free)
                if not 0 <= count <= len(hashes):
                    fault = f"must store 0 ... {len(hashes)} blocks, got {count}"
                elif len(left) != shortfall:
                    fault = f"must evict exactly {shortfall} blocks, got {len(left)}"
            fault = fault or self._miscount(len(left))
            for block_hash in left:
                if fault is None:
                    del self._resident[block_hash]
                else:  # the policy may still have it
                    self._withdraw(block_hash)
            if fault is not None:
                raise EvictionFaultError(list(left.items()), PolicyError(f"{name} {fault}"))
        return None if room is None else (count, list(left.items()))

    def _make_room_of_released(
        self, hashes: list[BlockHash], num_free: int, protected: Collection[BlockHash]
    ) -> tuple[int, _Victims] | None:
        # Only the policy knows its released blocks, so take only free slots.
        return self._make_room(hashes[:num_free], num_free, protected)

    def _judge(
        self, victims: list[tuple[Any, Any]], protected: Collection[BlockHash]
    ) -> tuple[dict[BlockHash, BlockStatus], str | None]:
        """Return the victims that may leave, and the fault of the first that may not."""
        left: dict[BlockHash, BlockStatus] = {}
        fault = None
        for block_hash, _ in victims:
            is_new = type(block_hash) is bytes and block_hash not in left
            own = self._resident.get(block_hash) if is_new else None
            if own is None:
                show = describe_hash if type(block_hash) is bytes else describe
                fault = fault or f"evicted a block that is not resident: {show(block_hash)}"
            elif own.ref_cnt != 0 or block_hash in protected:
                fault = fault or (
                    f"must evict idle blocks that are not protected, "
                    f"got {describe_hash(block_hash)}"
                )
            else:
                left[block_hash] = own
        return left, fault

    def _miscount(self, num_victims: int) -> str | None:
        """Return the fault of a policy with a ``len`` that has not dropped just its victims."""
        try:
            num_dropped = len(self._resident) - len(self.policy)
        except NotImplementedError:
            return None
        if num_dropped == num_victims:
            return None
        return f"must drop exactly its {num_victims} victims, got {num_dropped} blocks"

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Restore the policy's dropped blocks if its code raises or its result is wrong."""
        try:
            yield
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        """Insert blocks again that the policy has dropped and the manager still holds."""
        for block_hash, own in list(self._resident.items()):
            # An error of the policy is propagating; one raised here must not hide it.
            with suppress(Exception):
                if self.policy.get(block_hash) is None:
                    self._make_resident(block_hash, own)

    def _clear(self) -> None:
        with self._restoring():
            self.policy.clear()
        self._resident.clear()

    def _in_eviction_order(self) -> Iterable[BlockStatus]:
        """Return the live statuses, in the policy's order if it shows one, else as inserted."""
        order: Any = getattr(self.policy, "blocks", None)
        known = [h for h in order if h in self._resident] if isinstance(order, Iterable) else []
        if len(known) == len(self._resident):
            return [self._resident[block_hash] for block_hash in known]
        return self._resident.values()

    def _check(self) -> None:
        for block_hash, status in self._resident.items():
            live = self.policy.get(block_hash)
            if live is None or (live.ref_cnt, live.block_id) != (status.ref_cnt, status.block_id):
                raise AssertionError(f"the policy holds block {describe_hash(block_hash)}")


def _unpack(name: str, room: Any) -> tuple[int, list[tuple[Any, Any]]]:
    """Return the two parts of a result of ``make_room``; PolicyError if it has another form."""
    try:
        count, victims = room
        return operator.index(count), [(block_hash, status) for block_hash, status in victims]
    except (TypeError, ValueError):
        raise PolicyError(
            f"{name}.make_room must return (number, list of (hash, status)) or None, "
            f"got {describe(room)}"
        ) from None


class UserBackend(Generic[Spec_co]):
    """A user's ``Backend`` behind the trusted protocol, which checks its results."""

    def __init__(self, backend: Backend[Spec_co]) -> None:
        self.backend = backend
        self._owned: set[int] = set()

    def _num_free(self) -> int:
        num_free = self.backend.get_num_free_blocks()
        try:
            count = operator.index(num_free)
        except TypeError:
            count = -1
        if count < 0:
            raise BackendError(
                f"{type(self.backend).__name__}.get_num_free_blocks must return an integer >= 0, "
                f"got {describe(num_free)}"
            )
        return count

    def _allocate(self, batch: list[BlockHash]) -> list[BlockStatus]:
        given: Any = self.backend.allocate_blocks(list(batch))
        statuses: list[Any] = list(given) if isinstance(given, Iterable) else []
        fault = self._fault(len(batch), statuses)
        if fault is None:
            self._owned.update(map(id, statuses))
            return statuses
        handed_out = {id(s): s for s in statuses if isinstance(s, BlockStatus)}
        self._give_up([status for key, status in handed_out.items() if key not in self._owned])
        raise BackendError(f"{type(self.backend).__name__}.allocate_blocks must return {fault}")

    def _fault(self, wanted: int, statuses: list[Any]) -> str | None:
        if len(statuses) != wanted:
            return f"{wanted} statuses, got {len(statuses)}"
        for status in statuses:
            if not isinstance(status, BlockStatus):
                return f"BlockStatus objects, got {type(status).__name__}"
            if status.ref_cnt != -1:
                return f"pending statuses, got ref_cnt {status.ref_cnt}"
        keys = set(map(id, statuses))
        if len(keys) < wanted or not keys.isdisjoint(self._owned):
            return "a new status object for each hash, got the same one twice"
        return None

    def _free(self, statuses: Iterable[BlockStatus]) -> None:
        error: Exception | None = None
        for status in statuses:
            self._owned.discard(id(status))
            try:
                self.backend.free(status)
            except Exception as raised:  # noqa: BLE001 - the other slots would be lost
                error = error or raised
        if error is not None:
            raise error

    def _give_up(self, statuses: Iterable[BlockStatus]) -> None:
        """Free the slots of a store that failed."""
        # An error is propagating; one raised here must not hide it.
        with suppress(Exception):
            self._free(statuses)

    def _load_store_spec(self, batch: list[BlockHash], statuses: list[BlockStatus]) -> Spec_co:
        return self.backend.get_load_store_spec(list(batch), list(statuses))

    def _release_all(self, statuses: Iterable[BlockStatus]) -> None:
        self._free(statuses)

    def _check(self) -> None:
        """Do nothing: the invariants of a user's backend are unknown here."""
