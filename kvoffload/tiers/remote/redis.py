"""Redis, Valkey and compatible servers: blocks as values of one server.

Under a prefix and the namespace's fingerprint are ``…:namespace`` (its JSON), and per block
``…:<number>:<stored key>``, its bytes and its seal; the number of its generation has 16 hex digits.

Structure
    Reads and writes are pipelines of at most eight blocks. A query calls a script once per 1,024
    keys. Blocks are stored with ``SET NX`` and expire after `EXPIRE_S`; the server decides which it
    keeps. A server that is part of a cluster, or has no scripts, is refused.
Invariants
    Every call ends by its deadline: each read and write of the socket gets the remaining time, so
    that a server that sends byte by byte cannot extend it. A reply longer than the request implies
    is not read to its end, and the connection is closed. Neither the tier nor the client retries.
Cost
    A put makes no copy: the client sends the buffer. A get makes one copy besides those in the
    client's buffers.
"""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvoffload._extras import require
from kvoffload.errors import describe
from kvoffload.tiers.base import Status, TierError
from kvoffload.tiers.deletion import Deleted
from kvoffload.tiers.engine.contract import Block
from kvoffload.tiers.namespace import FINGERPRINT_BYTES, Namespace
from kvoffload.tiers.options import STAGED, Readers, TierKeywords, TierOptions, read_options

from .store import RemoteStore, as_settings
from .tier import RemoteTier

if TYPE_CHECKING:
    from typing_extensions import Unpack

SLACK_BYTES = 2**16
"""Bytes of replies besides the blocks: a handshake, errors, numbers."""
KEYS_PER_CALL = 1000
"""Keys that `delete_blocks` asks for and removes at once."""
DELETE_S = 30.0
DELETE_BYTES = 2**24
"""Time limit of each of its calls, and the most bytes of their replies."""
READ_BYTES = 2**18
"""Bytes that are read from a socket at once."""
TOUCH_S = 60.0
EXPIRE_S = 30 * 86_400
"""Seconds after the last store or touch until a block expires."""

# 1,024 keys in one call cost a fifth of the same keys in a pipeline.
FIND = """
local found = {}
for i = 1, #KEYS do found[i] = redis.call('EXISTS', KEYS[i]) end
return table.concat(found)
"""


class _RefusedError(Exception):
    """A server that this tier does not support; its text says what it is."""


def _client_package() -> Any:
    return require("redis", "RedisTier", "redis")


