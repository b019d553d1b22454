"""Changes since an earlier advice."""

from __future__ import annotations

import json

import pytest

from kvoffload.advise.comparison import MOST_BYTES, Change, compared_advice, read_advice

pytestmark = pytest.mark.fast

CELL = {"hit_ratio": 0.5, "saved_tokens": 1000}
OLD = {
    "version": "0.3.0",
    "model": None,
    "memory": 2**30,
    "device_memory": 0,
    "block_tokens": 16,
    "block_bytes": 2**20,
    "requests": 1000,
    "unique_blocks": 500,
    "unbounded_hit_ratio": 0.7,
    "recommendation": "lru",
    "memories": [
        {"memory": 2**29, "policies": {"lru": CELL | {"hit_ratio": 0.4}}},
        {"memory": 2**30, "policies": {"lru": CELL, "arc": CELL | {"hit_ratio": 0.625}}},
    ],
}
FLEET = {key: OLD[key] for key in OLD if key != "memories"} | {
    "engines": 8,
    "recommendation": {
        "router": "session",
        "policy": "lru",
        "memory": 2**30,
        "tier": None,
        "token_hit_ratio": 0.5,
        "saved": None,
    },
}


def test_what_changed_is_named_with_both_values():
    new = OLD | {"recommendation": "arc", "requests": 1200}
    found = compared_advice("old.json", OLD, new)
    assert found.version == "0.3.0"
    assert found.changes == (
        Change("requests", 1000, 1200),
        Change("policy", "lru", "arc"),
        Change("hit ratio", 0.5, 0.625),
    )
    assert str(found) == (
        "Since old.json (kvoffload 0.3.0): requests 1,200, was 1,000; policy arc, was lru; "
        "hit ratio 62.5 %, was 50.0 % (+12.5 points)."
    )
    assert str(compared_advice("old.json", OLD, OLD)).endswith("nothing has changed.")


def test_another_accelerator_and_another_disk_are_changes():
    def with_engine(accelerator: str, seconds: float, size: int | None) -> dict:
        cell = CELL | {"net_seconds": seconds}
        return OLD | {
            "engine": {"accelerator": accelerator, "workers": 4},
            "details": {"disk": None if size is None else {"size": size}},
            "memories": [{"memory": 2**30, "policies": {"lru": cell}}],
        }

    old, new = with_engine("H100 SXM", 15.0, None), with_engine("H200", 30.0, 2**40)
    assert str(compared_advice("old.json", old, new)).endswith(
        "accelerators 4 × H200, was 4 × H100 SXM; disk 1 TiB, was -; time gained 30 s, was 15 s."
    )
    given = old | {"engine": {"accelerator": None, "workers": 1}, "details": None}
    assert "accelerators none, was 4" in str(compared_advice("old.json", old, given))
    # what an earlier version did not print is not compared
    assert str(compared_advice("old.json", OLD, OLD | {"engine": None, "details": None})).endswith(
        "nothing has changed."
    )


def test_no_recommendation_is_a_change_too():
    found = compared_advice("old.json", OLD, OLD | {"recommendation": None})
    assert "policy none, was lru; hit ratio -, was 50.0 %; tokens saved -, was 1,000" in str(found)


def test_fleets_are_compared_by_router_memory_and_tier():
    chosen = FLEET["recommendation"] | {"router": "events", "memory": 2**29, "tier": "a tier"}
    found = compared_advice("old.json", FLEET, FLEET | {"recommendation": chosen})
    assert [change.name for change in found.changes] == ["router", "host memory", "tier"]
    with pytest.raises(ValueError, match="must have advice on one engine, got advice on several"):
        compared_advice("old.json", FLEET, OLD)


def test_terminal_escapes_of_a_stranger_are_not_printed():
    value = OLD | {"version": "\x1b[31m0", "model": "\x1b]0;x\x07"}
    assert "\x1b" not in str(compared_advice("\x1b.json", value, OLD))


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", r"\[\]"),
        ("{}", "none for 'version'"),
        (json.dumps(OLD | {"requests": "many"}), "'many' for 'requests'"),
        (json.dumps(OLD | {"requests": True}), "True for 'requests'"),
        (json.dumps(OLD | {"memory": 2**63}), "for 'memory'"),
        (json.dumps(OLD | {"memory": 10**400}), "for 'memory'"),
        (json.dumps(OLD | {"unbounded_hit_ratio": float("nan")}), "nan for 'unbounded_hit_ratio'"),
        (json.dumps(OLD).replace("0.7", "1e999"), "inf for 'unbounded_hit_ratio'"),
        (json.dumps(OLD | {"memories": [7]}), "none for 'memory'"),
        (json.dumps(OLD | {"recommendation": "sieve"}), "none for 'sieve'"),
        (json.dumps(FLEET | {"recommendation": {}}), "none for 'router'"),
    ],
)
def test_what_is_no_advice_is_refused(tmp_path, text, got):
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=f"^file must be the output of kvoffload advise .*, got .*{got}"
    ):
        read_advice(path)


def test_a_file_is_read_whole_or_not_at_all(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))
    assert read_advice(path) == OLD
    with path.open("ab") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ValueError, match="must have at most 67,108,864 bytes, got more"):
        read_advice(path)
    with pytest.raises(FileNotFoundError):
        read_advice(tmp_path / "absent")
