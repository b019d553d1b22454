"""Routers as configuration: each stack's text parses, and options arrive in it."""

import shlex

import pytest

from kvoffload.advise.router_configs import RouterConfig, router_configs

STACKS = {
    "round-robin": "SGLang router|vLLM production-stack|NVIDIA Dynamo",
    "random": "llm-d|SGLang router|NVIDIA Dynamo",
    "least-loaded": "llm-d|SGLang router|NVIDIA Dynamo",
    "session": "llm-d|SGLang router|vLLM production-stack|NVIDIA Dynamo",
    "sticky": "llm-d|SGLang router|vLLM production-stack|NVIDIA Dynamo",
    "prefix": "SGLang router|vLLM production-stack",
    "scored": "llm-d|NVIDIA Dynamo",
    "events": "llm-d|vLLM production-stack|NVIDIA Dynamo",
    "cost": "NVIDIA Dynamo",
    "earliest": "",
}
SCREEN = 60  # lines


def of(name, stack, **options) -> RouterConfig:
    """Return the entry of one stack."""
    found = router_configs(name, options, block_tokens=16, engines=3)
    (entry,) = [entry for entry in found if entry.stack == stack]
    return entry


def plugins(entry):
    """Return an endpoint picker's parameters per plugin, and the profile's weights."""
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(entry.text)
    assert config["kind"] == "EndpointPickerConfig"
    parameters = {one["type"]: one.get("parameters") for one in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    weights = {one["pluginRef"]: one.get("weight") for one in profile["plugins"]}
    assert set(weights) <= set(parameters)
    for source in config.get("dataLayer", {}).get("sources", ()):
        named = {source["pluginRef"], *(one["pluginRef"] for one in source["extractors"])}
        assert named <= set(parameters)
    return parameters, weights


def flags(entry):
    """Return the flags of a command line with their values."""
    assert all(line.endswith(" \\") for line in entry.text.splitlines()[:-1])
    words, found = shlex.split(entry.text.replace("\\\n", "")), {}
    for position, word in enumerate(words):
        if word.startswith("--"):
            rest = words[position + 1 :]
            ends = [place for place, value in enumerate(rest) if value.startswith("--")]
            found[word] = " ".join(rest[: ends[0] if ends else None])
    return found


@pytest.mark.parametrize("name", STACKS)
def test_each_router_names_its_stacks(name):
    found = router_configs(name, {}, block_tokens=16, engines=3)
    assert "|".join(entry.stack for entry in found) == STACKS[name]
    for entry in found:
        assert entry.release
        assert entry.router
        assert len(entry.text.splitlines()) <= SCREEN


@pytest.mark.parametrize("name", STACKS)
def test_texts_are_yaml_or_command_lines(name):
    for entry in router_configs(name, {}, block_tokens=16, engines=3):
        if entry.stack == "llm-d":
            plugins(entry)
        elif entry.stack == "vLLM production-stack":
            yaml = pytest.importorskip("yaml")
            assert yaml.safe_load(entry.text)["routerSpec"]["routingLogic"] == entry.router
        else:
            assert entry.text.startswith("python -m ")
            assert entry.router in flags(entry).values()


def test_an_unknown_router_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"router must be one of round-robin, .*got 'fastest'"):
        router_configs("fastest", {}, block_tokens=16, engines=2)


def test_events_weigh_the_media_of_the_index():
    entry = of("events", "llm-d", host=60.0, prefix=5, queue=2, ahead=0)
    parameters, weights = plugins(entry)
    scorer = parameters["precise-prefix-cache-scorer"]
    media = {one["name"]: one["weight"] for one in scorer["indexerConfig"]["kvCacheBackendConfigs"]}
    assert media == {"gpu": 1, "cpu": 0.6}
    assert scorer["tokenProcessorConfig"]["blockSize"] == 16
    assert scorer["speculativeIndexing"] is False
    assert (weights["precise-prefix-cache-scorer"], weights["queue-scorer"]) == (5, 2)


@pytest.mark.parametrize(
    ("sees", "host", "tier"),
    [("device", "0", "0"), ("host", "0.8", "0"), ("tier", "0.8", "0.8")],
)
def test_what_the_index_omits_weighs_nothing(sees, host, tier):
    found = flags(of("events", "NVIDIA Dynamo", sees=sees))
    assert found["--router-host-cache-hit-weight"] == host
    assert found["--router-disk-cache-hit-weight"] == tier
    assert f"- name: cpu\n        weight: {host}\n" in of("events", "llm-d", sees=sees).text


def test_cost_gives_weights_and_scale():
    found = flags(of("cost", "NVIDIA Dynamo"))
    assert found["--router-host-cache-hit-weight"] == "0.75"
    assert found["--kv-cache-block-size"] == "16"
    assert not {"--router-prefill-load-scale", "--router-predicted-ttl-secs"} & set(found)
    found = flags(of("cost", "NVIDIA Dynamo", weight=2.5, ahead=1, sees="tier", tier="10"))
    assert found["--router-prefill-load-scale"] == "2.5"
    assert found["--router-predicted-ttl-secs"] == "5"
    assert found["--router-disk-cache-hit-weight"] == "0.1"


def test_prefix_gives_every_threshold():
    found = flags(of("prefix", "SGLang router", threshold=0.25, abs=8))
    assert found["--cache-threshold"] == "0.25"
    assert found["--balance-abs-threshold"] == "8"
    assert found["--balance-rel-threshold"] == "1.1"
    assert len(found["--worker-urls"].split()) == 3


@pytest.mark.parametrize(
    ("options", "matched", "bound"),
    [
        ({}, 31_250, 31_250),
        ({"index_blocks": 500}, 500, 500),
        ({"index_blocks": 500, "match_blocks": 256}, 256, 500),
        ({"index_blocks": 0}, 31_250, 31_250),
    ],
)
def test_scored_bounds_index_and_match(options, matched, bound):
    entry = of("scored", "llm-d", **options)
    parameters, weights = plugins(entry)
    scorer = parameters["prefix-cache-scorer"]
    assert scorer["maxPrefixBlocksToMatch"] == matched
    assert scorer["lruCapacityPerServer"] == bound
    assert (weights["prefix-cache-scorer"], weights["queue-scorer"]) == (3, 2)
    assert ("without bound" in entry.note) == (options.get("index_blocks") == 0)
