"""A router as configuration that can be pasted into the stacks that have it.

Every key and flag was read in the release that an entry names. A stack without the router is
absent, or offers its nearest one with a note on the difference. Names in capitals are
placeholders for values of the user. The stacks:

- llm-d: the endpoint picker's configuration. The inference scheduler has some of its plugins from
  the Gateway API inference extension 1.5.0 and its index from llm-d-kv-cache 0.7.1.
- SGLang: the router's command line.
- vLLM production-stack: values of its Helm chart.
- NVIDIA Dynamo: the command line of the frontend, which contains the router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["RouterConfig", "router_configs"]

LLMD = ("llm-d", "llm-d-inference-scheduler v0.8.0")
SGLANG = ("SGLang router", "sglang-router 0.3.2")
PRODUCTION = ("vLLM production-stack", "vllm-stack 0.1.12")
DYNAMO = ("NVIDIA Dynamo", "ai-dynamo 1.6.1")

LLMD_INDEX_BLOCKS = 31_250  # the endpoint picker's default, for an index without bound
DYNAMO_IDLE_SECONDS = 86_400  # a binding is forgotten after a day without requests
DYNAMO_PREDICTED_SECONDS = 5  # longer than events take, the value of Dynamo's guide


@dataclass(frozen=True)
class RouterConfig:
    """Configuration of one stack for one router.

    `release` names the package and version in which every key of `text`, YAML or a command line,
    was checked. `router` is the stack's own router, policy or scorers. `note` states the
    differences from the router that was replayed, and what else has to be set.
    """

    stack: str
    release: str
    router: str
    text: str
    note: str


def router_configs(
    name: str, options: Mapping[str, float | str], *, block_tokens: int, engines: int
) -> list[RouterConfig]:
    """Return the configuration of each stack that has a router, or one near to it.

    Absent `options` have the router's defaults. `engines` is for command lines that list them.
    There is at most one entry per stack, and none for ``earliest``, which no stack has. Raises
    ``ValueError`` for an unknown router.
    """
    try:
        makers = _MAKERS[name]
    except KeyError:
        known = ", ".join(_MAKERS)
        raise ValueError(f"router must be one of {known}, got {name!r}") from None
    asked = _Asked(options, block_tokens, engines)
    return [maker(asked) for maker in makers]


@dataclass(frozen=True)
class _Asked:
    """A router's options and what else a configuration depends on."""

    options: Mapping[str, float | str]
    block_tokens: int
    engines: int

    @property
    def sees(self) -> float | str:
        return self.options.get("sees", "host")

    def number(self, key: str, default: float) -> float:
        return float(self.options.get(key, default))

    def share(self, key: str, default: float, seen: bool) -> str:
        """Return a percentage as a weight from 0 to 1, and 0 for blocks that the index omits."""
        return _text(self.number(key, default) / 100 if seen else 0)


_Maker = Callable[[_Asked], RouterConfig]


def _text(number: float) -> str:
    return f"{number:.12g}"


# --- llm-d --------------------------------------------------------------------------------------


def _llmd(
    scorers: Mapping[str, float],
    note: str,
    *,
    parameters: str = "",
    before: str = "",
    after: str = "",
    picker: str = "max-score-picker",
) -> RouterConfig:
    """Return a configuration of the endpoint picker.

    `scorers` maps a plugin to its weight; `parameters` belong to the first. `before` lists the
    tokenizer and the plugins of the data layer, `after` connects the latter.
    """
    lines = ["apiVersion: inference.networking.x-k8s.io/v1alpha1", "kind: EndpointPickerConfig"]
    lines += ["plugins:", "- type: single-profile-handler", "- type: decode-filter"]
    lines += before.splitlines()
    for position, scorer in enumerate(scorers):
        lines.append(f"- type: {scorer}")
        if position == 0:
            lines += parameters.splitlines()
    lines.append(f"- type: {picker}")
    lines += after.splitlines()
    lines += ["schedulingProfiles:", "- name: default", "  plugins:"]
    lines.append("  - pluginRef: decode-filter")
    if before:
        lines.append("  - pluginRef: tokenizer")
    for scorer, weight in scorers.items():
        lines.append(f"  - pluginRef: {scorer}")
        lines.append(f"    weight: {_text(weight)}")
    lines.append(f"  - pluginRef: {picker}")
    router = " + ".join(scorers) or picker
    return RouterConfig(*LLMD, router, "\n".join(lines), note)


