"""Groups of layers with one kind of cache, and the pool of slots that they share.

An engine divides the layers of a model into groups. A block of any group fills one slot of one
pool, so a slot is as wide as the widest group. A prefix of a prompt has a key per group and chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from kvoffload._checks import check_int

GroupKind = Literal["full", "window", "state", "chunked"]
"""The kind of a group's cache: see `Group`."""

MAX_CHUNK_TOKENS = 2**24
"""Most tokens of a chunk."""

STEP_TOKENS = 8192
"""Most tokens of a prompt that a scheduler step computes, by default."""

MAX_STEP_TOKENS = 2**31 - 1
"""Most tokens of a step."""

_SLOT_ALIGNMENT = 4096  # bytes; pools begin a slot at a multiple


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one kind of cache that are stored together.

    Attributes
    ----------
    kind : {"full", "window", "state", "chunked"}
        The chunks of the group that a hit needs: every chunk; those with the last ``window - 1``
        tokens; the state at its end; or those of the last, incomplete part of `window` tokens.
    layers : int
        Number of layers.
    block_tokens : int
        Tokens per block; for a state, tokens from one state to the next.
    window : int
        Tokens that a layer attends to, for ``"window"`` and ``"chunked"``; else 0.
    """

    kind: GroupKind
    layers: int
    block_tokens: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The groups of a model's cache in an engine's order, and the bytes of a block.

    Attributes
    ----------
    groups : tuple of Group
        The groups; at least one.
    block_bytes : int
        Bytes of a block of the widest group, over all of its layers and workers.

    Raises
    ------
    TypeError, ValueError
        If `block_bytes` is not an integer >= 0.
    """

    groups: tuple[Group, ...]
    block_bytes: int

    def __post_init__(self) -> None:
        check_int("block_bytes", self.block_bytes, 0)

    @property
    def is_sparse(self) -> bool:
        """Whether some groups are windows or states, whose chunks are not all stored."""
        return any(group.kind in ("window", "state") for group in self.groups)

    def slot_bytes(self, blocks_per_chunk: int = 1) -> int:
        """Return the bytes of a slot, which holds a chunk of `blocks_per_chunk` blocks."""
        size = self.block_bytes * blocks_per_chunk
        return -(-size // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


Retention = int | None
"""Prefixes at which a window or a state can be resumed: ``prefix_cache_retention_interval``.

0: only before the last token of a prompt; N tokens: also at the multiples of N; None: at every
chunk.
"""


class ChunkIndex(NamedTuple):
    """A chunk of a group in a prompt."""

    group: int  # index of the group
    chunk: int  # index of the chunk; it ends after ``chunk + 1`` chunks' tokens


Chunks = list[tuple[int, Sequence[int]]]
"""Chunks of a prompt: the index of a group, and those of its chunks, per group."""


class Runs(Protocol):
    """The runs of a prompt's chunks in a cache.

    None stands for a run that the cache fetches from elsewhere: ask again when it has come.
    """

    def leading(self, group: int, start: int, end: int) -> int | None:
        """Return the number of chunks present from `start` on, up to a missing one or `end`."""

    def trailing(self, group: int, start: int, end: int) -> int | None:
        """Return the number of chunks present before `end`, back to a missing one or `start`.

        None only if all of them are present.
        """


@dataclass(frozen=True, slots=True)
class _Rule:
    """A group in tokens of the trace, with kind and window as in `Group`."""

    kind: GroupKind
    window: int
    chunk: int  # tokens
    block: int  # tokens
    span: int  # chunks in a row that a hit needs; 0 for all
    need: int  # blocks in a row stored before a resume point; 0 if everything is stored

    @classmethod
    def of(cls, group: Group, chunk: int, block: int) -> _Rule:
        full = group.kind == "full"
        attended = group.window if group.kind in ("window", "chunked") else 1
        need = {"window": _whole(group.window - 1, block), "state": 1}.get(group.kind, 0)
        return cls(
            group.kind, group.window, chunk, block, 0 if full else _whole(attended, chunk), need
        )

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk // self.block

    def span_before(self, end: int) -> int:
        """Return the number of chunks in a row that the first run before token `end` needs."""
        if self.kind != "window":
            return self.span
        return max(self.span, _whole(self.window - 1 + -end % self.chunk, self.chunk))

    def first_kept(self, tokens: int) -> int:
        """Return the first block that the accelerator keeps of a prefix of `tokens` tokens."""
        if self.kind == "window":
            return max(0, tokens - self.window + 1) // self.block
        if self.kind == "state":
            return max(0, tokens - 1) // self.block
        if self.kind == "chunked":
            return tokens // self.window * self.window // self.block
        return 0


@dataclass(frozen=True, slots=True)
class GroupChunks:
    """Groups whose chunks are blocks of a trace, with the hits, loads and offers of requests.

    A chunk of the group with the smallest blocks is a block of the trace if that consists of whole
    blocks of the groups; otherwise it stands for a chunk of the engine, and `is_exact` is False. No
    chunk is smaller than a block of the trace; the last block of a prompt may be partly filled.

    The rules are those of vLLM's ``OffloadingConnectorScheduler``; none of them needs a manager.

    Attributes
    ----------
    layout : GroupLayout
        The groups.
    block_tokens : int
        Tokens per block of the trace.
    retention : int or None
        As given, tokens of the engine.
    blocks_per_chunk : int
        Blocks of the engine in a chunk: its ``blocks_per_chunk``.
    chunk_tokens : tuple of int
        Tokens per chunk of each group in the trace: multiples of `block_tokens`.
    engine_chunk_tokens : tuple of int
        Tokens per chunk of each group in the engine; those of `chunk_tokens` if `is_exact`.
    align : int or None
        Tokens to whose multiples resume points are floored; None if full groups have chunks of
        several sizes.
    step_tokens : int or None
        Most tokens of a prompt that a scheduler step computes: ``max_num_batched_tokens``. None
        offers a prompt in one call, and its states after each `STEP_TOKENS`.
    is_plain : bool
        Whether these are `of_blocks`: one full group, whose chunks are the blocks of the trace. A
        block that a prompt fills only partly counts as full, and slots are blocks.
    knows_tokens : bool
        Whether the tokens per block are known; else a block counts as one token.
    """

    layout: GroupLayout
    block_tokens: int
    retention: Retention
    blocks_per_chunk: int
    chunk_tokens: tuple[int, ...]
    engine_chunk_tokens: tuple[int, ...]
    align: int | None
    step_tokens: int | None
    is_plain: bool
    knows_tokens: bool
    _rules: tuple[_Rule, ...] = field(repr=False)
    _order: tuple[int, ...] = field(repr=False)  # order of the groups' lookups
    _interval: int = field(repr=False)  # tokens of the trace, 0 for none
    _step_block: int = field(repr=False)  # tokens to whose multiples the engine floors its steps

    @classmethod
    def of(
        cls,
        layout: GroupLayout,
        block_tokens: int,
        retention: Retention = 0,
        *,
        step_tokens: int | None = None,
    ) -> GroupChunks:
        """Bind groups to the blocks of a trace.

        Parameters
        ----------
        layout : GroupLayout
            The groups.
        block_tokens : int
            Tokens per block of the trace, >= 1.
        retention : int or None
            ``prefix_cache_retention_interval``, tokens.
        step_tokens : int, optional
            Most tokens of a prompt that a scheduler step computes, >= 1.

        Raises
        ------
        ValueError
            If `block_tokens` or `step_tokens` is below 1; if `block_tokens` gives a chunk of more
            than 2**24 tokens; or if `retention` is neither 0 nor None nor a multiple that the
            groups allow: the message names the number that it must be a multiple of.
        """
        check_int("block_tokens", block_tokens, 1, MAX_CHUNK_TOKENS)
        if step_tokens is not None:
            check_step_tokens(step_tokens)
        groups = cls._bound(layout, block_tokens, retention, step_tokens)
        largest = max(*groups.chunk_tokens, *groups.engine_chunk_tokens)
        if largest > MAX_CHUNK_TOKENS:
            raise ValueError(
                f"block_tokens must give chunks of at most {MAX_CHUNK_TOKENS} tokens, got "
                f"{block_tokens}, which gives {largest}"
            )
        if retention and not layout.is_sparse:
            raise ValueError(
                "retention must be 0 or none where no group is a window or a state, got "
                f"{retention}"
            )
        multiple = groups.retention_multiple
        if retention and (retention < 0 or retention % multiple):
            raise ValueError(
                f"retention must be 0, none or a multiple of {multiple}, got {retention}"
            )
        return groups

    @classmethod
    def of_blocks(
        cls,
        block_tokens: int | None = None,
        *,
        block_bytes: int = 0,
        step_tokens: int | None = None,
    ) -> GroupChunks:
        """Return the one full group of a model whose every layer attends to the whole prompt.

        Parameters
        ----------
        block_tokens : int, optional
            Tokens per block of the trace, 1 ... 2**24, if known.
        block_bytes : int
            Bytes of a block, if known.
        step_tokens : int, optional
            Most tokens of a prompt that a scheduler step computes, >= 1; it needs `block_tokens`.

        Raises
        ------
        ValueError
            If an argument breaks its rule.
        """
        if step_tokens is not None:
            if block_tokens is None:
                message = f"block_tokens must go with step_tokens, got {step_tokens} without"
                raise ValueError(message)
            check_step_tokens(step_tokens)
        size = 1 if block_tokens is None else block_tokens
        check_int("block_tokens", size, 1, MAX_CHUNK_TOKENS)
        layout = GroupLayout((Group("full", 1, size),), block_bytes)
        knows = block_tokens is not None
        return cls._bound(layout, size, 0, step_tokens, is_plain=True, knows_tokens=knows)

    @classmethod
    def _bound(
        cls,
        layout: GroupLayout,
        block_tokens: int,
        retention: Retention,
        step_tokens: int | None,
        *,
        is_plain: bool = False,
        knows_tokens: bool = True,
    ) -> GroupChunks:
        """Bind groups to the blocks of a trace, with arguments that were checked."""
        blocks = [group.block_tokens for group in layout.groups]
        unit = math.gcd(*blocks)
        smallest = block_tokens * max(1, (2 * unit + block_tokens) // (2 * block_tokens))
        blocks_per_chunk = max(1, (2 * smallest + unit) // (2 * unit))
        chunks = tuple(block // unit * smallest for block in blocks)
        engine_chunks = tuple(block * blocks_per_chunk for block in blocks)
        rules = tuple(
            _Rule.of(group, chunk, group.block_tokens if chunks == engine_chunks else chunk)
            for group, chunk in zip(layout.groups, chunks, strict=True)
        )
        spans = [rule.span for rule in rules]
        of_full = {rule.chunk for rule in rules if not rule.span}
        return cls(
            layout=layout,
            block_tokens=block_tokens,
            retention=retention,
            blocks_per_chunk=blocks_per_chunk,
            chunk_tokens=chunks,
            engine_chunk_tokens=engine_chunks,
            align=max(of_full or chunks) if len(of_full) < 2 else None,
            step_tokens=step_tokens,
            is_plain=is_plain,
            knows_tokens=knows_tokens,
            _rules=rules,
            _order=tuple(sorted(range(len(rules)), key=lambda g: (spans[g] > 0, -spans[g]))),
            _interval=(retention or 0) // math.gcd(*engine_chunks) * math.gcd(*chunks),
            _step_block=math.lcm(*(rule.block for rule in rules)),
        )

    @property
    def is_exact(self) -> bool:
        """Whether the trace's chunks are the engine's; otherwise they stand for them."""
        return self.chunk_tokens == self.engine_chunk_tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, which holds a chunk of any group."""
        return (
            self.layout.block_bytes
            if self.is_plain
            else self.layout.slot_bytes(self.blocks_per_chunk)
        )

    @property
    def slot_name(self) -> str:
        """The word for a slot: ``"block"`` if it holds a block of the trace, else ``"slot"``."""
        return "block" if self.is_plain else "slot"

    @property
    def hit_name(self) -> str:
        """The unit of hits: ``"blocks"`` or ``"tokens"``."""
        return "blocks" if self.is_plain else "tokens"

    @property
    def hit_unit(self) -> int:
        """Tokens per unit of hits: those of a block, or 1."""
        return self.block_tokens if self.is_plain else 1

    @property
    def num_full(self) -> int:
        """Number of full groups."""
        return len(self.full_chunk_tokens)

    @property
    def full_chunk_tokens(self) -> tuple[int, ...]:
        """Tokens per chunk in the trace of each full group."""
        pairs = zip(self.layout.groups, self.chunk_tokens, strict=True)
        return tuple(tokens for group, tokens in pairs if group.kind == "full")

    @property
    def retention_multiple(self) -> int:
        """Tokens of which a retention interval is a multiple."""
        groups = self.layout.groups
        pairs = zip(groups, self.engine_chunk_tokens, strict=True)
        chunks = (tokens for group, tokens in pairs if group.kind != "full")
        return math.lcm(*(group.block_tokens for group in groups), *chunks)

    def is_bounded(self, *, junctions: bool) -> bool:
        """Return whether an unbounded cache is an upper bound of every policy's hits.

        A policy with more hits computes less, and windows and states are stored only of computed
        tokens. So a policy with fewer hits may store chunks that hit later: states at the ends of
        the steps of a longer computation, which count at an interval other than 0, and resume
        points that the accelerator's cache makes inside the hit, its junctions.
        """
        if not self.layout.is_sparse:
            return True
        has_states = any(group.kind == "state" for group in self.layout.groups)
        return not junctions and (self.retention == 0 or not has_states)

    def length_of(self, input_length: int, num_blocks: int) -> int:
        """Return the tokens of a prompt with a number of blocks in the trace.

        An unknown length, 0 with blocks, becomes that of the blocks plus one token; a length beyond
        the blocks is cut before the next block. If blocks count as full, it is that of the blocks.
        """
        known = num_blocks * self.block_tokens
        if self.is_plain or not (input_length or num_blocks):
            return known
        return min(input_length or known + 1, known + self.block_tokens - 1)

    # -- loads -----------------------------------------------------------------------------

    def hit(self, length: int, local: int, runs: Runs) -> int | None:
        """Return the number of tokens after the first `local` ones that can be loaded.

        None if that depends on runs that are being fetched. As in vLLM, they lower no limit until
        they have come, and the other groups are asked meanwhile.

        Parameters
        ----------
        length : int
            Tokens of the prompt.
        local : int
            Leading tokens that the accelerator has.
        runs : Runs
            The runs of the chunks present.
        """
        rules = self._rules
        limit = length
        if any(rule.span for rule in rules):
            limit -= 1  # one token is left to compute
        for rule in rules:
            if rule.kind == "state":
                limit -= limit % rule.chunk
        hit = 0
        is_known = True
        groups = self._order
        while groups:
            asked, groups = groups, ()
            asked_sparse = False
            for group in asked:
                rule = rules[group]
                chunk, keys = rule.chunk, length // rule.chunk
                limit = min(limit, keys * chunk)
                if limit - local < chunk:
                    return 0
                start = local // chunk
                if rule.span:
                    count = _last_run(runs, group, rule, local, limit)
                else:
                    count = runs.leading(group, start, _whole(limit, chunk))
                if count == 0:
                    return 0
                if count is None:
                    is_known = False
                else:
                    limit = min(limit, chunk * (start + count))
                if limit - local < chunk:
                    return 0
                if limit - local < hit:
                    if not is_known:
                        is_known, groups = True, self._order
                    elif asked_sparse and not groups:
                        groups = tuple(other for other in self._order if rules[other].span)
                asked_sparse = asked_sparse or rule.span > 0
                hit = limit - local
        return hit if is_known else None

    def loaded(self, local: int, hit: int) -> list[ChunkIndex]:
        """Return the chunks that are loaded for `hit` tokens after the first `local` ones."""
        return _indexes(self.loaded_chunks(local, hit))

    def loaded_chunks(self, local: int, hit: int) -> Chunks:
        """Return the result of `loaded`, with the chunks of each group together."""
        end = local + hit
        found: Chunks = []
        for group, rule in enumerate(self._rules):
            first = max(_whole(local, rule.block), rule.first_kept(end))
            if hit and first < _whole(end, rule.block):
                found.append(
                    (group, range(first // rule.blocks_per_chunk, _whole(end, rule.chunk)))
                )
        return found

    def loaded_tokens(self, index: ChunkIndex, local: int, hit: int) -> range:
        """Return the loaded tokens that a loaded chunk serves: a state serves all of them."""
        rule, end = self._rules[index.group], local + hit
        if rule.kind == "state":
            return range(local, end)
        first = max(_whole(local, rule.block), rule.first_kept(end)) * rule.block
        start = index.chunk * rule.chunk
        return range(max(first, start), min(end, start + rule.chunk))

    # -- offers ----------------------------------------------------------------------------

    def offers(
        self, length: int, local: int, hit: int, junction: int = 0
    ) -> list[list[ChunkIndex]]:
        """Return the chunks that are offered to store, in order, one list per call.

        Parameters
        ----------
        length, local, hit
            As in `hit`, and its result.
        junction : int
            Leading tokens that the accelerator's full groups have if others have fewer; else 0.
        """
        steps = self.offers_by_step(length, local, hit, junction)
        return [_indexes(call) for _, calls in steps for call in calls]

    def offers_by_step(
        self, length: int, local: int, hit: int, junction: int = 0
    ) -> Iterator[tuple[int, list[Chunks]]]:
        """Yield the number of each scheduler step with offers, and its calls; see `offers`."""
        kept = local + hit
        length = max(length, kept + bool(kept))  # if all is cached, one token is computed
        starts = [_whole(kept, rule.chunk) if hit else 0 for rule in self._rules]
        # A loaded state that is a resume point is offered with those of the first step.
        ends = [kept] if hit else []
        for step, end in self._step_ends(length, kept, junction):
            calls: list[Chunks] = [
                [(index.group, [index.chunk])]
                for index in self._states(length, [*ends, end], junction)
            ]
            ends = []
            call: Chunks = []
            for group, rule in enumerate(self._rules):
                if rule.kind == "state":
                    continue
                start, stop = starts[group], end // rule.chunk
                first = rule.first_kept(kept)
                chunks: Sequence[int] = range(start, stop)
                if rule.kind != "full":
                    chunks = [
                        chunk
                        for chunk in self._stored(rule, start, stop, length, junction)
                        if chunk * rule.blocks_per_chunk >= first
                        or self._is_kept(rule, chunk, first, length, junction)
                    ]
                if chunks:
                    call.append((group, chunks))
                starts[group] = max(start, stop)
            if call:
                calls.append(call)
            if calls:
                yield step, calls

    # -- the accelerator's own cache ---------------------------------------------------------

    def local(self, length: int, is_there: Callable[[ChunkIndex], bool]) -> tuple[int, int]:
        """Return the leading tokens that the accelerator has, and the junction.

        Parameters
        ----------
        length : int
            Tokens of the prompt.
        is_there : callable
            Returns whether a chunk is in the accelerator's cache.
        """
        align = math.lcm(*self.chunk_tokens)
        kinds: dict[_Rule, list[int]] = {}
        for group in self._order[: self.num_full] + tuple(range(len(self._rules))):
            groups = kinds.setdefault(self._rules[group], [])
            if group not in groups:
                groups.append(group)
        hit, longest = max(0, length - 1), 0
        of_full: dict[_Rule, int] = {}
        while True:
            found = hit
            for rule, groups in kinds.items():
                if rule in of_full:
                    found = min(found, of_full[rule])
                    continue

                def has(chunk: int, groups: list[int] = groups) -> bool:
                    return all(is_there(ChunkIndex(group, chunk)) for group in groups)

                found = _local_hit(rule, found, align, has)
                if rule.kind == "full":
                    of_full[rule] = found
                longest = max(longest, found)
            if found >= hit or (len(kinds) == 2 and of_full):
                break
            hit = found
        return found, longest if longest > found else 0

    def left_on_device(self, length: int, junction: int = 0) -> list[ChunkIndex]:
        """Return the chunks that a prompt leaves in the accelerator's cache, head first."""
        indexes = [
            ChunkIndex(group, chunk)
            for group, rule in enumerate(self._rules)
            if rule.kind != "state"
            for chunk in self._stored(rule, 0, length // rule.chunk, length, junction)
        ]
        for _, end in self._step_ends(length, 0, junction):
            indexes.extend(self._states(length, [end], junction))
        tokens = self.chunk_tokens
        return sorted(indexes, key=lambda index: ((index.chunk + 1) * tokens[index.group], index))

    def kept_on_device(self, indexes: list[ChunkIndex], tokens: int) -> list[ChunkIndex]:
        """Return those of some chunks that a request has if `tokens` need not be computed."""
        return [
            index
            for index in indexes
            if index.chunk * self._rules[index.group].blocks_per_chunk
            >= self._rules[index.group].first_kept(tokens)
        ]

    # -- parts -------------------------------------------------------------------------------

    def _step_ends(self, length: int, start: int, junction: int) -> Iterator[tuple[int, int]]:
        """Yield each relevant step, counted from 1, and the tokens present after it.

        A state exists only at the end of a step, so with states the engine ends steps at its
        blocks. Without states and without `step_tokens` the calls of several steps count as one.
        """
        if not any(rule.kind == "state" for rule in self._rules):
            step = length if self.step_tokens is None else self.step_tokens
            yield from step_ends(length, start, max(1, step), self.block_tokens)
            return
        block = self._step_block
        step = max(block, self.step_tokens or STEP_TOKENS)
        for count in itertools.count(1):
            if start >= length:
                return
            end = min(start + step, length)
            if end < length:
                end = end // block * block
            stops = [(length - 1) // block * block]
            if start % block:
                stops.append((start // block + 1) * block)
            if start < junction < end:
                stops.append(start + (junction - start) // block * block)
            end = min((stop for stop in stops if start < stop < end), default=end)
            yield count, end
            start = end

    def _states(self, length: int, ends: list[int], junction: int) -> Iterator[ChunkIndex]:
        """Yield the stored states after a number of tokens, each group's in order."""
        block = self._step_block
        points = {point // block * block for point in (length - 1, junction)}
        for group, rule in enumerate(self._rules):
            for end in ends if rule.kind == "state" else ():
                every = rule.block if self.retention is None else self._interval
                is_stored = end in points or (every and end % every == 0)
                if is_stored and end % rule.chunk == 0:
                    yield ChunkIndex(group, end // rule.chunk - 1)

    def _stored(
        self, rule: _Rule, start: int, end: int, length: int, junction: int
    ) -> Iterator[int]:
        """Yield the chunks of a group from `start` to before `end` that are ever stored."""
        before = start
        for first, last in self._reachable(rule, start, end, length, junction):
            size = rule.blocks_per_chunk
            for chunk in range(max(before, first // size), min(end, _whole(last, size))):
                yield chunk
                before = chunk + 1

    def _is_kept(self, rule: _Rule, chunk: int, first: int, length: int, junction: int) -> bool:
        """Return whether the accelerator has the stored blocks of a chunk from block `first` on."""
        size = rule.blocks_per_chunk
        if (chunk + 1) * size <= first:
            return False
        return all(
            min(stop, first) <= max(start, chunk * size)
            for start, stop in self._reachable(rule, chunk, chunk + 1, length, junction)
        )

    def _reachable(
        self, rule: _Rule, start: int, end: int, length: int, junction: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the stored blocks of the chunks in the half-open range `start`, `end`, in order.

        Each item is a half-open range of blocks; ranges may overlap.
        """
        size, align = rule.blocks_per_chunk, self.align
        first, last = start * size, end * size
        every = align if self.retention is None else self._interval
        segment = (every or 0) // rule.block
        if (
            rule.kind != "window"
            or align is None
            or align % rule.block
            or (segment and rule.need >= segment)
        ):
            yield first, last
            return
        tails: set[int] = set()
        if segment:
            tails.update(range(_whole(first, segment) * segment, last + segment, segment))
        if self.retention is None:
            horizon = length // rule.chunk * size
            tails.add(horizon)
            cut = horizon // segment * segment  # the last, shorter segment has its own tail
        else:
            tails.update(point // align * align // rule.block for point in (length - 1, junction))
            cut = 0
        for tail in sorted(tails):
            begin = max(tail - rule.need, cut if tail > cut else 0, first)
            if begin < min(tail, last):
                yield begin, min(tail, last)


def _indexes(chunks: Chunks) -> list[ChunkIndex]:
    return [ChunkIndex(group, chunk) for group, indexes in chunks for chunk in indexes]


def _whole(tokens: int, size: int) -> int:
    """Return the number of pieces of `size` that hold `tokens`."""
    return -(-tokens // size)


def _local_hit(rule: _Rule, limit: int, align: int, has: Callable[[int], bool]) -> int:
    """Return the longest prefix of up to `limit` tokens, a multiple of `align`, that groups have.

    A chunk is a block here.
    """
    size = rule.chunk
    if rule.kind in ("full", "chunked"):
        first = limit // rule.window * rule.window // size if rule.window else 0
        chunks = range(first, limit // size)
        found = next((chunk for chunk in chunks if not has(chunk)), limit // size)
        return max(first, found) * size // align * align
    needed = 1 if rule.kind == "state" else max(1, _whole(rule.window - 1, size))
    run = 0
    for chunk in range(limit // size - 1, -1, -1):
        if not has(chunk):
            run = 0
        elif run or (chunk + 1) * size % align == 0:
            run += 1
            if run == needed:
                return (chunk + run) * size
    return run * size // align * align


def _last_run(runs: Runs, group: int, rule: _Rule, local: int, limit: int) -> int | None:
    """Return the end of the last run of chunks before `limit` that is long enough, or 0.

    None if it is being fetched.

    A run that reaches the chunk at `local`, from which chunks are counted, is long enough.
    """
    start, end = local // rule.chunk, _whole(limit, rule.chunk)
    needed = rule.span_before(limit)
    while end > start:
        run = runs.trailing(group, max(start, end - needed), end)
        if run is None:
            return None
        if run == needed or end - run == start:
            return end - start
        end -= run + 1
        needed = rule.span
    return 0


def check_step_tokens(step_tokens: int) -> None:
    """Raise TypeError or ValueError unless these are valid tokens of a step."""
    check_int("step_tokens", step_tokens, 1, MAX_STEP_TOKENS)


def step_ends(length: int, start: int, step: int, unit: int) -> Iterator[tuple[int, int]]:
    """Yield the steps that end after another multiple of `unit`, and the last one.

    A step computes at most `step` of the `length` tokens of a prompt, of which `start` need none.
    Yields the number of the step, and the tokens present after it.
    """
    count, end = 0, start
    while end < length:
        behind = min((end // unit + 1) * unit, length)
        count = -(-(behind - start) // step)
        end = min(start + count * step, length)
        yield count, end
