"""The options that every tier takes: as arguments, as text, and in an address.

An address is one line, ``slab:/nvme/kv?capacity=2TB&policy=hit-density``: a kind, its place, and
options. Installed packages add kinds with entry points of the group ``kvoffload.tiers``: each is a
callable that takes the place, the namespace and the options as keywords, all text, and returns a
`Tier`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias, TypedDict
from urllib.parse import parse_qsl

from kvoffload._checks import check_bool, check_instance, check_int
from kvoffload._sizes import check_size, parse_size
from kvoffload.errors import describe

from .base import Tier
from .generation import Generation
from .namespace import Namespace

ENTRY_POINTS = "kvoffload.tiers"
STAGING_BYTES = 128 * 2**20
"""Default bytes of a tier's staging buffers."""
MAX_QUEUED_BYTES = 8 * 2**30
"""Default of the most bytes in jobs that have not ended; further blocks are `Status.FULL`."""


class TierKeywords(TypedDict, total=False):
    """The keywords of tiers' constructors: those of `TierOptions`, whose sizes may be text."""

    threads: int
    name: str
    staging_bytes: int | str
    ack: str
    enable_events: bool
    max_queued_bytes: int | str
    generation: str


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options of a tier, besides its medium and its namespace.

    Attributes
    ----------
    threads : int
        Number of threads that read and write, 1 to 1024. If there are more than two, two never
        write.
    name : str
        Label in metrics, events and logs.
    staging_bytes : int
        Bytes of the tier's own buffers, >= 0; there are at least two buffers.
    ack : str
        When a staged put ends: ``"copied"`` (to a buffer) or ``"stored"``.
    enable_events : bool
        Whether `Tier.take_events` returns events.
    max_queued_bytes : int
        Most bytes in jobs that have not ended; further blocks are `Status.FULL`.
    generation : str
        The name of the weights that the blocks are of, at most 64 printable characters: see
        `Tier.forget`.

    Raises
    ------
    TypeError, ValueError
        If one is wrong.
    """

    threads: int = 4
    name: str = "remote"
    staging_bytes: int = STAGING_BYTES
    ack: str = "copied"
    _: KW_ONLY
    enable_events: bool = False
    max_queued_bytes: int = MAX_QUEUED_BYTES
    generation: str = ""

    def __post_init__(self) -> None:
        check_int("threads", self.threads, 1, 1024)
        check_int("staging_bytes", self.staging_bytes, 0)
        if self.ack not in ("copied", "stored"):
            raise ValueError(f"ack must be 'copied' or 'stored', got {describe(self.ack)}")
        check_instance("name", self.name, str, "text")
        check_bool("enable_events", self.enable_events)
        check_int("max_queued_bytes", self.max_queued_bytes, 0)
        Generation.of(self.generation)

    @classmethod
    def of(cls, keywords: TierKeywords, *, name: str, threads: int) -> TierOptions:
        """Return the options that a tier's constructor was given, with the defaults of that tier.

        Sizes may be text.
        """
        given: dict[str, Any] = {"name": name, "threads": threads, **keywords}
        for size in given.keys() & {"staging_bytes", "max_queued_bytes"}:
            given[size] = check_size(size, given[size])
        return cls(**given)

    @property
    def ack_copied(self) -> bool:
        """Whether a staged put ends when it is copied."""
        return self.ack == "copied"


# -- as text -------------------------------------------------------------------------------------

Readers: TypeAlias = dict[str, tuple[str, Callable[[str], Any]]]
"""By option: the keyword of a tier's class, and the parser of the text."""


def flag(text: str) -> bool:
    """Return a truth value; ValueError if the text is not one."""
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError(f"must be yes or no, got {describe(text)}")
    return known[text.lower()]