def _llmd_random(_: _Asked) -> RouterConfig:
    return _llmd({}, "", picker="random-picker")


def _llmd_least_loaded(_: _Asked) -> RouterConfig:
    note = "A request counts as open for at most 2 minutes, unless requestTimeout says otherwise."
    return _llmd({"active-request-scorer": 1}, note)


def _llmd_sticky(_: _Asked) -> RouterConfig:
    note = (
        "The picker sets the header x-session-token when an answer ends, and the client must send"
        " it with the session's next request: check that it arrives. A request without it goes to"
        " the engine with the fewest open requests."
    )
    return _llmd({"session-affinity-scorer": 2, "active-request-scorer": 1}, note)


def _llmd_session(asked: _Asked) -> RouterConfig:
    found = _llmd_sticky(asked)
    note = f"Nearest: a session stays where its first request went; no hash decides. {found.note}"
    return RouterConfig(found.stack, found.release, found.router, found.text, note)


def _llmd_scored(asked: _Asked) -> RouterConfig:
    bound = int(asked.number("index_blocks", LLMD_INDEX_BLOCKS)) or LLMD_INDEX_BLOCKS
    matched = int(asked.number("match_blocks", 0)) or bound
    parameters = (
        "  parameters:\n"
        "    autoTune: false\n"
        f"    blockSizeTokens: {asked.block_tokens}\n"
        f"    maxPrefixBlocksToMatch: {matched}\n"
        f"    lruCapacityPerServer: {bound}"
    )
    weights = {
        "prefix-cache-scorer": asked.number("prefix", 3),
        "queue-scorer": asked.number("queue", 2),
    }
    note = "Blocks are estimated from characters, four per token."
    if not asked.number("index_blocks", LLMD_INDEX_BLOCKS):
        note += f" The index cannot be without bound: it holds {bound} blocks per engine."
    return _llmd(weights, note, parameters=parameters)


def _llmd_events(asked: _Asked) -> RouterConfig:
    sees = asked.sees
    ahead = "true" if asked.number("ahead", 1) else "false"
    parameters = (
        "  parameters:\n"
        "    tokenProcessorConfig:\n"
        f"      blockSize: {asked.block_tokens}\n"
        '      hashSeed: "42"\n'
        f"    speculativeIndexing: {ahead}\n"
        "    indexerConfig:\n"
        "      tokenizersPoolConfig:\n"
        "        modelName: MODEL\n"
        "      kvCacheBackendConfigs:\n"
        "      - name: gpu\n"
        "        weight: 1\n"
        "      - name: cpu\n"
        f"        weight: {asked.share('host', 80, sees != 'device')}"
    )
    before = (
        "- type: tokenizer\n"
        "  parameters:\n"
        "    modelName: MODEL\n"
        "- type: endpoint-notification-source\n"
        "- type: metrics-data-source\n"
        "- type: core-metrics-extractor"
    )
    after = (
        "dataLayer:\n"
        "  sources:\n"
        "  - pluginRef: metrics-data-source\n"
        "    extractors:\n"
        "    - pluginRef: core-metrics-extractor\n"
        "  - pluginRef: endpoint-notification-source\n"
        "    extractors:\n"
        "    - pluginRef: precise-prefix-cache-scorer"
    )
    weights = {
        "precise-prefix-cache-scorer": asked.number("prefix", 2),
        "queue-scorer": asked.number("queue", 1),
    }
    note = (
        "blockSize must be the block size of vLLM, hashSeed its PYTHONHASHSEED, and vLLM must"
        " publish KV events. The score is scaled between the least and the most of the engines, not"
        " by the prompt's length. A medium whose name is missing from kvCacheBackendConfigs counts"
        " like the device."
    )
    if ahead == "true":
        note += " A block counts ahead of its event for 2 seconds, unless speculativeTTL differs."
    if sees == "tier":
        note += " List the medium that the tier's events name, with its weight."
    return _llmd(weights, note, parameters=parameters, before=before, after=after)


