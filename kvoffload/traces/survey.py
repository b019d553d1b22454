"""A survey of a trace, counted in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .chaining import Chaining, ChainingCounter
from .id_map import Ids
from .objects import ObjectBatch, batches_of
from .request import Request
from .returns import KeptCounter, Returns

MOST_TYPES = 16
PROGRESS_REQUESTS = 256  # between two calls of the progress function


@dataclass(slots=True)
class SizeRange:
    """Block sizes from `smallest` to `largest`, tokens; None while there is no upper bound."""

    smallest: int = 1
    largest: int | None = None

    def narrow(self, smallest: int, largest: int | None) -> None:
        """Keep only the sizes that are also in another range."""
        self.smallest = max(self.smallest, smallest)
        if largest is not None and (self.largest is None or largest < self.largest):
            self.largest = largest

    def holds(self, size: int) -> bool:
        """Return whether a size is in the range, which may be empty."""
        return self.smallest <= size and (self.largest is None or size <= self.largest)

    def power_of_two(self) -> list[int]:
        """Return the smallest power of two in the range, if there is one."""
        power = 1 << (self.smallest - 1).bit_length()
        return [power] if self.holds(power) else []

    def __str__(self) -> str:
        if self.largest is None:
            return f"{self.smallest:,} or more"
        if self.smallest == self.largest:
            return f"{self.smallest:,}"
        return f"{self.smallest:,} to {self.largest:,}"

    def others(self) -> list[int]:
        """Return the smallest multiple of 16 in the range, and its smallest size."""
        multiple = -(-self.smallest // 16) * 16
        return [size for size in (multiple, self.smallest) if self.holds(size)]


class BlockLengths:
    """The block sizes b that fit every request so far.

    Traces differ in how they treat the end of a prompt that fills no block: it has an id
    (``len(hash_ids) == ceil(input_length / b)``, as in Mooncake's) or none
    (``len(hash_ids) == input_length // b``, as in LMCache's). One of the two must hold throughout.

    Parameters
    ----------
    asked : int, optional
        A size, tokens, that is also compared with each request by itself.

    Attributes
    ----------
    with_partial, full_only : SizeRange
        The sizes that fit the first and the second rule; empty if none does.
    known, agreeing : int
        Requests whose length is known, and those among them that fit the size asked for.
    """

    def __init__(self, asked: int | None = None) -> None:
        self.with_partial = SizeRange()
        self.full_only = SizeRange()
        self.known = 0
        self.agreeing = 0
        self._asked = asked
        self._bounded = False

    def add(self, tokens: int, blocks: int) -> None:
        """Add a request."""
        self._bounded |= blocks > 0
        if tokens or not blocks:
            self.known += 1
            if self._asked is not None:
                self.agreeing += blocks in (tokens // self._asked, -(-tokens // self._asked))
        if blocks == 0:
            self.with_partial.narrow(1, 0 if tokens else None)
            self.full_only.narrow(tokens + 1, None)
            return
        # All blocks but one are too few for the tokens, and all are enough.
        below = (tokens - 1) // (blocks - 1) if blocks > 1 else None
        self.with_partial.narrow(-(-tokens // blocks), below if tokens else 0)
        # The tokens fill all blocks, and not one more.
        self.full_only.narrow(tokens // (blocks + 1) + 1, tokens // blocks)

    def fits(self, size: int) -> bool:
        """Return whether a size, tokens, fits; none does if no request had a block."""
        return self._bounded and (self.with_partial.holds(size) or self.full_only.holds(size))

    def best(self) -> int | None:
        """Return the most plausible size that fits.

        The smallest power of two, else the smallest multiple of 16, else the smallest size; those
        with partial blocks are preferred. None if none fits, or if no request had a block.
        """
        if not self._bounded:
            return None
        ranges = self._ranges()
        powers = [size for sizes in ranges for size in sizes.power_of_two()]
        others = [size for sizes in ranges for size in sizes.others()]
        return next(iter(powers + others), None)

    def __str__(self) -> str:
        """Return the sizes that fit in words, empty if none does."""
        fitting = [sizes for sizes in self._ranges() if sizes.holds(sizes.smallest)]
        return " or ".join(dict.fromkeys(map(str, fitting))) if self._bounded else ""

    def _ranges(self) -> tuple[SizeRange, SizeRange]:
        return self.with_partial, self.full_only


@dataclass(slots=True)
class Survey:
    """Counts of a trace.

    Attributes
    ----------
    requests, blocks : int
        Requests, and blocks over all of them.
    unique_blocks : int or None
        Distinct blocks; None if they were not counted.
    ideal_hits : int or None
        Blocks that an unbounded cache would hit: the leading blocks of each request that were in
        an earlier one; None if they were not counted.
    input_tokens, output_tokens : int
        Tokens over all requests.
    longest : int
        Blocks of the longest request.
    first, last : int or float
        Least and greatest timestamp, milliseconds.
    backwards : int
        Requests whose timestamp is before that of the request in front of them.
    farthest_back : int or float
        The longest such step, milliseconds.
    longest_pause : int or float
        The longest step forward, milliseconds; without backward ones, no request comes meanwhile.
    block_lengths : BlockLengths
        The block sizes that fit.
    types : Counter of str
        Requests by their type, as far as the trace names it: the first `MOST_TYPES` types.
    most_turns : int
        The greatest number of a turn that the trace states.
    """

    requests: int = 0
    blocks: int = 0
    unique_blocks: int | None = None
    ideal_hits: int | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    longest: int = 0
    first: int | float = 0
    last: int | float = 0
    backwards: int = 0
    farthest_back: int | float = 0
    longest_pause: int | float = 0
    block_lengths: BlockLengths = field(default_factory=BlockLengths)
    types: Counter[str] = field(default_factory=Counter)
    most_turns: int = 0
    _before: int | float = field(default=0, repr=False)
    _chaining: ChainingCounter = field(default_factory=ChainingCounter, repr=False, compare=False)

    @property
    def chaining(self) -> Chaining:
        """Counts of the ids that cannot be prefix-chained."""
        return self._chaining.counts()

    @property
    def block_tokens(self) -> int | None:
        """Inferred block size, tokens; None if none fits."""
        return self.block_lengths.best()

    def contradiction(self, size: int) -> str | None:
        """Return why the requests contradict a block size, tokens; None if they do not.

        They do not if no length is known. If no size fits all requests, one that fits most of them
        is accepted; it must be the one that was given to `of`.
        """
        lengths = self.block_lengths
        if not (self.input_tokens and self.blocks) or lengths.fits(size):
            return None
        fitting = str(lengths)
        if fitting:
            return f"the lengths of its requests make it {fitting}"
        if 2 * lengths.agreeing > lengths.known:
            return None
        return (
            f"it fits {lengths.agreeing:,} of {lengths.known:,} requests; they have "
            f"{self.input_tokens / self.blocks:,.0f} tokens per block on average"
        )

    @property
    def ideal_hit_ratio(self) -> float | None:
        """Share of the blocks that an unbounded cache would hit; None if not counted."""
        if self.ideal_hits is None:
            return None
        return self.ideal_hits / self.blocks if self.blocks else 0.0

    @property
    def seconds(self) -> float:
        """Span from the first arrival to the last, seconds."""
        return (self.last - self.first) / 1000

    @classmethod
    def of(
        cls,
        requests: Iterable[Request],
        *,
        unique: bool = True,
        returns: Returns | None = None,
        block_tokens: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Survey:
        """Count the contents of a trace.

        Parameters
        ----------
        requests : iterable of Request
            The trace; it is iterated over once.
        unique : bool
            Whether to count distinct blocks and ideal hits, which takes 9 to 18 bytes per distinct
            block; without it, memory is constant.
        returns : Returns, optional
            Counters of what returns, to be fed in the same pass; they count distinct blocks too.
        block_tokens : int, optional
            A block size, tokens, for `contradiction`.
        progress : callable, optional
            Called regularly with the number of requests so far.
        """
        self = cls(block_lengths=BlockLengths(block_tokens))
        if returns is None and unique:
            returns = Returns(blocks=KeptCounter(()), counts_sessions=False)
        batches = batches_of(requests)
        for times, ids in batches or ():
            self._add_each(times, ids)
            if returns is not None:
                returns.add_each(times, ids)
            if progress is not None:
                progress(self.requests)
        for request in requests if batches is None else ():
            self.add(request)
            if returns is not None:
                returns.add(request)
            if progress is not None and self.requests % PROGRESS_REQUESTS == 0:
                progress(self.requests)
        if returns is not None:
            returns.finish()
            self.unique_blocks = returns.blocks.unique_blocks
            self.ideal_hits = returns.blocks.ideal_hits
        return self

    def add(self, request: Request) -> None:
        """Count a request, except for distinct blocks and ideal hits."""
        length, timestamp = len(request.hash_ids), request.timestamp
        if self.requests == 0:
            self.first = self.last = timestamp
        elif timestamp < self._before:
            self.backwards += 1
            self.farthest_back = max(self.farthest_back, self._before - timestamp)
            self.first = min(self.first, timestamp)
        else:
            self.longest_pause = max(self.longest_pause, timestamp - self._before)
            self.last = max(self.last, timestamp)
        self._before = timestamp
        self.requests += 1
        self.blocks += length
        self.input_tokens += request.input_length
        self.output_tokens += request.output_length
        self.longest = max(self.longest, length)
        if request.type is not None:
            is_listed = request.type in self.types or len(self.types) < MOST_TYPES
            self.types[request.type if is_listed else "others"] += 1
            self.most_turns = max(self.most_turns, request.turn or 0)
        self.block_lengths.add(request.input_length, length)
        self._chaining.add(request.hash_ids)

    def counting(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Return requests that are counted with `add` as another reader reads them, once."""
        return _Counted(self, requests)

    def _add_each(self, times: npt.NDArray[np.float64], ids: Ids) -> None:
        """Count many requests of one block, without lengths."""
        if not self.requests:
            self.first = self.last = self._before = float(times[0])
            self.block_lengths.add(0, 1)
        steps = np.diff(times, prepend=self._before)
        self.backwards += int(np.count_nonzero(steps < 0))
        self.farthest_back = max(self.farthest_back, float(-steps.min()))
        self.longest_pause = max(self.longest_pause, float(steps.max()))
        self.first = min(self.first, float(times.min()))
        self.last = max(self.last, float(times.max()))
        self._before = float(times[-1])
        self.requests += len(ids)
        self.blocks += len(ids)
        self.longest = max(self.longest, 1)
        self._chaining.add_each(ids)


class _Counted:
    """Requests that a survey counts as they are read."""

    def __init__(self, survey: Survey, requests: Iterable[Request]) -> None:
        self._survey, self._requests = survey, requests

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            self._survey.add(request)
            yield request

    def batches(self) -> Iterator[ObjectBatch] | None:
        """Return the rows in arrays, if they are of single objects."""
        found = batches_of(self._requests)
        return None if found is None else self._counted(found)

    def _counted(self, batches: Iterator[ObjectBatch]) -> Iterator[ObjectBatch]:
        for times, ids in batches:
            self._survey._add_each(times, ids)
            yield times, ids