def whole_number(text: str) -> int:
    """Return a whole number of up to 9 digits; ValueError if the text is not one."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"must be a whole number, got {describe(text)}")
    return int(text)


LOCAL: Readers = {
    "threads": ("threads", whole_number),
    "queue": ("max_queued_bytes", parse_size),
    "name": ("name", str),
    "events": ("enable_events", flag),
    "generation": ("generation", str),
}
STAGED: Readers = {**LOCAL, "staging": ("staging_bytes", parse_size), "ack": ("ack", str)}


def read_options(options: Mapping[str, str], known: Readers = STAGED) -> dict[str, Any]:
    """Convert options in text to keyword arguments.

    Parameters
    ----------
    options : mapping of str to str
        As `open_tier` passes them to the entry points of other packages.
    known : dict, optional
        By option, the keyword and a callable that parses the text or raises ValueError with its
        rule. By default the options of `RemoteTier`: ``threads``, ``queue``, ``name``, ``events``,
        ``generation``, ``staging`` and ``ack``.

    Raises
    ------
    TypeError
        If `options` is not a mapping, or an option is not text.
    ValueError
        If an option is unknown, or its text is wrong; the message names it.
    """
    check_instance("options", options, Mapping, "a mapping")
    arguments = {}
    for option, text in options.items():
        if option not in known:
            raise ValueError(f"option {describe(option)} must be one of {', '.join(known)}")
        check_instance(f"option {option}", text, str, "text")
        keyword, read = known[option]
        try:
            arguments[keyword] = read(text)
        except ValueError as error:
            raise ValueError(f"option {option} {error}") from None
    if "capacity" in known and "capacity_bytes" not in arguments:
        raise ValueError("option capacity must be given, as capacity=2TB")
    return arguments


# -- as an address -------------------------------------------------------------------------------

BUILT_IN = {
    kind: EntryPoint(kind, f"kvoffload.tiers.{opener}", ENTRY_POINTS)
    for kind, opener in {
        "az": "remote.objects:open_az",
        "dir": "remote.directory:open_directory",
        "gs": "remote.objects:open_gs",
        "memory": "local.memory:open_memory",
        "redis": "remote.redis:open_redis",
        "rediss": "remote.redis:open_rediss",
        "s3": "remote.objects:open_s3",
        "slab": "local.slab:open_slab",
    }.items()
}
"""Built in rather than entry points, so that they work if the package is not installed."""


def open_tier(url: str, namespace: Namespace, generation: str = "") -> Tier:
    """Open the tier at an address.

    Parameters
    ----------
    url : str
        ``kind:place?option=value&option=value``. Built in are ``slab:FOLDER``, ``memory:``,
        ``dir:FOLDER``, ``redis://[user:password@]host[:port][/database]``, ``rediss://…`` (the same
        with TLS), ``s3://bucket/prefix``, ``gs://…`` and ``az://…``.

        All have the options ``threads``, ``queue`` (a size), ``name``, ``events`` and
        ``generation``; all but memory ``staging`` (a size) and ``ack``; a slab, memory and a
        directory ``capacity`` (a size, needed); a slab and memory ``policy``; a slab ``staged``; a
        directory ``sweep`` (seconds); Redis ``prefix`` and ``ca`` (a file of certificates); object
        stores ``endpoint``, ``region`` and ``http`` (allow plain HTTP). They are the arguments of
        the tiers' classes. Values are percent-decoded; the place is not. Credentials of object
        stores come from the environment. Installed packages add kinds as entry points of the group
        ``kvoffload.tiers``.
    namespace : Namespace
        What the bytes mean.
    generation : str, optional
        As in `TierOptions`; instead of the option of the address.

    Returns
    -------
    Tier
        The tier; the caller attaches a region and closes it.

    Raises
    ------
    TypeError, ValueError
        If the text is wrong; the message names the option.
    TierError
        If the tier cannot be opened.
    ImportError
        If the kind needs a package that is missing; the message names the extra.

    Examples
    --------
    >>> from kvoffload.tiers import Namespace, open_tier
    >>> with open_tier("memory:?capacity=1MiB&policy=arc", Namespace("model", 4096)) as tier:
    ...     tier.capacity_bytes
    1048576
    """
    kind, place, options = split_url(url)
    if generation := Generation.of(generation).name:
        if "generation" in options:
            raise ValueError("generation must be given once, not in the url, too")
        options["generation"] = generation
    kinds = _kinds(kind)
    if kind not in kinds:
        raise unknown_kind(url, sorted(kinds))
    opener = kinds[kind].load()
    try:
        tier: Tier = opener(place, namespace, **options)
        return tier
    except ValueError as error:
        if str(error).startswith("url "):
            raise
        raise ValueError(f"url: {error}") from error


def split_url(url: str) -> tuple[str, str, dict[str, str]]:
    """Split the address of a tier into its kind, place and options.

    The kind is empty if there is no colon. Raises TypeError or ValueError like `open_tier`.
    """
    if not isinstance(url, str):  # its value may have a password
        raise TypeError(f"url must be text, got {type(url).__name__}")
    kind, colon, rest = url.partition(":")
    place, _, query = rest.partition("?")
    if kind in ("slab", "dir") and re.match("//[^/]", place):
        raise ValueError(f"url: a folder must be written as {kind}:kv or {kind}:/kv, got {kind}://")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ValueError("url: options must read option=value, with & between") from None
    if "@" in query:  # else a part of a password could be shown as an option
        raise ValueError("url: options must have %40 for @; so must a password, and %3F for ?")
    options: dict[str, str] = {}
    for option, text in pairs:
        if option in options:
            raise ValueError(f"url: option {describe(option)} must be given once")
        options[option] = text
    return kind if colon else "", place, options


def unknown_kind(url: str, known: Sequence[str]) -> ValueError:
    """Return the error about an address of another kind; it shows no password."""
    rule = f"{'one of ' if len(known) > 1 else ''}{', '.join(known)} and a colon"
    shown = "text with an @" if "@" in url else describe(url.partition("?")[0])
    return ValueError(f"url must start with {rule}, got {shown}")


def _kinds(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points by kind; look for plug-ins if the kind is not built in."""
    if kind in BUILT_IN:
        return BUILT_IN
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)} | BUILT_IN