# --- SGLang -------------------------------------------------------------------------------------


def _sglang(asked: _Asked, policy: str, *flags: str, note: str = "") -> RouterConfig:
    urls = " ".join(f"http://ENGINE-{number}:30000" for number in range(1, asked.engines + 1))
    lines = ["python -m sglang_router.launch_router", f"--worker-urls {urls}", f"--policy {policy}"]
    return RouterConfig(*SGLANG, policy, _command(*lines, *flags), note)


def _command(*parts: str) -> str:
    return " \\\n  ".join(parts)


def _sglang_round_robin(asked: _Asked) -> RouterConfig:
    return _sglang(asked, "round_robin")


def _sglang_random(asked: _Asked) -> RouterConfig:
    return _sglang(asked, "random")


def _sglang_least_loaded(asked: _Asked) -> RouterConfig:
    note = "Nearest: the less loaded of two engines that are drawn at random."
    return _sglang(asked, "power_of_two", note=note)


_SGLANG_KEY = (
    "The client must send the session's key in the header X-SMG-Routing-Key. A key that is idle"
    " for 4 hours is forgotten, unless --max-idle-secs differs."
)


def _sglang_session(asked: _Asked) -> RouterConfig:
    note = f"Nearest: a new key goes to an engine drawn at random, not by a hash. {_SGLANG_KEY}"
    return _sglang(asked, "manual", "--assignment-mode random", note=note)


def _sglang_sticky(asked: _Asked) -> RouterConfig:
    return _sglang(asked, "manual", "--assignment-mode min_load", note=_SGLANG_KEY)


def _sglang_prefix(asked: _Asked) -> RouterConfig:
    flags = (
        f"--cache-threshold {_text(asked.number('threshold', 0.5))}",
        f"--balance-abs-threshold {_text(asked.number('abs', 32))}",
        f"--balance-rel-threshold {_text(asked.number('rel', 1.1))}",
    )
    note = (
        "The thresholds are given because the release has other defaults: .3, 64 and 1.5."
        " The bound of the index, --max-tree-size, keeps its default."
    )
    return _sglang(asked, "cache_aware", *flags, note=note)


# --- vLLM production-stack ----------------------------------------------------------------------


def _production(logic: str, *lines: str, note: str = "") -> RouterConfig:
    text = "\n".join(["routerSpec:", f"  routingLogic: {logic}", *lines])
    return RouterConfig(*PRODUCTION, logic, text, note)


def _production_round_robin(_: _Asked) -> RouterConfig:
    return _production("roundrobin")


_PRODUCTION_KEY = (
    "A request names its session in the header or body field sessionKey; one without goes to"
    " the engine with the fewest requests per second."
)


def _production_session(_: _Asked) -> RouterConfig:
    note = f"The hash is another one, a ring. {_PRODUCTION_KEY}"
    return _production("session", "  sessionKey: x-session-id", note=note)


def _production_sticky(_: _Asked) -> RouterConfig:
    note = f"Nearest: a hash of the session decides, not the load. {_PRODUCTION_KEY}"
    return _production("session", "  sessionKey: x-session-id", note=note)


def _production_prefix(_: _Asked) -> RouterConfig:
    note = (
        "Nearest: the engine with the longest match, however short, and no regard to load; the"
        " index is never evicted. prefixMinMatchLength counts characters, so no threshold is"
        " given."
    )
    return _production("prefixaware", note=note)


def _production_events(_: _Asked) -> RouterConfig:
    note = (
        "Nearest: LMCache's controller knows the blocks, so the engines must run LMCache. An"
        " engine is taken if it has all but --kv-aware-threshold tokens; else the session or the"
        " fewest requests per second decide. The release looks up the field prompt only, which"
        " chat requests lack."
    )
    lines = (
        "  sessionKey: x-session-id",
        "  lmcacheControllerPort: 9000",
        "  extraArgs:",
        '  - "--kv-aware-threshold"',
        '  - "2000"',
    )
    return _production("kvaware", *lines, note=note)


