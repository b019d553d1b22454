"""The tiers of ``kvoffload.tiers`` as secondary tiers of vLLM's ``TieringOffloadingManager``.

vLLM loads the classes by name, from ``secondary_tiers`` in ``kv_connector_extra_config``:
``{"type": "KVOffloadFileTier", "module_path": "kvoffload.integrations.vllm", "path": "/nvme/kv",
"capacity_bytes": 2000000000000}``.

Structure
    `SecondaryTier` translates vLLM's jobs to those of a `Tier`, statuses to results, a request's
    end to an access, and counters and events to vLLM's. Its subclasses open the tiers.
Invariants
    Every job that vLLM submits is reported once. An error of a tier is a failed job or a miss,
    never an exception in a call of the scheduler; if the end of a job cannot be processed, that job
    has failed, and no other is touched. A tier that refuses to go on is closed, which ends its
    jobs. A chunk that failed to load is a miss for its request, so that no request waits forever.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload._checks import check_bool
from kvoffload._metrics import TIER_METRICS, TIER_PREFIX, Metric
from kvoffload.errors import describe
from kvoffload.integrations.tiers import check_text, close, opening
from kvoffload.tiers import (
    Done,
    FileTier,
    Namespace,
    Region,
    State,
    Status,
    Tier,
    open_tier,
    weights_identity,
)
from kvoffload.tiers.generation import GenerationSource

from . import _upstream as vllm
from ._manager_c import hints_of  # type: ignore[import-not-found]
from ._upstream import __version__ as vllm_version
from .tiering import chain_of, positions_of
from .watching import ENGINE_PREFIX, definition

vllm.check_tiering()  # also parts that these imports do not check

WAIT_LOG_S = 5.0
"""Seconds between two log lines while a reset waits for jobs."""
ERROR_LOG_S = 60.0
"""Minimum seconds between log lines about a tier's exceptions."""
MAX_TIMES = 10_000
"""Most times of jobs that are kept until vLLM takes them."""

_RESULTS: dict[int, vllm.LookupResult] = {
    State.HIT: vllm.LookupResult.HIT,
    State.MISS: vllm.LookupResult.MISS,
    State.UNKNOWN: vllm.LookupResult.RETRY,
}
# Statuses of a successful put: declined chunks are not errors.
_STORED = (Status.OK, Status.DECLINED)


def namespace_of(
    config: vllm.OffloadingConfig,
    block_bytes: int,
    *,
    weights_id: str | None = None,
    revision: str | None = None,
    salt: str = "",
) -> Namespace:
    """Return the namespace of a chunk, as far as vLLM's configuration allows.

    Parameters
    ----------
    config, block_bytes
        From vLLM, and the bytes per chunk of all workers together.
    weights_id : str, optional
        Identity of the weights; by default `weights_identity` of the model's name.
    revision : str, optional
        The requested revision, if the model's name is not a directory.
    salt : str
        Anything else that keeps namespaces apart.

    Notes
    -----
    The namespace has vLLM's version up to the second number, and the sizes of the parallel groups
    unless the bytes do not depend on them. Raise TypeError or ValueError if an option is wrong.
    """
    for name, value in (("weights_id", weights_id), ("revision", revision), ("salt", salt)):
        check_text(name, value)
    if weights_id == "":
        raise ValueError("weights_id must not be empty, got ''")
    parallel, cache = config.parallel, config.cache
    canonical = None
    if config.canonical_layout and config.kv_cache_layout is not None:
        canonical = vllm.canonical_format_id(config.kv_cache_layout)
    is_portable = parallel.is_parallelism_agnostic or config.replicated_layout
    tokens = config.groups[0].tokens_per_block if config.groups else cache.tokens_per_hash
    return Namespace(
        model=config.model.name,
        block_bytes=block_bytes,
        engine=f"vllm {'.'.join(vllm_version.split('.')[:2])}",
        weights=weights_identity(config.model.name, revision) if weights_id is None else weights_id,
        kv_dtype=config.model.dtype,
        layout={
            "canonical": canonical,
            "kv_cache": config.kv_cache_layout,
            "replicated": config.replicated_layout,
            "blocks_per_chunk": cache.blocks_per_chunk,
        },
        groups=[[group.tokens_per_block, *group.layer_names] for group in config.groups],
        hash_seed=os.environ.get("PYTHONHASHSEED"),
        tokens_per_hash=cache.tokens_per_hash,
        tokens_per_block=tokens * cache.blocks_per_chunk,
        parallel=None
        if is_portable
        else {
            "tensor": parallel.tp_size,
            "pipeline": parallel.pp_size,
            "prefill_context": parallel.pcp_size,
            "decode_context": parallel.dcp_size,
            "workers": parallel.world_size,
        },
        salt=salt or "",
    )


