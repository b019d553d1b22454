"""Redis, Valkey and compatible servers: blocks as values of one server or cluster.

Under a prefix and the namespace's fingerprint are ``…:namespace`` (its JSON), ``…:epoch`` (16 hex
digits), and per block ``…:<epoch>:<stored key>``: its bytes and its seal.

Structure
    Reads and writes are pipelines of at most eight blocks, each with a read of the epoch. A query
    calls a script once per 1,024 keys; on a cluster it is a pipeline. Blocks are stored with ``SET
    NX`` and expire after `EXPIRE_S`; the epoch does not. So the server decides which blocks it
    keeps, and a policy ``volatile-…`` evicts only blocks.
Invariants
    Every call ends by its deadline: each read and write of the socket gets the remaining time, so
    that a server that sends byte by byte cannot extend it. A reply longer than the request implies
    is not read to its end, and the connection is closed. Neither the tier nor the client retries.
Cost
    A put makes no copy: the client sends the buffer. A get makes one copy besides those in the
    client's buffers.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from kvoffload._extras import require
from kvoffload.errors import describe
from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import Block
from kvoffload.tiers.epoch import EPOCH_CHARACTERS, epoch_text, last_epoch, parse_epoch
from kvoffload.tiers.namespace import Namespace
from kvoffload.tiers.options import (
    MAX_QUEUED_BYTES,
    STAGED,
    STAGING_BYTES,
    Readers,
    TierOptions,
    flag,
    read_options,
)

from .store import OtherEpochError, RemoteStore
from .tier import RemoteTier

__all__ = ["RedisTier"]

SLACK_BYTES = 2**16
"""Bytes of replies besides the blocks: a handshake, errors, numbers."""
CLUSTER_BYTES = 2**22
"""The same on a cluster, whose commands and slots are also read."""
READ_BYTES = 2**18
"""Bytes that are read from a socket at once."""
TOUCH_S = 60.0
EXPIRE_S = 30 * 86_400
"""Seconds after the last store or touch until a block expires."""

# 1,024 keys in one call cost a fifth of the same keys in a pipeline.
FIND = """
local found = {}
for i = 2, #KEYS do found[i - 1] = redis.call('EXISTS', KEYS[i]) end
local epoch = redis.pcall('GETRANGE', KEYS[1], 0, 16)
return {type(epoch) == 'string' and epoch or '', table.concat(found)}
"""
# Epochs are texts of equal length, ordered like their numbers. ARGV: the new epoch; the bound above
# which a present one stays; the last valid epoch. A list, a word, a
# later epoch and any other invalid value is replaced.
RAISE = """
local found = redis.pcall('GETRANGE', KEYS[1], 0, 16)
if type(found) == 'string' and #found == 16 and not string.find(found, '[^0-9a-f]')
    and found > ARGV[2] and found <= ARGV[3] then return found end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""