# --- Dynamo -------------------------------------------------------------------------------------


def _dynamo(mode: str, *flags: str, note: str = "") -> RouterConfig:
    text = _command("python -m dynamo.frontend", f"--router-mode {mode}", *flags)
    return RouterConfig(*DYNAMO, mode, text, note)


def _dynamo_round_robin(_: _Asked) -> RouterConfig:
    return _dynamo("round-robin")


def _dynamo_random(_: _Asked) -> RouterConfig:
    return _dynamo("random")


def _dynamo_least_loaded(_: _Asked) -> RouterConfig:
    return _dynamo("least-loaded")


def _dynamo_sticky(_: _Asked) -> RouterConfig:
    note = (
        "The client must send the session in the header X-Dynamo-Session-ID. A session is"
        " forgotten once it has been idle for that many seconds."
    )
    flag = f"--router-session-affinity-ttl-secs {DYNAMO_IDLE_SECONDS}"
    return _dynamo("least-loaded", flag, note=note)


def _dynamo_session(asked: _Asked) -> RouterConfig:
    found = _dynamo_sticky(asked)
    note = f"Nearest: the load decides on a session's first request, not a hash. {found.note}"
    return RouterConfig(found.stack, found.release, found.router, found.text, note)


def _dynamo_kv(asked: _Asked, *, host: float, tier: float, ahead: float, note: str) -> RouterConfig:
    """Return the KV router with the weights of host and tier that `options` or defaults give."""
    sees = asked.sees
    flags = [
        f"--kv-cache-block-size {asked.block_tokens}",
        f"--router-host-cache-hit-weight {asked.share('host', host, sees != 'device')}",
        f"--router-disk-cache-hit-weight {asked.share('tier', tier, sees == 'tier')}",
    ]
    if asked.number("ahead", ahead):
        flags.append(f"--router-predicted-ttl-secs {DYNAMO_PREDICTED_SECONDS}")
    return _dynamo("kv", *flags, note=note)


_DYNAMO_EVENTS = "The engines must publish KV events, with blocks of this size."


def _dynamo_cost(asked: _Asked) -> RouterConfig:
    found = _dynamo_kv(asked, host=75, tier=25, ahead=0, note=_DYNAMO_EVENTS)
    weight = asked.number("weight", 1)
    if weight == 1:
        return found
    text = _command(found.text, f"--router-prefill-load-scale {_text(weight)}")
    note = f"{found.note} --router-prefill-load-scale is deprecated and ends with 1.7."
    return RouterConfig(found.stack, found.release, found.router, text, note)


def _dynamo_events(asked: _Asked) -> RouterConfig:
    note = f"Nearest: the rule of `cost`, with these weights of the tiers. {_DYNAMO_EVENTS}"
    return _dynamo_kv(asked, host=80, tier=80, ahead=1, note=note)


def _dynamo_scored(asked: _Asked) -> RouterConfig:
    note = (
        "Nearest: the rule of `cost` on the history of routed requests, whose blocks are"
        " forgotten after 120 seconds, unless --router-ttl-secs differs."
    )
    block_size = f"--kv-cache-block-size {asked.block_tokens}"
    return _dynamo("kv", block_size, "--no-router-kv-events", note=note)


_MAKERS: dict[str, tuple[_Maker, ...]] = {
    "round-robin": (_sglang_round_robin, _production_round_robin, _dynamo_round_robin),
    "random": (_llmd_random, _sglang_random, _dynamo_random),
    "least-loaded": (_llmd_least_loaded, _sglang_least_loaded, _dynamo_least_loaded),
    "session": (_llmd_session, _sglang_session, _production_session, _dynamo_session),
    "sticky": (_llmd_sticky, _sglang_sticky, _production_sticky, _dynamo_sticky),
    "prefix": (_sglang_prefix, _production_prefix),
    "scored": (_llmd_scored, _dynamo_scored),
    "events": (_llmd_events, _production_events, _dynamo_events),
    "cost": (_dynamo_cost,),
    "earliest": (),
}
