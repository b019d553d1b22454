"""What replay, sweep and fleet print as JSON and CSV has one shape, which a schema describes."""

import json
from pathlib import Path

import jsonschema
import pytest

from kvoffload.cli._fields import FIELDS
from kvoffload.traces import Workload

WORKLOAD = Workload(300)
SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs/reference/results.schema.json").read_text(encoding="utf-8")
)
ROW = SCHEMA["$defs"]["row"]["properties"]


def commands(trace):
    plain = ("--policy=lru,hit-density,belady,infinite", "--capacity=5%", "--device-memory=20")
    rates = ("--block-bytes=2MiB", "--prefill-tokens-per-second=5000")
    yield "replay", trace, *plain
    yield "replay", trace, "--policy=lru,infinite", "--capacity=200", "--closed-loop=9000"
    yield "replay", trace, "--policy=lru", "--capacity=200", "--model=gpt-oss-20b"
    yield "sweep", trace, *plain, "--jobs=1", "--pending=2", "--block-bytes=2MiB"
    yield "sweep", trace, "--policy=lru", "--capacity=9%", "--hints=expect", "--hints-liars=0.5"
    yield "fleet", trace, "--engines=1,3", "--policy=lru", "--disk=20%", "--jobs=1", *rates
    yield "fleet", trace, "--engines=2", "--capacity=5%", "--jobs=1", "--router=session"


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(ROW) == list(FIELDS)
    assert all(field["description"] for field in ROW.values())


@pytest.mark.parametrize("index", range(7))
def test_every_output_follows_the_schema(kvoffload, trace, index):
    arguments = list(commands(trace))[index]
    done = kvoffload(*arguments, "--json", "--quiet")
    found = done.value
    jsonschema.validate(found, SCHEMA)
    assert all(list(row) == list(FIELDS) for row in found["results"])


def test_a_value_of_another_type_or_name_does_not_follow_it(kvoffload, trace):
    found = kvoffload("replay", trace, "--policy=lru", "--json", "--quiet").value
    for change in ({"hits": "3"}, {"hit_ratio": 1.5}, {"policy": None}, {"more": 1}):
        wrong = {**found, "results": [{**found["results"][0], **change}]}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)