ROUNDS = 8
"""Attempts to write an epoch without scripts while others keep changing it."""


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

    epoch_s = math.inf  # every call reads it
    touch_s = TOUCH_S

    def __init__(
        self,
        namespace: Namespace,
        settings: dict[str, Any],
        *,
        prefix: str,
        cluster: bool,
        connections: int,
    ) -> None:
        super().__init__(namespace)
        self._redis = _client_package()
        self._prefix = f"{prefix}:{self.fingerprint.hex()}:".encode()
        self._epoch_name = self._prefix + b"epoch"
        self._namespace_name = self._prefix + b"namespace"
        self._cluster = cluster
        self._settings = settings
        self._connections = connections
        self._is_asked = False  # whether the server was asked for its limits
        self._client: Any = None if cluster else self._make_client()

    def _make_client(self) -> Any:
        redis = self._redis
        connection = redis.connection
        settings = dict(self._settings)
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
            max_connections=self._connections,
            socket_read_size=READ_BYTES,
            protocol=2,
        )
        try:
            _bounded(kind, self)(**{k: v for k, v in settings.items() if k != "max_connections"})
        except TypeError:  # its text may show values
            raise TypeError("connection_options must be arguments of redis.Connection") from None
        if not self._cluster:
            return redis.Redis(connection_pool=redis.ConnectionPool(**{**settings, **ours}))

        class BoundedPool(redis.ConnectionPool):  # type: ignore[misc,name-defined]
            def __init__(self, **settings: Any) -> None:
                super().__init__(**{**settings, **ours})

        settings.pop("db", None)  # a cluster has one
        settings.pop("retry")
        host, port = settings.pop("host", "localhost"), settings.pop("port", 6379)
        is_safe = issubclass(kind, connection.SSLConnection)
        return redis.cluster.RedisCluster(
            url=f"{'rediss' if is_safe else 'redis'}://{host}:{port}",
            connection_pool_class=BoundedPool,
            require_full_coverage=False,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            **settings,
        )

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
        call.budget = most_bytes + (CLUSTER_BYTES if self._cluster else SLACK_BYTES)
        if self._client is None:  # making the client of a cluster calls it
            self._client = self._make_client()
        return self._client

    def _name(self, key: bytes, epoch: int) -> bytes:
        return b"%b%016x:%b" % (self._prefix, epoch, key)

    # -- epochs ------------------------------------------------------------------------------

    def ask_epoch(self) -> int | None:
        json_bytes = self.json_bytes
        pipeline = self._pipeline(json_bytes)
        pipeline.getrange(self._epoch_name, 0, EPOCH_CHARACTERS)
        pipeline.getrange(self._namespace_name, 0, json_bytes - 1)
        epoch, json = pipeline.execute(raise_on_error=False)
        if not self.is_ours(self._text(json)):
            pipeline = self._pipeline(0)
            pipeline.set(self._namespace_name, self.namespace.json.encode("ascii"))
            pipeline.execute(raise_on_error=False)  # a reader may lack the right to write
        found = parse_epoch(self._text(epoch))
        self._look_at_limits()
        return found

    def raise_epoch(self, epoch: int, above: int) -> int | None:
        try:
            client = self._ready(0)
            texts = map(epoch_text, (epoch, above, last_epoch()))
            reply = client.eval(RAISE, 1, self._epoch_name, *texts)
        except self._redis.ResponseError as error:
            if not self._is_forbidden(error):
                raise
            return self._raise_epoch_watched(epoch, above)
        return parse_epoch(reply)

    def delete_epoch(self) -> bool:
        self._ready(0).delete(self._epoch_name)
        return True

    def _raise_epoch_watched(self, epoch: int, above: int) -> int:
        """Write an epoch to a server without scripts."""
        for _ in range(ROUNDS):
            with self._ready(0).pipeline(transaction=True) as pipeline:
                pipeline.watch(self._epoch_name)
                try:
                    reply = pipeline.getrange(self._epoch_name, 0, EPOCH_CHARACTERS)
                except self._redis.ResponseError as error:
                    reply = self._text(error)
                found = parse_epoch(reply)
                if found is not None and found > above:
                    return found
                pipeline.multi()
                pipeline.set(self._epoch_name, epoch_text(epoch))
                with contextlib.suppress(self._redis.WatchError):
                    pipeline.execute()
                    return epoch
        raise TimeoutError

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
            raise reply
        return reply if isinstance(reply, bytes) else None

    def _same_epoch(self, reply: Any, epoch: int) -> None:
        """Raise OtherEpochError unless a reply has the epoch of the call."""
        if parse_epoch(self._text(reply)) != epoch:
            raise OtherEpochError

    def _look_at_limits(self) -> None:
        """Warn, once, of a server that refuses blocks, or may evict the epoch."""
        if self._is_asked:
            return
        self._is_asked = True
        try:
            memory = self._ready(SLACK_BYTES).info("memory")
        except self._redis.ResponseError:  # reading the limits is forbidden
            return
        if not isinstance(memory, Mapping):
            return
        policy = str(memory.get("maxmemory_policy", ""))
        if not memory.get("maxmemory"):
            self.say("has a server without maxmemory: it grows until its machine has no memory")
        elif policy.startswith("allkeys-"):
            self.say(
                f"has a server with maxmemory-policy {policy}, which may evict the epoch, and so "
                "make everyone forget everything: use volatile-lru, or at least a server of its own"
            )
        elif not policy.startswith("volatile-"):
            self.say("has a server whose maxmemory-policy evicts no blocks: it will be full")

    # -- blocks ------------------------------------------------------------------------------

    def find(self, run: Sequence[Block], epoch: int) -> None:
        names = [self._name(block.key, epoch) for block in run]
        found: Sequence[int]
        if self._cluster:
            found = self._find_one_by_one(names, epoch)
        else:
            pipeline = self._pipeline(len(names))
            pipeline.eval(FIND, 1 + len(names), self._epoch_name, *names)
            (reply,) = pipeline.execute(raise_on_error=False)
            if self._is_forbidden(reply):
                found = self._find_one_by_one(names, epoch)
            elif isinstance(reply, Exception):
                raise reply
            else:
                self._same_epoch(reply[0], epoch)
                found = [digit == 0x31 for digit in reply[1]]
        for block, is_there in zip(run, found, strict=True):
            block.status = Status.OK if is_there else Status.MISS

    def _find_one_by_one(self, names: Sequence[bytes], epoch: int) -> list[int]:
        pipeline = self._pipeline(16 * len(names))
        pipeline.getrange(self._epoch_name, 0, EPOCH_CHARACTERS)
        for name in names:
            pipeline.exists(name)
        found, *replies = pipeline.execute()
        self._same_epoch(found, epoch)
        return list(replies)

    def fetch(self, run: Sequence[Block], epoch: int) -> None:
        pipeline = self._pipeline(len(run) * (self.block_bytes + 64))
        pipeline.getrange(self._epoch_name, 0, EPOCH_CHARACTERS)
        for block in run:  # one byte more shows that a value is longer
            pipeline.getrange(self._name(block.key, epoch), 0, self.block_bytes)
        found, *replies = pipeline.execute(raise_on_error=False)
        self._same_epoch(found, epoch)
        for block, reply in zip(run, replies, strict=True):
            if isinstance(reply, bytes):
                if reply:
                    self.check(block, memoryview(reply), epoch)
                else:
                    block.status = Status.MISS
            elif isinstance(reply, self._redis.ResponseError) and _says(reply, "WRONGTYPE"):
                block.status = Status.CORRUPT
            else:
                raise reply if isinstance(reply, Exception) else TypeError

    def store(self, run: Sequence[Block], epoch: int) -> None:
        pipeline = self._pipeline(64 * len(run))
        pipeline.getrange(self._epoch_name, 0, EPOCH_CHARACTERS)
        for block in run:
            pipeline.set(self._name(block.key, epoch), block.views[0], nx=True, ex=EXPIRE_S)
        found, *replies = pipeline.execute(raise_on_error=False)
        self._same_epoch(found, epoch)
        for block, reply in zip(run, replies, strict=True):
            # None: it exists
            is_error = isinstance(reply, Exception)
            block.status = self.meaning(reply) if is_error else Status.OK

    def drop(self, keys: Sequence[bytes], epoch: int) -> None:
        pipeline = self._pipeline(16 * len(keys))
        for key in keys:
            pipeline.unlink(self._name(key, epoch))
        pipeline.execute()

    def touch(self, keys: Sequence[bytes], epoch: int) -> None:
        pipeline = self._pipeline(16 * len(keys))
        for key in keys:
            pipeline.expire(self._name(key, epoch), EXPIRE_S)
        pipeline.execute()

    def status_of(self, error: Exception) -> Status:
        errors = self._redis.exceptions
        if isinstance(error, errors.TimeoutError | TimeoutError):
            return Status.TIMEOUT
        if isinstance(error, errors.OutOfMemoryError) or "OOM command" in str(error):
            return Status.FULL
        if isinstance(error, errors.ReadOnlyError | errors.NoPermissionError):
            return Status.UNAVAILABLE
        if isinstance(error, errors.ConnectionError | errors.RedisClusterException | OSError):
            # Unknown host, refused, reset, loading, wrong credentials, TLS.
            is_late = time.monotonic() >= self.deadline
            return Status.TIMEOUT if is_late else Status.UNAVAILABLE
        return Status.FAILED

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            if not self._cluster:
                self._client.connection_pool.disconnect()


