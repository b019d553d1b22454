"""Documentation, constructor and properties of hit density, for both twins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvoffload._checks import check_cache_capacity
from kvoffload.types import MOST_SOURCES, BlockHash, BlockStatus, HintGain, HintSource

from . import registry
from ._learned import NUM_CLASSES, Learned
from ._views import BlocksView

# The numbers of sources before it mean none and several sessions.
FIRST_SOURCE = 2
# A miniature has at least this many blocks while at least one block in eight is sampled ...
_LEAST_BLOCKS = 64
_MOST_SHIFT = 3
# ... and fewer than this many, however small the sample then is.
_BLOCKS_BOUND = 512
# The hand walks through a sample of at least this many blocks of the capacity, if there are.
_LEAST_WALKED = 1024


def sample_shift(capacity: int) -> int:
    """Return s such that one block in ``2**s`` is sampled for a cache of `capacity` blocks."""
    shift = 0
    while capacity >> shift >= 2 * _LEAST_BLOCKS and shift < _MOST_SHIFT:
        shift += 1
    while capacity >> shift >= _BLOCKS_BOUND:
        shift += 1
    return shift


def walk_shift(capacity: int) -> int:
    """Return s such that the hand meets one block in ``2**s`` of a cache of `capacity` blocks."""
    shift = 0
    while capacity >> shift >= 2 * _LEAST_WALKED:
        shift += 1
    return shift


class HitDensity:
    """A policy that evicts the block with the fewest expected hits, and stores none with fewer.

    Parameters
    ----------
    cache_capacity : int
        Number of blocks that the manager has room for.
    ghosts : float
        Number of evicted or never stored blocks to remember per block of capacity.
    guard : int
        1 to evict by recency while a sample of the blocks does better under it, 0 never to.

    References
    ----------
    Beckmann, Chen & Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.
    """

    __slots__ = ()

    _open: Callable[..., None]
    _require_ready: Callable[[], None]
    _ghosts_per_block: float
    _learned: Learned
    _rule: str
    _sources: Mapping[str, Sequence[int]]
    _trial_hits: Callable[[], Mapping[str, float]]
    _hint_gain: Callable[[], HintGain | None]
    _row_without_hints: Callable[[int], Sequence[float]]

    def __init__(self, cache_capacity: int, *, ghosts: float = 3.5, guard: int = 1) -> None:
        capacity = check_cache_capacity(cache_capacity)
        option = registry.entry("hit-density").option
        self._open(capacity, option("ghosts").check(ghosts), option("guard").check(guard))

    @property
    def ghosts(self) -> float:
        """Number of ghosts per block of capacity, as given."""
        self._require_ready()
        return self._ghosts_per_block

    @property
    def guard(self) -> int:
        """Whether recency may be the rule, as given; 0 if the capacity is 0."""
        return int(bool(self._trial_hits()))

    @property
    def rule(self) -> str:
        """The rule by which blocks leave: ``hit-density`` or ``lru``."""
        self._require_ready()
        return self._rule

    @property
    def trial_hits(self) -> Mapping[str, float]:
        """Recent hits of the small cache of each rule, fading; empty without a guard."""
        return self._trial_hits()

    @property
    def hint_sources(self) -> tuple[HintSource, ...]:
        """Facts on each source that says when sessions return, in the order of first hints.

        16 are distinguished; an entry without a name after them stands for all others.
        """
        self._require_ready()
        found = []
        for number, (name, (hints, returns)) in enumerate([*self._sources.items()]):
            factors = self._learned.factors(FIRST_SOURCE + number)
            known = name if number < MOST_SOURCES else None
            found.append(HintSource(known, hints, returns, tuple(factors)))
        return tuple(found)

    @property
    def hint_gain(self) -> HintGain | None:
        """Gain by hints of returns, compared from the first time that this is read after a hint.

        None without a guard, a hint, or enough requests since.
        """
        return self._hint_gain()

    @property
    def num_requests(self) -> int:
        """Number of requests so far, the unit of ages."""
        self._require_ready()
        return self._learned.request

    @property
    def rings(self) -> tuple[Mapping[BlockHash, BlockStatus], ...]:
        """Resident blocks by class, with their live statuses, least recent first; read-only."""
        return tuple(BlocksView(self, reuse_class) for reuse_class in range(NUM_CLASSES))

    @property
    def densities(self) -> tuple[tuple[float, ...], ...]:
        """Expected hits per block and request without hints, by class and by bin of age."""
        return tuple(tuple(self._row_without_hints(number)) for number in range(NUM_CLASSES))
