"""Tiers by one line of text: ``slab:/nvme/kv?capacity=2TB&policy=hit-density``.

The text is a kind, what that kind calls its place, and options. More kinds come from installed
packages, by entry points of the group ``kvoffload.tiers``: each a callable with the place, the
namespace and the options as keywords, all text, that returns a `Tier`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import parse_qsl

from kvoffload._sizes import parse_size
from kvoffload.errors import describe
from kvoffload.tiers.local.memory import MemoryTier
from kvoffload.tiers.local.slab import FileTier
from kvoffload.tiers.remote.directory import DirectoryTier
from kvoffload.tiers.remote.mooncake import MooncakeTier
from kvoffload.tiers.remote.objects import ObjectTier
from kvoffload.tiers.remote.redis import RedisTier

from .base import Tier
from .namespace import Namespace
from .options import LOCAL, STAGED, Readers, flag, number, read_options

__all__ = ["ENTRY_POINTS", "open_tier"]

ENTRY_POINTS = "kvoffload.tiers"


_MEMORY: Readers = {
    "capacity": ("capacity_bytes", parse_size),
    "policy": ("policy", str),
    **LOCAL,
}
_SLAB: Readers = {
    **_MEMORY,
    "staged": ("staged", flag),
    "staging": STAGED["staging"],
    "ack": STAGED["ack"],
}
_DIRECTORY: Readers = {
    **STAGED,
    "capacity": _MEMORY["capacity"],
    "sweep": ("sweep_s", number),
}
_REDIS: Readers = {
    **STAGED,
    "prefix": ("prefix", str),
    "cluster": ("cluster", flag),
    "ca": ("ssl_ca_certs", str),
}
_MOONCAKE: Readers = {
    **STAGED,
    "metadata": ("metadata", str),
    "hostname": ("hostname", str),
    "protocol": ("protocol", str),
    "devices": ("devices", str),
    "segment": ("segment_bytes", parse_size),
    "prefix": ("prefix", str),
}
_OBJECTS: Readers = {
    **STAGED,
    "endpoint": ("endpoint", str),
    "region": ("region", str),
    "http": ("allow_http", flag),
}


def _open_slab(place: str, namespace: Namespace, **options: str) -> Tier:
    if not place:
        raise ValueError("a slab must have a folder, as slab:/nvme/kv")
    return FileTier(place, namespace=namespace, **read_options(options, _SLAB))


def _open_memory(place: str, namespace: Namespace, **options: str) -> Tier:
    if place:
        raise ValueError(f"memory must have no place, got {describe(place)}")
    return MemoryTier(namespace=namespace, **read_options(options, _MEMORY))


def _open_directory(place: str, namespace: Namespace, **options: str) -> Tier:
    if not place:
        raise ValueError("a directory must be given, as dir:/mnt/kv")
    return DirectoryTier(place, namespace=namespace, **read_options(options, _DIRECTORY))


def _take(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Take some arguments out of the others."""
    return {name: arguments.pop(name) for name in names if name in arguments}


def _open_redis(scheme: str) -> Callable[..., Tier]:
    def opener(place: str, namespace: Namespace, **options: str) -> Tier:
        arguments = read_options(options, _REDIS)
        more = _take(arguments, "ssl_ca_certs")
        url = f"{scheme}:{place}"
        return RedisTier(url, namespace=namespace, connection_options=more, **arguments)

    return opener


def _open_objects(scheme: str) -> Callable[..., Tier]:
    def opener(place: str, namespace: Namespace, **options: str) -> Tier:
        arguments = read_options(options, _OBJECTS)
        config = _take(arguments, "endpoint", "region")
        client = _take(arguments, "allow_http")
        return ObjectTier(
            f"{scheme}:{place}",
            namespace=namespace,
            config=config,
            client_options=client,
            **arguments,
        )

    return opener


def _open_mooncake(place: str, namespace: Namespace, **options: str) -> Tier:
    arguments = read_options(options, _MOONCAKE)
    if "metadata" not in arguments:
        raise ValueError("option metadata must be given, as metadata=http://host:8080/metadata")
    return MooncakeTier(place.removeprefix("//"), namespace=namespace, **arguments)


_KINDS: dict[str, Callable[..., Tier]] = {
    "az": _open_objects("az"),
    "dir": _open_directory,
    "gs": _open_objects("gs"),
    "memory": _open_memory,
    "mooncake": _open_mooncake,
    "redis": _open_redis("redis"),
    "rediss": _open_redis("rediss"),
    "s3": _open_objects("s3"),
    "slab": _open_slab,
}


def open_tier(url: str, namespace: Namespace) -> Tier:
    """Open the tier that a line of text names.

    Parameters
    ----------
    url : str
        ``kind:place?option=value&option=value``. Built in are ``slab:FOLDER``, ``memory:``,
        ``dir:FOLDER``, ``redis://[user:password@]host[:port][/database]``, ``rediss://…`` (the same
        with TLS), ``s3://bucket/prefix``, ``gs://…``, ``az://…`` and ``mooncake://master:port``.

        All have the options ``threads``, ``queue`` (a size), ``name`` and ``events``; all but
        memory ``staging`` (a size) and ``ack``; a slab, memory and a directory ``capacity`` (a
        size, needed); a slab and memory ``policy``; a slab ``staged``; a directory ``sweep``
        (seconds); Redis ``prefix``, ``cluster`` and ``ca`` (a file of certificates); object stores
        ``endpoint``, ``region`` and ``http`` (allow it); Mooncake ``metadata`` (needed),
        ``hostname``, ``protocol``, ``devices``, ``segment`` (a size) and ``prefix``. They are the
        arguments of the tiers' classes. Values are percent-decoded; the place is not. Credentials
        of object stores come from the environment.
    namespace : Namespace
        What the bytes mean.

    Returns
    -------
    Tier
        To be given a region, and closed.

    Raises
    ------
    TypeError, ValueError
        If the text is wrong; the message names the option.
    TierError
        If the tier cannot be opened.
    ImportError
        If a package is missing that the kind needs; the message names the extra.

    Examples
    --------
    >>> from kvoffload.tiers import Namespace, open_tier
    >>> with open_tier("memory:?capacity=1MiB&policy=arc", Namespace("model", 4096)) as tier:
    ...     tier.capacity_bytes
    1048576
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be text, got {describe(url)}")
    kind, colon, rest = url.partition(":")
    place, _, query = rest.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ValueError("url: options must read option=value, with & between") from None
    if "@" in query:  # or a part of a password would be shown as an option
        raise ValueError("url: options must have %40 for @; so must a password, and %3F for ?")
    options: dict[str, str] = {}
    for option, text in pairs:
        if option in options:
            raise ValueError(f"url: option {option!r} must be given once")
        options[option] = text
    opener = _KINDS.get(kind) if colon else None
    if opener is None:
        plugins = entry_points(group=ENTRY_POINTS)
        if colon and kind in plugins.names:
            opener = plugins[kind].load()
        else:
            known = ", ".join(sorted({*_KINDS, *plugins.names}))
            shown = "text with an @" if "@" in url else describe(url.partition("?")[0])
            raise ValueError(f"url must start with one of {known} and a colon, got {shown}")
    try:
        return opener(place, namespace, **options)
    except ValueError as error:
        if str(error).startswith("url "):
            raise
        raise ValueError(f"url: {error}") from error
