"""The hints of a request's client, read from the places where vLLM carries them.

Places, in the order read; the last one with a hint counts
    ``kv_transfer_params["agent_hint"]["lease_until"]``
        Epoch seconds; its source is ``lease``. Other keys of ``agent_hint`` are for others.
    ``kv_transfer_params["lmcache_retention_ttl_sec"]``
        Seconds; its source is ``ttl``.
    ``kv_transfer_params["kvoffload"]``
        An object of ``ends``, ``expect_s`` and ``source``, the fields of ``Hints``.
    ``kv_hints``
        Actions of the type ``kvoffload.hint``, version 1, whose payload is such an object.
Rules
    Everything comes from clients: unknown or malformed parts are ignored and counted, the rest of
    an object stays valid, and nothing raises. None is no hint. The work is bounded, whatever the
    size of the input.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.types import MOST_SOURCE_CHARACTERS, Hints

#: Name in vLLM of the counter of ignored parts.
IGNORED_METRIC = "vllm:kvoffload:hints_ignored"

#: Keys of ``kv_transfer_params``, and the sources that hints of other consumers have here.
OWN_KEY = "kvoffload"
TTL_KEY, TTL_SOURCE = "lmcache_retention_ttl_sec", "ttl"
LEASE_KEY, LEASE_END, LEASE_SOURCE = "agent_hint", "lease_until", "lease"

ACTION_TYPE = "kvoffload.hint"
ACTION_VERSION = "1"

#: Most actions of a request that are read, the last ones; earlier ones count as ignored.
MOST_ACTIONS = 16

#: Most seconds from now in a hint, some 32 years: larger values are in another unit.
LONGEST_S = 1e9

_FIELDS = ("ends", "expect_s", "source")

#: The hints of one place, if any, and the number of its ignored parts.
_Statement = tuple[Hints | None, int]


def read_hints(params: object, envelope: object, epoch_s: float) -> tuple[Hints | None, int]:
    """Return a client's hints about its session, and the number of ignored parts.

    Parameters
    ----------
    params : object
        ``kv_transfer_params`` of a request's context: a dict or None if well-formed.
    envelope : object
        Its ``kv_hints``: vLLM's ``KvHintsEnvelope`` or None.
    epoch_s : float
        The present time, in seconds since the epoch.

    Notes
    -----
    Complexity: O(1) for `params`, O(`MOST_ACTIONS`) for `envelope`.
    """
    hints = None
    num_ignored = 0
    for said, ignored in (*_in_params(params, epoch_s), *_in_actions(envelope)):
        num_ignored += ignored
        if said is not None:
            hints = said
    return hints, num_ignored


def _in_params(params: object, epoch_s: float) -> Iterator[_Statement]:
    if params is None:
        return
    if not isinstance(params, dict):
        yield None, 1
        return
    lease = params.get(LEASE_KEY)
    if isinstance(lease, dict):
        lease_until = lease.get(LEASE_END)
        if lease_until is not None:
            until = _number(lease_until, epoch_s, epoch_s + LONGEST_S)
            yield _expected(None if until is None else until - epoch_s, LEASE_SOURCE)
    elif lease is not None:
        yield None, 1
    ttl = params.get(TTL_KEY)
    if ttl is not None:
        yield _expected(_number(ttl, 0, LONGEST_S), TTL_SOURCE)
    own = params.get(OWN_KEY)
    if own is not None:
        yield _stated(own)


def _in_actions(envelope: object) -> Iterator[_Statement]:
    if envelope is None:
        return
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, list):
        yield None, 1
        return
    surplus = max(0, len(actions) - MOST_ACTIONS)
    yield None, surplus
    for action in actions[surplus:]:
        kind = getattr(action, "action_type", None), getattr(action, "action_version", None)
        if kind == (ACTION_TYPE, ACTION_VERSION):
            yield _stated(getattr(action, "payload", None))
        else:
            yield None, 1


def _stated(fields: object) -> _Statement:
    """Read an object with the fields of ``Hints``."""
    if not isinstance(fields, dict):
        return None, 1
    ignored = len(fields) - sum(name in fields for name in _FIELDS)
    ends, expected, source = (fields.get(name) for name in _FIELDS)
    expect_s = _number(expected, 0, LONGEST_S)
    ignored += expect_s is None and expected is not None
    if not isinstance(ends, bool):
        ignored += ends is not None
        ends = False
    if not isinstance(source, str) or len(source) > MOST_SOURCE_CHARACTERS:
        ignored += source is not None
        source = ""
    if not ends and expect_s is None:
        return None, ignored
    return Hints(ends=ends, expect_s=expect_s, source=source), ignored


def _expected(expect_s: float | None, source: str) -> _Statement:
    """Make hints of another consumer's seconds; None means that they were invalid."""
    return (None, 1) if expect_s is None else (Hints(expect_s=expect_s, source=source), 0)


def _number(value: object, above: float, most: float) -> float | None:
    """Return a number in ``(above, most]`` as a float; None for anything else, also a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        return None
    return float(value)
