"""Tiers by one line of text: ``slab:/nvme/kv?capacity=2TB&policy=hit-density``.

The text is a kind, what that kind calls its place, and options. More kinds come from installed
packages, by entry points of the group ``kvoffload.tiers``: each a callable with the place, the
namespace and the options as keywords, all text, that returns a `Tier`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from urllib.parse import parse_qsl

from kvoffload.errors import describe

from .base import Tier
from .namespace import Namespace

__all__ = ["ENTRY_POINTS", "open_tier"]

ENTRY_POINTS = "kvoffload.tiers"


_BUILT_IN = {
    kind: EntryPoint(kind, f"kvoffload.tiers.{opener}", ENTRY_POINTS)
    for kind, opener in {
        "az": "remote.objects:open_az",
        "dir": "remote.directory:open_directory",
        "gs": "remote.objects:open_gs",
        "memory": "local.memory:open_memory",
        "mooncake": "remote.mooncake:open_mooncake",
        "redis": "remote.redis:open_redis",
        "rediss": "remote.redis:open_rediss",
        "s3": "remote.objects:open_s3",
        "slab": "local.slab.tier:open_slab",
    }.items()
}
"""Not in the package's metadata: they are there where the package is not installed, too."""


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
    kinds = _BUILT_IN
    if not colon or kind not in kinds:
        kinds = {point.name: point for point in entry_points(group=ENTRY_POINTS)} | kinds
    if not colon or kind not in kinds:
        known = ", ".join(sorted(kinds))
        shown = "text with an @" if "@" in url else describe(url.partition("?")[0])
        raise ValueError(f"url must start with one of {known} and a colon, got {shown}")
    opener = kinds[kind].load()
    try:
        tier: Tier = opener(place, namespace, **options)
        return tier
    except ValueError as error:
        if str(error).startswith("url "):
            raise
        raise ValueError(f"url: {error}") from error
