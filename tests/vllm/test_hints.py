"""What clients say of their sessions, as it is read from vLLM's request contexts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvoffload.integrations.vllm.hints import LONGEST_S, MOST_ACTIONS, read_hints
from kvoffload.types import Hints
from tests.strategies import LETTERS

NOW = 1_790_000_000.0


def action(payload, action_type="kvoffload.hint", action_version="1"):
    return KvHintAction("a1", action_type, action_version, payload)


def envelope(*actions):
    return KvHintsEnvelope("1", "m1", list(actions))


def read(params=None, hints=None):
    return read_hints(params, hints, NOW)


def test_without_a_word_there_are_no_hints():
    others = {"do_remote_prefill": True, "remote_engine_id": "e", "max_load_tokens": 64}
    for params in (None, {}, others, {"kvoffload": None, "agent_hint": None}, {"kvoffload": {}}):
        assert read(params) == (None, 0)
    assert read(None, envelope()) == (None, 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ends": True}, Hints(ends=True)),
        ({"expect_s": 2.5}, Hints(expect_s=2.5)),
        ({"expect_s": LONGEST_S}, Hints(expect_s=LONGEST_S)),
        ({"ends": None, "expect_s": 5e-324, "source": None}, Hints(expect_s=5e-324)),
        (
            {"ends": True, "expect_s": 2.5, "source": "swe-agent"},
            Hints(ends=True, expect_s=2.5, source="swe-agent"),
        ),
        ({"ends": True, "source": "s" * 64}, Hints(ends=True, source="s" * 64)),
        ({"ends": False, "source": "a"}, None),
    ],
)
def test_what_is_well_formed_is_read_from_parameters_and_from_an_action(fields, expected):
    assert read({"kvoffload": fields}) == (expected, 0)
    assert read(None, envelope(action(fields))) == (expected, 0)


@pytest.mark.parametrize(
    ("fields", "expected", "ignored"),
    [
        ({"expect_s": True}, None, 1),
        ({"expect_s": "2.5"}, None, 1),
        ({"expect_s": math.nan}, None, 1),
        ({"expect_s": 0}, None, 1),
        ({"expect_s": math.nextafter(LONGEST_S, math.inf)}, None, 1),
        ({"expect_s": 10**400}, None, 1),
        ({"ends": 1}, None, 1),
        ({"ends": "true", "expect_s": 2}, Hints(expect_s=2.0), 1),
        ({"ends": True, "expect_s": [2]}, Hints(ends=True), 1),
        ({"ends": True, "source": "s" * 65}, Hints(ends=True), 1),
        ({"ends": True, "source": 7}, Hints(ends=True), 1),
        ({"ends": True, "pin": True, "expects": 2}, Hints(ends=True), 2),
        ({"pin": {}, "expect_s": {}, "ends": {}, "source": {}}, None, 4),
        ([{"ends": True}], None, 1),
        ("ends", None, 1),
        (True, None, 1),
    ],
)
def test_what_is_malformed_is_ignored_and_counted_and_the_rest_holds(fields, expected, ignored):
    assert read({"kvoffload": fields}) == (expected, ignored)
    assert read(None, envelope(action(fields))) == (expected, ignored)


@pytest.mark.parametrize(
    ("params", "expected", "ignored"),
    [
        ({"lmcache_retention_ttl_sec": 3600}, Hints(expect_s=3600.0, source="ttl"), 0),
        ({"lmcache_retention_ttl_sec": 0}, None, 1),
        ({"lmcache_retention_ttl_sec": "60"}, None, 1),
        (
            {"agent_hint": {"schema_version": 1, "kv_priority": 65, "lease_until": NOW + 7}},
            Hints(expect_s=7.0, source="lease"),
            0,
        ),
        ({"agent_hint": {"lease_until": int(NOW) + 1}}, Hints(expect_s=1.0, source="lease"), 0),
        ({"agent_hint": {"lease_until": NOW}}, None, 1),
        ({"agent_hint": {"lease_until": 1000 * NOW}}, None, 1),  # milliseconds
        ({"agent_hint": {"lease_until": 10**400}}, None, 1),
        ({"agent_hint": {"trajectory_id": "t"}}, None, 0),
        ({"agent_hint": "lease"}, None, 1),
    ],
)
def test_a_time_to_live_and_a_lease_are_expectations_with_sources_of_their_own(
    params, expected, ignored
):
    assert read(params) == (expected, ignored)


def test_the_last_that_says_anything_counts():
    said = {"agent_hint": {"lease_until": NOW + 9}}
    assert read(said) == (Hints(expect_s=9.0, source="lease"), 0)
    said["lmcache_retention_ttl_sec"] = 8
    assert read(said) == (Hints(expect_s=8.0, source="ttl"), 0)
    said["kvoffload"] = {"source": "a"}
    assert read(said) == (Hints(expect_s=8.0, source="ttl"), 0)
    said["kvoffload"] = {"ends": True}
    assert read(said) == (Hints(ends=True), 0)
    one, other = action({"expect_s": 2}), action({"expect_s": 1})
    assert read(said, envelope(one, other, action({}))) == (Hints(expect_s=1.0), 0)
    said["lmcache_retention_ttl_sec"] = "8"  # counted, although another place counts
    assert read(said, envelope(one)) == (Hints(expect_s=2.0), 1)


def test_actions_of_others_and_those_before_the_last_sixteen_are_ignored_and_counted():
    ends = action({"ends": True})
    others = [action({"ends": True}, "kvcr.move"), action({"ends": True}, action_version="2")]
    assert read(None, envelope(*others)) == (None, 2)
    assert read(None, envelope(*others, ends)) == (Hints(ends=True), 2)
    assert read(None, envelope(ends, *others * 8)) == (None, 1 + MOST_ACTIONS)
    assert read(None, envelope(*others * 50_000, ends)) == (Hints(ends=True), 100_000)


def test_a_large_object_takes_no_longer():
    large = {str(number): number for number in range(100_000)}

    class Watched(dict):
        def __iter__(self):
            raise AssertionError("every key is looked at")

        keys = items = values = __iter__

    params = Watched(large, kvoffload=Watched(large, ends=True), agent_hint=Watched(large))
    assert read(params) == (Hints(ends=True), 100_000)


NAMES = (
    *("ends", "expect_s", "source", "other"),
    *("kvoffload", "agent_hint", "lease_until", "lmcache_retention_ttl_sec"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(LETTERS, max_size=70),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON | st.lists(JSON.map(action), max_size=20).map(lambda all_: envelope(*all_)))
def test_nothing_that_a_client_sends_raises(params, hints):
    said, ignored = read(params, hints)
    assert ignored >= 0
    if said is not None:
        assert said.ends or 0 < said.expect_s <= LONGEST_S


def test_an_envelope_of_another_kind_is_ignored():
    for hints in ([action({"ends": True})], SimpleNamespace(actions="ends"), 7):
        assert read(None, hints) == (None, 1)
    assert read(None, SimpleNamespace(actions=["ends", None])) == (None, 2)