@dataclass(slots=True)
class _Request:
    """The state of one request."""

    failed: set[bytes] = field(default_factory=set)  # chunks that could not be loaded for it
    answers: dict[bytes, bool | None] = field(default_factory=dict)  # by chunk; None: no answer yet
    stored: set[bytes] = field(default_factory=set)  # chunks of its stores
    prompt_until: int = 0  # last token position when it first looked up; 0: it has not


class _Transfer(NamedTuple):
    """A job of vLLM in the tier."""

    job_id: int
    keys: list[bytes]
    request_id: str | None  # of a load


class SecondaryTier(vllm.SecondaryTierManager):  # type: ignore[misc]
    """A `Tier` below vLLM's primary tier, which subclasses open.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        From vLLM.
    opener : callable
        Opens the tier; its keywords are `namespace`, `enable_events` and `generation`.
    on_reset : str
        Effect of a reset of vLLM's caches, for example after new weights: ``"forget"`` gives the
        tier another generation, so that it serves nothing of before; ``"keep"`` none, like vLLM's
        own tiers.
    generation, generation_file
        The weights' name at the start (see `Tier.forget`), or a file that has it. The file is read
        again at each reset; without one, the generation after a reset is random.
    weights_id, revision, salt
        As for `namespace_of`.
    enable_kv_events : bool
        Whether to emit KV events; needs vLLM's own to be enabled.
    locality : str, optional
        ``"LOCAL"`` or ``"REMOTE"``, for vLLM's filters and events.
    **unknown
        Not allowed: the error names them.

    Attributes
    ----------
    tier : Tier
        The tier.
    namespace : Namespace
        The namespace of the bytes.

    Raises
    ------
    TypeError, ValueError
        If an option is wrong.
    TierError
        If the tier cannot be opened.

    Notes
    -----
    Thread-safety: as in vLLM, callers hold the manager's lock. Complexity: linear in the keys
    of a call; `lookup` is O(1), a request's first lookup of a remote tier linear in its chunks.
    """

    medium: ClassVar[vllm.Medium] = vllm.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        opener: Callable[..., Tier],
        *,
        on_reset: str = "forget",
        generation: str = "",
        generation_file: str | None = None,
        weights_id: str | None = None,
        revision: str | None = None,
        salt: str = "",
        enable_kv_events: bool = False,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ValueError(f"{tier_type} has unknown keys: {', '.join(sorted(unknown))}")
        if on_reset not in ("forget", "keep"):
            raise ValueError(f"on_reset must be 'forget' or 'keep', got {describe(on_reset)}")
        if locality not in (None, *(known.value for known in vllm.Locality)):
            named = " or ".join(known.value for known in vllm.Locality)
            raise ValueError(f"locality must be a Locality, {named}, got {describe(locality)}")
        check_bool("enable_kv_events", enable_kv_events)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else vllm.Locality(locality)
        self._forgets = on_reset == "forget"
        self._emits = _emits_events(offloading_spec, tier_type, enable_kv_events)
        self.namespace = namespace_of(
            offloading_spec.config,
            self.block_size_bytes,
            weights_id=weights_id,
            revision=revision,
            salt=salt,
        )
        self._requests: dict[str, _Request] = {}
        self._transfers: dict[int, _Transfer] = {}  # job of the tier -> job of vLLM
        self._queries: dict[int, tuple[str, list[bytes]]] = {}  # job -> request, keys
        self._finished: list[vllm.JobResult] = []
        self._times: deque[tuple[str, float]] = deque(maxlen=MAX_TIMES)
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}  # reported to vLLM
        self._log_error_at = 0.0
        self._generations = GenerationSource(generation, generation_file)
        tier = opener(
            namespace=self.namespace,
            enable_events=self._emits,
            generation=self._generations.first,
        )
        with opening(tier) as self.tier:
            tier.attach(Region(primary_kv_view, self.block_size_bytes))
        vllm.logger.info(
            "kvoffload: tier %r (%s) active, namespace %s, %s chunks found",
            self.tier.name,
            tier_type,
            self.namespace.fingerprint.hex(),
            self.tier.stats().get("restored", "unknown"),
        )

    # -- requests ----------------------------------------------------------------------------

    def on_new_request(self, req_context: vllm.ReqContext) -> vllm.RequestOffloadingContext:
        """Register a request, whose chunks are offloaded when they are ready."""
        self._requests.setdefault(req_context.req_id, _Request())
        return vllm.RequestOffloadingContext()

    def on_request_finished(self, req_context: vllm.ReqContext) -> None:
        """Count all chunks of the request as one access.

        If its session ends, the chunks that no other session shares are released.
        """
        request = self._requests.pop(req_context.req_id, None) or _Request()
        chain = chain_of(req_context)
        self.touch(chain, req_context)
        try:
            positions = positions_of(req_context)
            last = [positions[key] for key in chain[-1:]]
            if request.prompt_until:
                last.append(request.prompt_until)
            num_last = sum(position >= min(last) for position in positions.values())
            self.tier.end_request(chain, request.stored, num_last)
            hints, _ = hints_of(req_context)
            if hints is not None and hints.ends:
                self.tier.release(chain)
        except Exception as error:  # noqa: BLE001
            self._log_error("release", error)

    def touch(self, keys: Collection[vllm.OffloadKey], req_context: vllm.ReqContext) -> None:  # noqa: ARG002
        """Mark chunks as recently used."""
        try:
            self.tier.touch(keys)
        except Exception as error:  # noqa: BLE001  (a user's policy may raise any exception)
            self._log_error("touch", error)

    def lookup(self, key: vllm.OffloadKey, req_context: vllm.ReqContext) -> vllm.LookupResult:
        """Return whether a chunk is present: HIT, MISS, or RETRY while a query is under way."""
        request = self._requests.get(req_context.req_id)
        if request is not None:
            if key in request.failed:
                return vllm.LookupResult.MISS
            if not request.prompt_until:
                request.prompt_until = max(positions_of(req_context).values(), default=0)
        try:
            state = self.tier.state(key)
            if state == State.UNKNOWN:
                state = self._ask(key, req_context)
        except Exception as error:  # noqa: BLE001
            self._log_error("lookup", error)
            return vllm.LookupResult.MISS
        return _RESULTS[state]

    def _ask(self, key: bytes, req_context: vllm.ReqContext) -> State:
        """Query all chunks of a request at once, or return the answer for one."""
        request = self._requests.setdefault(req_context.req_id, _Request())
        if key not in request.answers:
            chain = dict.fromkeys([*chain_of(req_context), key])
            wanted = [one for one in chain if one not in request.answers]
            job = self.tier.query(wanted)
            self._queries[job] = (req_context.req_id, wanted)
            request.answers.update(dict.fromkeys(wanted))
            self._collect()  # a tier with an open breaker answers at once
        answer = request.answers.get(key)
        if answer is None:
            return State.UNKNOWN
        return State.HIT if answer else State.MISS

    # -- jobs --------------------------------------------------------------------------------

    def submit_store(self, job_metadata: vllm.TransferJob) -> None:
        """Start to store chunks; those that are present are not written again."""
        request = self._requests.get(job_metadata.req_context.req_id)
        if request is not None:
            request.stored.update(job_metadata.keys)
        self._submit(self.tier.put, job_metadata, None)

    def submit_load(self, job_metadata: vllm.TransferJob) -> None:
        """Start to load chunks into the primary tier."""
        self._submit(self.tier.get, job_metadata, job_metadata.req_context.req_id)

    def _submit(
        self,
        submit: Callable[[list[bytes], Any], int],
        job_metadata: vllm.TransferJob,
        request_id: str | None,
    ) -> None:
        transfer = _Transfer(job_metadata.job_id, list(job_metadata.keys), request_id)
        try:
            job = submit(transfer.keys, np.asarray(job_metadata.chunk_ids))
        except Exception as error:  # noqa: BLE001  (a user's policy may raise any exception)
            self._log_error("store" if request_id is None else "load", error)
            self._fail(transfer)
        else:
            self._transfers[job] = transfer

    def get_finished_jobs(self) -> Iterable[vllm.JobResult]:
        """Return the jobs that ended since the last call."""
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def _collect(self) -> None:
        try:
            ends = self.tier.poll()
        except Exception as error:  # noqa: BLE001
            self._give_up("poll", error)
        else:
            self._take_in(ends)

    def _take_in(self, ends: list[Done]) -> None:
        """Process the ends of jobs."""
        for done in ends:
            query = self._queries.pop(done.job, None)
            transfer = self._transfers.pop(done.job, None)
            try:
                self._times.append((done.op, done.seconds))
                if query is not None:
                    self._answer(*query, done.status == Status.OK)
                elif transfer is not None:
                    self._finished.append(self._result(transfer, done))
            except Exception as error:  # noqa: BLE001
                self._log_error("end of a job", error)
                if query is not None:
                    self._answer(*query, np.zeros(len(query[1]), bool))
                elif transfer is not None:
                    self._fail(transfer)

    def _give_up(self, what: str, error: Exception, direct_s: float = 0.0) -> None:
        """Close a tier that refuses to go on, which ends its jobs: it has nothing from now on.

        Calls of a direct tier may still use the primary tier's memory: if they do not return in
        `direct_s` seconds, the jobs end at a later call.
        """
        self._log_error(what, error)
        self.tier.close(direct_s if self.tier.direct else 0.0)
        self._take_in(self.tier.poll())

    def _answer(self, request_id: str, keys: list[bytes], are_there: npt.NDArray[np.bool_]) -> None:
        """Record the answers to a request's query."""
        request = self._requests.get(request_id)
        if request is not None:
            request.answers.update(zip(keys, are_there.tolist(), strict=True))

    def _fail(self, transfer: _Transfer) -> None:
        """Report a job of vLLM as failed."""
        self._failed(transfer.request_id, transfer.keys)
        self._finished.append(vllm.JobResult(job_id=transfer.job_id, success=False))

    def _result(self, transfer: _Transfer, done: Done) -> vllm.JobResult:
        is_load = transfer.request_id is not None
        found = np.isin(done.status, Status.OK if is_load else _STORED).tolist()
        successful: tuple[bytes, ...] = ()
        if is_load and not all(found):
            pairs = list(zip(transfer.keys, found, strict=True))
            self._failed(transfer.request_id, [key for key, is_there in pairs if not is_there])
            successful = tuple(key for key, is_there in pairs if is_there)
        return vllm.JobResult(
            job_id=transfer.job_id,
            success=all(found),
            successful_keys=successful or None,
            transfer_time=done.seconds,
            transfer_bytes=done.nbytes,
        )

    def _failed(self, request_id: str | None, keys: Iterable[bytes]) -> None:
        """Turn chunks that could not be loaded into misses for their request."""
        request = self._requests.get(request_id) if request_id is not None else None
        if request is not None:
            request.failed.update(keys)

    def _log_error(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._log_error_at:
            self._log_error_at = now + ERROR_LOG_S
            vllm.logger.error("kvoffload: tier %r: %s failed", self.tier.name, what, exc_info=error)

    def drain_jobs(self) -> None:
        """Wait until no job uses the primary tier's memory, then apply `on_reset`.

        vLLM calls it only when it resets its caches. For a staged tier (see `Tier`, *Deadlines*)
        this waits at most until the jobs' deadlines.
        """
        waited = 0.0
        try:
            while self._transfers and not self.tier.wait(list(self._transfers), WAIT_LOG_S):
                waited += WAIT_LOG_S
                vllm.logger.warning(
                    "kvoffload: tier %r: a reset has waited %.0f s for %d jobs",
                    self.tier.name,
                    waited,
                    len(self._transfers),
                )
            self._collect()
            if self._forgets:
                self.tier.forget(self._generations.after_reset())
        except Exception as error:  # noqa: BLE001
            self._give_up("reset", error, math.inf)  # vLLM asserts that no job is left
        if self._forgets:
            for request in self._requests.values():
                request.answers.clear()

    def shutdown(self) -> None:
        """Close the tier; a second call does nothing.

        Raise TierError if a system call that may still write to the primary tier's memory has not
        returned; vLLM then keeps that memory.
        """
        tier: Tier | None = self.__dict__.pop("tier", None)  # it uses the primary tier's memory
        if tier is not None:
            close(tier, "the primary tier's")

    # -- events and metrics ------------------------------------------------------------------

    def take_events(self) -> Iterator[vllm.OffloadingEvent]:
        """Return the events of stores and removals since the last call.

        A reset has none: vLLM announces it for all tiers.
        """
        if not self._emits:
            return
        try:
            events = list(self.tier.take_events())
        except Exception as error:  # noqa: BLE001
            self._give_up("events", error)
            return
        for event in events:
            if event.keys:
                yield vllm.OffloadingEvent(
                    keys=[vllm.OffloadKey(key) for key in event.keys],
                    medium=self.medium,
                    removed=event.removed,
                    locality=self.locality,
                    ownership=self.tier.name,
                    removal_expected=not event.removed,
                )

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003
    ) -> dict[str, vllm.OffloadingMetricMetadata]:
        """Return the metrics of every tier, with the label ``tier``."""
        return {exported_name(metric.name): _definition(metric) for metric in TIER_METRICS}

    def get_stats(self) -> vllm.OffloadingConnectorStats | None:
        """Return the statistics since the last call."""
        stats = vllm.OffloadingConnectorStats()
        samples = getattr(self.tier, "samples", None)
        for metric, labels, value in samples() if samples is not None else ():
            name = exported_name(metric.name)
            values = (self.tier.name, *(labels[label] for label in metric.labels))
            if metric.kind == "gauge":
                stats.set_gauge(name, value, values)
            elif metric.kind == "counter":
                more = value - self._counted.get((name, values), 0)
                if more:
                    self._counted[name, values] = value
                    stats.increase_counter(name, more, values)
        for op, seconds in self._times:
            stats.observe_histogram(exported_name("seconds"), seconds, (self.tier.name, op))
        self._times.clear()
        return stats