class _BoundedSocket:
    """A socket whose calls respect the deadline and the most bytes of its thread's call."""

    def __init__(self, sock: Any, store: RedisStore) -> None:
        self._sock = sock
        self._store = store
        self._timeout: float | None = None

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def _limit(self) -> None:
        """Give the socket's next call the remaining time; TimeoutError if none is left.

        Otherwise each byte of a slow server would get the whole time.
        """
        if self._store.is_overdue():
            raise TimeoutError("the call has passed its deadline")
        left = self._store.seconds_left()
        self._sock.settimeout(left if self._timeout is None else min(left, self._timeout))

    def recv(self, size: int, *flags: int) -> bytes:
        self._limit()
        data: bytes = self._sock.recv(size, *flags)
        self._store.count_received(len(data))
        return data

    def sendall(self, data: bytes) -> None:
        view = memoryview(data).cast("B")
        while view:  # TLS gives each of its pieces the whole time
            self._limit()
            view = view[self._sock.send(view) :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _bounded(connection_class: Any, store: RedisStore) -> Any:
    """Return a class of connections whose sockets are bounded."""

    class BoundedConnection(connection_class):  # type: ignore[misc]
        @property
        def socket_connect_timeout(self) -> float:
            """The seconds left, since each address of a name is tried in turn."""
            return store.seconds_left()

        @socket_connect_timeout.setter
        def socket_connect_timeout(self, _: object) -> None:
            pass

        def _connect(self) -> Any:
            self.socket_timeout = store.seconds_left()
            return _BoundedSocket(super()._connect(), store)

    return BoundedConnection


class RedisStore(RemoteStore):
    """Blocks as values of a server.

    `settings` are those of ``redis.connection.parse_url`` for an address, and further ones.
    """

    touch_s = TOUCH_S

    def __init__(
        self, namespace: Namespace, settings: dict[str, Any], *, prefix: str, connections: int
    ) -> None:
        super().__init__(namespace)
        self._redis = _client_package()
        self._prefix = f"{prefix}:{self.fingerprint.hex()}:".encode()
        self._namespace_name = self._prefix + b"namespace"
        self._is_asked = False  # whether the server was asked for its limits
        self._client = self._make_client(dict(settings), connections)

    def _make_client(self, settings: dict[str, Any], connections: int) -> Any:
        redis = self._redis
        connection = redis.connection
        kind = settings.pop("connection_class", redis.Connection)
        encoder = connection.Encoder("utf-8", "strict", False)
        ours = {
            "connection_class": _bounded(kind, self),
            # The parsers in C allocate a reply before it has arrived, and accept no memoryview.
            "parser_class": connection._RESP2Parser,
            "command_packer": connection.PythonRespSerializer(6000, encoder.encode),
        }
        settings.update(
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            max_connections=connections,
            socket_read_size=READ_BYTES,
            protocol=2,
        )
        try:
            _bounded(kind, self)(**{k: v for k, v in settings.items() if k != "max_connections"})
        except (TypeError, ValueError, redis.RedisError):  # their text may show values
            raise TypeError("connection_options must be arguments of redis.Connection") from None
        return redis.Redis(connection_pool=redis.ConnectionPool(**{**settings, **ours}))

    def count_received(self, nbytes: int) -> None:
        """Count bytes from the server; ConnectionAbortedError if there are too many."""
        call: Any = self._call
        call.budget = getattr(call, "budget", SLACK_BYTES) - nbytes
        if call.budget < 0:
            raise ConnectionAbortedError("a reply is longer than requested")

    def _pipeline(self, most_bytes: int) -> Any:
        """Return a pipeline whose replies may have at most `most_bytes` bytes."""
        return self._ready(most_bytes).pipeline(transaction=False)

    def _ready(self, most_bytes: int) -> Any:
        """Return the client; the replies of its next call may have at most `most_bytes` bytes."""
        call: Any = self._call
        call.budget = most_bytes + SLACK_BYTES
        return self._client

    def _name(self, key: bytes, generation: int) -> bytes:
        return b"%b%016x:%b" % (self._prefix, generation, key)

    # -- visits ------------------------------------------------------------------------------

    def visit(self) -> None:
        json_bytes = self.json_bytes
        pipeline = self._pipeline(json_bytes)
        pipeline.getrange(self._namespace_name, 0, json_bytes - 1)
        pipeline.eval(FIND, 1, self._namespace_name)
        json, script = pipeline.execute(raise_on_error=False)
        if self._is_forbidden(script):
            raise _RefusedError("has no scripts (EVAL)")
        if not self.is_ours(self._text(json)):
            pipeline = self._pipeline(0)
            pipeline.set(self._namespace_name, self.namespace.json.encode("ascii"))
            pipeline.execute(raise_on_error=False)  # a reader may lack the right to write
        self._look_at_limits()

    def _is_forbidden(self, reply: Any) -> bool:
        """Return whether a reply is that a command is forbidden."""
        if isinstance(reply, self._redis.exceptions.NoPermissionError):
            return True
        return isinstance(reply, self._redis.ResponseError) and _says(reply, "unknown command")

    def _text(self, reply: Any) -> bytes | None:
        """Return the bytes of a reply, None for another kind of value; raise any other error."""
        if isinstance(reply, Exception):
            if isinstance(reply, self._redis.ResponseError) and _says(reply, "WRONGTYPE"):
                return None
            errors = self._redis.exceptions
            if isinstance(reply, errors.ClusterError | errors.AskError):  # also MOVED
                raise _RefusedError("is part of a cluster")
            raise reply
        return reply if isinstance(reply, bytes) else None

    def _look_at_limits(self) -> None:
        """Warn, once, of a server that will refuse blocks."""
        if self._is_asked:
            return
        self._is_asked = True
        try:
            about = self._ready(SLACK_BYTES).info()
        except self._redis.ResponseError:  # reading the limits is forbidden
            return
        if not isinstance(about, Mapping):
            return
        if about.get("cluster_enabled") == 1:
            self._is_asked = False
            raise _RefusedError("is part of a cluster")
        policy = str(about.get("maxmemory_policy", ""))
        if not about.get("maxmemory"):
            self.say("has a server without maxmemory: it grows until its machine has no memory")
        elif not policy.startswith(("allkeys-", "volatile-")):
            self.say("has a server whose maxmemory-policy evicts no blocks: it will be full")

    # -- blocks ------------------------------------------------------------------------------

    def find(self, run: Sequence[Block], generation: int) -> None:
        names = [self._name(block.key, generation) for block in run]
        found: bytes = self._ready(len(names)).eval(FIND, len(names), *names)
        for block, digit in zip(run, found, strict=True):
            block.status = Status.OK if digit == 0x31 else Status.MISS

    def fetch(self, run: Sequence[Block], generation: int) -> None:
        pipeline = self._pipeline(len(run) * (self.block_bytes + 64))
        for block in run:  # one byte more shows that a value is longer
            pipeline.getrange(self._name(block.key, generation), 0, self.block_bytes)
        replies = pipeline.execute(raise_on_error=False)
        for block, reply in zip(run, replies, strict=True):
            if isinstance(reply, bytes):
                if reply:
                    self.check(block, memoryview(reply), generation)
                else:
                    block.status = Status.MISS
            elif isinstance(reply, self._redis.ResponseError) and _says(reply, "WRONGTYPE"):
                block.status = Status.CORRUPT
            else:
                raise reply if isinstance(reply, Exception) else TypeError

    def store(self, run: Sequence[Block], generation: int) -> None:
        pipeline = self._pipeline(64 * len(run))
        for block in run:
            name = self._name(block.key, generation)
            pipeline.set(name, block.views[0], nx=True, ex=EXPIRE_S)
        for block, reply in zip(run, pipeline.execute(raise_on_error=False), strict=True):
            # None: it exists
            is_error = isinstance(reply, Exception)
            block.status = self.meaning(reply) if is_error else Status.OK

    def drop(self, keys: Sequence[bytes], generation: int) -> None:
        pipeline = self._pipeline(16 * len(keys))
        for key in keys:
            pipeline.unlink(self._name(key, generation))
        pipeline.execute()

    def touch(self, keys: Sequence[bytes], generation: int) -> None:
        pipeline = self._pipeline(16 * len(keys))
        for key in keys:
            pipeline.expire(self._name(key, generation), EXPIRE_S)
        pipeline.execute()

    def status_of(self, error: Exception) -> Status:
        errors = self._redis.exceptions
        if isinstance(error, _RefusedError):
            self.say(f"is refused: its server {error}", logging.ERROR)
            return Status.FAILED
        if isinstance(error, errors.TimeoutError | TimeoutError):
            return Status.TIMEOUT
        if isinstance(error, errors.OutOfMemoryError) or "OOM command" in str(error):
            return Status.FULL
        if isinstance(error, errors.ReadOnlyError | errors.NoPermissionError):
            return Status.UNAVAILABLE
        if isinstance(error, errors.ConnectionError | OSError):
            # Unknown host, refused, reset, loading, wrong credentials, TLS.
            is_late = time.monotonic() >= self.deadline
            return Status.TIMEOUT if is_late else Status.UNAVAILABLE
        return Status.FAILED

    def close(self) -> None:
        self._client.close()
        self._client.connection_pool.disconnect()


def _says(error: Exception, word: str) -> bool:
    """Return whether a server's error begins with a word."""
    return str(error).startswith(word)


class RedisTier(RemoteTier):
    """A tier on a Redis or Valkey server, which is not part of a cluster and has scripts.

    Parameters
    ----------
    url : str
        ``redis://[user:password@]host[:port][/database]``, ``rediss://…`` for TLS, or
        ``unix://path``, as for ``redis.from_url``.
    namespace : Namespace
        The namespace of the bytes; its ``block_bytes`` is the size of a block, at most 512 MB.
    prefix : str
        Prefix of the names of all values.
    connection_options : mapping, optional
        Further arguments of ``redis.Connection``, such as ``password``, ``credential_provider`` or
        ``ssl_ca_certs``.
    **keywords
        The options of `TierOptions`, whose sizes may be text; by default ``threads=4`` and
        ``name="redis"``. Each thread has a connection. This tier is always staged.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    ImportError
        If the package ``redis`` is missing.

    Notes
    -----
    The server is not called before a region is attached, and need not run until then.

    The server evicts. It should have ``maxmemory`` and a ``maxmemory-policy`` that evicts, such as
    ``volatile-lru``: blocks expire 30 days after they were stored or last touched. A warning about
    another setting is logged once.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: Namespace,
        prefix: str = "kvoffload",
        connection_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[TierKeywords],
    ) -> None:
        settings = {**_parse(url), **as_settings("connection_options", connection_options)}
        if not isinstance(prefix, str) or not prefix:  # type: ignore[redundant-expr]
            raise ValueError(f"prefix must be text, got {describe(prefix)}")
        options = TierOptions.of(keywords, name="redis", threads=4)
        store = RedisStore(namespace, settings, prefix=prefix, connections=options.threads)
        store.place = _public(url)
        super().__init__(store, options)


def _parse(url: Any) -> dict[str, Any]:
    """Return an address as arguments of a connection; no error contains the address."""
    if not isinstance(url, str):
        raise TypeError(f"url must be text, got {type(url).__name__}")
    redis = _client_package()
    try:
        found: dict[str, Any] = redis.connection.parse_url(url)
    except ValueError:
        # Its text may have a part of a password.
        raise ValueError(
            "url must read redis://host, rediss://host or unix://path; characters of a password "
            "that have a meaning in addresses must be percent-encoded"
        ) from None
    parts = urlsplit(url)
    # The client treats any other path as database 0. Before an @ it is a part of a password.
    if parts.scheme != "unix" and not re.fullmatch("(/[0-9]{0,9}/?)?", parts.path):
        shown = "text with an @" if "@" in "".join(parts[2:]) else describe(parts.path)
        raise ValueError(f"url must have a database number as its path, as in /0, got {shown}")
    return found


def _public(url: str) -> str:
    """Return an address without user, password and options."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


def _ca(path: str) -> dict[str, str]:
    """Return the setting of a connection for a file with the certificates of authorities."""
    try:
        ssl.create_default_context(cafile=path)
    except OSError:
        raise ValueError(f"must be a file of certificates, got {describe(path)}") from None
    return {"ssl_ca_certs": path}


_READERS: Readers = {**STAGED, "prefix": ("prefix", str), "ca": ("connection_options", _ca)}


def _open(scheme: str, place: str, namespace: Namespace, /, **options: str) -> RedisTier:
    """Open ``redis://host`` or ``rediss://host``; see `kvoffload.tiers.open_tier`."""
    return RedisTier(f"{scheme}:{place}", namespace=namespace, **read_options(options, _READERS))


open_redis = partial(_open, "redis")
open_rediss = partial(_open, "rediss")


def delete_blocks(url: str, options: Mapping[str, str], number: int | None) -> Iterator[Deleted]:
    """Delete the blocks of a prefix, those of a generation or all; see ``deletion``."""
    arguments = read_options(options, _READERS)
    settings = {**_parse(url), **arguments.get("connection_options", {})}
    prefix = arguments.get("prefix", "kvoffload")
    # Its namespace is not used; its client bounds each reply, and the time of each call.
    store = RedisStore(Namespace("any", 1), settings, prefix=prefix, connections=1)
    generation = "?" * 16 if number is None else f"{number:016x}"
    escaped = re.sub(r"([*?[\\\]])", r"\\\1", prefix)
    pattern = f"{escaped}:{'?' * 2 * FINGERPRINT_BYTES}:{generation}:*"

    def ready() -> Any:
        store.deadline = time.monotonic() + DELETE_S
        return store._ready(DELETE_BYTES)

    cursor = None
    try:
        while cursor != 0:
            cursor, names = ready().scan(cursor or 0, match=pattern, count=KEYS_PER_CALL)
            if names:
                pipeline = ready().pipeline(transaction=False)
                for name in names:
                    pipeline.strlen(name)
                sizes = pipeline.execute(raise_on_error=False)  # a stranger's value may be a list
                nbytes = sum(size for size in sizes if isinstance(size, int))
                yield Deleted(int(ready().unlink(*names)), nbytes)
    except Exception as error:  # noqa: BLE001 # of any answer; its text may have an address
        raise TierError(f"{_public(url)}: {type(error).__name__}") from None
    finally:
        store.close()