def _says(error: Exception, word: str) -> bool:
    """Return whether a server's error begins with a word."""
    return str(error).startswith(word)


class RedisTier(RemoteTier):
    """A tier on a Redis or Valkey server, or on a cluster of them.

    Parameters
    ----------
    url : str
        ``redis://[user:password@]host[:port][/database]``, ``rediss://…`` for TLS, or
        ``unix://path``, as for ``redis.from_url``.
    threads : int
        Number of connections, each with a thread.
    namespace : Namespace
        The namespace of the bytes; its ``block_bytes`` is the size of a block, at most 512 MB.
    prefix : str
        Prefix of the names of all values.
    cluster : bool
        Whether the server belongs to a cluster, which is discovered through it.
    connection_options : mapping, optional
        Further arguments of ``redis.Connection``, such as ``password``, ``credential_provider`` or
        ``ssl_ca_certs``.
    staging_bytes, ack, name, enable_events, max_queued_bytes
        As in `TierOptions`; sizes may be text. This tier is always staged.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    ImportError
        If the package ``redis`` is missing.

    Notes
    -----
    The server is not called before a region is attached, and need not run until then.

    The server evicts. It should have ``maxmemory`` and the ``maxmemory-policy`` ``volatile-lru`` or
    another that begins with ``volatile-``: blocks expire 30 days after they were stored or last
    touched, the epoch does not. A policy ``allkeys-…`` may also evict the epoch, which makes every
    tier of the namespace forget everything. A warning about any other setting is logged once.
    `forget` affects all tiers of the namespace at their next call; forgotten blocks stay on the
    server until it evicts them.
    """

    def __init__(
        self,
        url: str,
        threads: int = 4,
        *,
        namespace: Namespace,
        prefix: str = "kvoffload",
        cluster: bool = False,
        connection_options: Mapping[str, Any] | None = None,
        staging_bytes: int | str = STAGING_BYTES,
        ack: str = "copied",
        name: str = "redis",
        enable_events: bool = False,
        max_queued_bytes: int | str = MAX_QUEUED_BYTES,
    ) -> None:
        settings = {**_parse(url), **(connection_options or {})}
        if not isinstance(prefix, str) or not prefix:  # type: ignore[redundant-expr]
            raise ValueError(f"prefix must be text, got {describe(prefix)}")
        options = TierOptions.read(
            threads, name, staging_bytes, ack, max_queued_bytes, enable_events=enable_events
        )
        store = RedisStore(
            namespace, settings, prefix=prefix, cluster=bool(cluster), connections=threads
        )
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


_READERS: Readers = {
    **STAGED,
    "prefix": ("prefix", str),
    "cluster": ("cluster", flag),
    "ca": ("ca", str),
}


def _open(scheme: str, place: str, namespace: Namespace, **options: str) -> RedisTier:
    """Open ``redis://host`` or ``rediss://host``; see `kvoffload.tiers.open_tier`."""
    arguments = read_options(options, _READERS)
    more = {"ssl_ca_certs": arguments.pop("ca")} if "ca" in arguments else {}
    url = f"{scheme}:{place}"
    return RedisTier(url, namespace=namespace, connection_options=more, **arguments)


open_redis = partial(_open, "redis")
open_rediss = partial(_open, "rediss")