def _emits_events(offloading_spec: Any, tier_type: str, is_enabled: bool) -> bool:
    if is_enabled and not offloading_spec.kv_events_config.enable_kv_cache_events:
        vllm.logger.warning(
            "kvoffload: enable_kv_events of secondary tier %r has no effect: vLLM's KV cache "
            "events are disabled",
            tier_type,
        )
        return False
    return is_enabled


def exported_name(name: str) -> str:
    """Return the name in vLLM of a metric of tiers."""
    return f"{ENGINE_PREFIX}{TIER_PREFIX}{name}"


def _definition(metric: Metric) -> vllm.OffloadingMetricMetadata:
    text = metric.help[0].upper() + metric.help[1:] + "."
    return definition(metric._replace(help=text, labels=("tier", *metric.labels)))


def _replica_folder(folder: str, offloading_spec: Any) -> str:
    """Return the folder of one data-parallel replica, since two cannot share a slab.

    An empty one stays so, and is refused by the tier.
    """
    parallel = offloading_spec.config.parallel
    if folder and parallel.data_parallel_size > 1:
        return f"{folder.rstrip('/')}/replica{parallel.data_parallel_index}"
    return folder


class KVOffloadFileTier(SecondaryTier):
    """A slab on a local disk below vLLM's primary tier: a `FileTier`.

    With data parallelism, replica ``k`` has the slab in the folder ``replica<k>`` of `path`.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type
        From vLLM.
    path : str
        A folder, made if it is missing.
    capacity_bytes : int or str
        Bytes of chunks, allocated at once; a number or text such as ``"2TB"``.
    policy : str
        A policy of the library, with its options, which decides which chunks stay.
    threads, staged, staging_bytes, ack, max_queued_bytes, name
        As for `FileTier`.
    locality, **options
        As for `SecondaryTier`.

    Raises
    ------
    TypeError, ValueError
        If an option is wrong.
    TierError
        If the slab cannot be opened, because of too little space or because it is in use.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        path: str,
        capacity_bytes: int | str,
        policy: str = "lru",
        threads: int | None = None,
        staged: bool = False,
        staging_bytes: int | str | None = None,
        ack: str | None = None,
        max_queued_bytes: int | str | None = None,
        name: str | None = None,
        locality: str | None = "LOCAL",
        **options: Any,
    ) -> None:
        if not isinstance(path, str) or not path:  # type: ignore[redundant-expr]
            raise ValueError(f"path must be a folder, got {describe(path)}")
        if not isinstance(policy, str):
            raise TypeError(f"policy must be text, got {describe(policy)}")
        given: dict[str, Any] = {
            "threads": threads,
            "staging_bytes": staging_bytes,
            "ack": ack,
            "max_queued_bytes": max_queued_bytes,
            "name": name,
        }
        opener = partial(
            FileTier,
            _replica_folder(path, offloading_spec),
            capacity_bytes,
            policy,
            staged=staged,
            **{keyword: value for keyword, value in given.items() if value is not None},
        )
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, opener, locality=locality, **options
        )


class KVOffloadTier(SecondaryTier):
    """A tier of any kind, named by its address, below vLLM's primary tier.

    Each data-parallel replica has its slab in a separate folder, as with `KVOffloadFileTier`.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type
        From vLLM.
    url : str
        As for `open_tier`, such as ``"slab:/nvme/kv?capacity=2TB&policy=hit-density"``.
    **options
        As for `SecondaryTier`.

    Raises
    ------
    TypeError, ValueError
        If an option is wrong.
    TierError
        If the tier cannot be opened.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    """Schemes that `url` may have; empty for any."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        url: str,
        **options: Any,
    ) -> None:
        if not isinstance(url, str):
            raise TypeError(f"url must be text, got {type(url).__name__}")
        kind, colon, rest = url.partition(":")
        if self.kinds and kind not in self.kinds:
            known = ", ".join(f"{one}:" for one in self.kinds)
            raise ValueError(f"url of {tier_type} must start with one of {known}")
        location, _, text = rest.partition("?")
        if kind == "slab":
            location = _replica_folder(location, offloading_spec)

        def opener(namespace: Namespace, enable_events: bool, generation: str) -> Tier:
            given = "&".join([*filter(None, [text]), *["events=true"] * enable_events])
            address = f"{kind}{colon}{location}{'?' * bool(given)}{given}"
            return open_tier(address, namespace, generation)

        super().__init__(offloading_spec, primary_kv_view, tier_type, opener, **options)


class _RemoteTier(KVOffloadTier):
    """A tier that several engines share."""

    def __init__(self, *arguments: Any, locality: str | None = "REMOTE", **options: Any) -> None:
        super().__init__(*arguments, locality=locality, **options)


class KVOffloadSharedTier(_RemoteTier):
    """A directory that several engines share: ``dir:``; see `KVOffloadTier`."""

    kinds = ("dir",)


class KVOffloadRedisTier(_RemoteTier):
    """A Redis or Valkey server: ``redis:`` or ``rediss:``; see `KVOffloadTier`."""

    kinds = ("redis", "rediss")


class KVOffloadObjectTier(_RemoteTier):
    """An object store: ``s3:``, ``gs:`` or ``az:``; see `KVOffloadTier`."""

    kinds = ("s3", "gs", "az")
