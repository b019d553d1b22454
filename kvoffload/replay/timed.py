"""A timed replay by the protocol of `serve`; each store completes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from time import perf_counter_ns

from kvoffload import BlockHash, CPUOffloadingManager, OffloadingManager
from kvoffload.traces import Request

from .counts import prompt_tokens
from .device import DeviceCache
from .group_replay import GroupDevice, GroupServer
from .groups import GroupChunks
from .protocol import Served, serve
from .statistics import ReplayResult
from .steps import StepServed, StepServer

PROGRESS_REQUESTS = 64  # between two calls of the progress function


class BlockKeys(dict[int, BlockHash]):
    """A map from block ids to block hashes: id ``i`` to the 32 bytes ``sha256(str(i))``.

    Hashes are cached for at most `REMEMBERED` ids, so that a trace larger than memory does not
    fill it with keys.
    """

    REMEMBERED = 2**18

    def __missing__(self, hash_id: int) -> BlockHash:
        if len(self) >= self.REMEMBERED:
            self.clear()
        key = self[hash_id] = BlockHash(sha256(b"%d" % hash_id).digest())
        return key

    def of(self, request: Request) -> list[BlockHash]:
        """Return the block hashes of a request."""
        return [self[hash_id] for hash_id in request.hash_ids]


def replay(
    requests: Iterable[Request],
    manager: OffloadingManager,
    *,
    block_tokens: int | None = None,
    device: DeviceCache | None = None,
    step_tokens: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> ReplayResult:
    """Drive a manager with the requests of a trace by the protocol of `serve`, or in steps.

    Only the manager's calls are timed, all calls of a request together.

    Parameters
    ----------
    requests : iterable of Request
        The trace; it is iterated over once, and memory does not grow with its length.
    manager : OffloadingManager
        Any manager, usually an empty one.
    block_tokens : int, optional
        Tokens per block, for the share of tokens that were hit.
    device : DeviceCache, optional
        The accelerator's own cache, which is asked first.
    step_tokens : int, optional
        Tokens of a prompt that a scheduler step computes at most: the manager is driven as vLLM's
        scheduler drives its own, by `StepServer`. It needs `block_tokens`, and a
        `CPUOffloadingManager`.
    progress : callable, optional
        Called every 64 requests, between two requests, with the number of requests so far.

    Returns
    -------
    ReplayResult

    Raises
    ------
    TraceError
        As the trace does.
    TypeError, ValueError
        If `step_tokens` is below 1, or is given without what it needs.

    Notes
    -----
    While it is cached, the hash of a block is the same object each time, where an engine would make
    a new one per request; this spares a manager in Python the hashing of the key.
    """
    keys = BlockKeys()
    result = ReplayResult(hit_tokens=None if block_tokens is None else 0)
    times = result.times
    server = None if step_tokens is None else StepServer(manager, block_tokens, step_tokens)
    for request in requests:
        hashes = keys.of(request)
        on_device = 0 if device is None else device.ask(hashes)
        served: Served | StepServed
        start = perf_counter_ns()
        if server is None:
            served = serve(manager, hashes, on_device)
        else:
            served = server.serve(hashes, on_device)
        served.complete()
        times.add(perf_counter_ns() - start)
        result.requests += 1
        result.blocks += len(hashes)
        result.asked += len(hashes) - on_device
        result.tokens += request.input_length
        result.hits += served.hits
        if block_tokens is not None and result.hit_tokens is not None:
            length = request.input_length
            result.hit_tokens += prompt_tokens(on_device, served.hits, block_tokens, length)
        result.stored += len(served.to_store)
        result.evicted += len(served.evicted)
        result.refused += served.refused
        if progress is not None and result.requests % PROGRESS_REQUESTS == 0:
            progress(result.requests)
    result.not_admitted = _not_admitted(manager)
    return result


def replay_groups(
    requests: Iterable[Request],
    manager: CPUOffloadingManager,
    chunks: GroupChunks,
    *,
    device: GroupDevice | None = None,
    progress: Callable[[int], object] | None = None,
) -> ReplayResult:
    """Drive a manager with the requests of a trace, for a model with several KV groups.

    What is timed is `GroupServer.serve`, the rule in Python included, and the end of the stores.

    Parameters
    ----------
    requests, progress
        As in `replay`.
    manager : CPUOffloadingManager
        The manager, whose slots hold chunks of any group.
    chunks : GroupChunks
        The groups, and the rule.
    device : GroupDevice, optional
        The accelerator's own cache, which is asked first.

    Returns
    -------
    ReplayResult
        What was asked for and hit is counted in tokens, what was stored and evicted in slots.

    Raises
    ------
    TraceError
        As the trace does.
    """
    keys = BlockKeys()
    server = GroupServer(chunks, manager)
    result = ReplayResult()
    hit_tokens = 0
    for request in requests:
        hashes = keys.of(request)
        length = chunks.length_of(request.input_length, len(hashes))
        local, junction = (0, 0) if device is None else device.ask(hashes, length)
        start = perf_counter_ns()
        served = server.serve(hashes, length, local, junction)
        server.complete(served)
        result.times.add(perf_counter_ns() - start)
        result.requests += 1
        result.blocks += len(hashes)
        result.asked += served.asked
        result.tokens += request.input_length
        result.hits += served.hits
        hit_tokens += served.hits if request.input_length else 0
        result.stored += len(served.stored)
        result.evicted += len(served.evicted)
        result.refused += served.refused
        result.not_admitted += served.not_admitted
        if progress is not None and result.requests % PROGRESS_REQUESTS == 0:
            progress(result.requests)
    result.hit_tokens = hit_tokens
    return result


def _not_admitted(manager: OffloadingManager) -> int:
    stats = getattr(manager, "stats", None)
    return 0 if stats is None else int(stats().get("not_admitted", 0))
