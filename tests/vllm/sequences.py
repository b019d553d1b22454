"""Long random sequences of calls, legal for vLLM's manager, over a pair of managers.

Requests overlap, share prefixes, look up, load, store in chunks out of order, fail, are touched,
finish early and late, and caches are reset under them.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import make_offload_key

from kvoffload.integrations.vllm._upstream import installed_release
from tests.vllm.pair import Pair

RELEASE = installed_release()
#: How many events are taken of those that there are. Where some are left, vLLM gave all of them
#: again before 0.33; here that happens in no release.
TAKEN = (None,) if RELEASE.name in ("0.31", "0.32") else (None, 0, 1)


@dataclass
class Shape:
    """The parameters of a drawn sequence.

    Attributes
    ----------
    num_groups : int
        KV groups; each has a key for every position of a chain.
    num_chains, chain_length : int
        Chains, and the positions of each; chains share prefixes.
    num_chunks : int
        Capacity of the managers.
    unpositioned : float
        Share of requests that lack some positions.
    """

    num_groups: int
    num_chains: int
    chain_length: int
    num_chunks: int
    unpositioned: float = 0.2
    odd_keys: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> Shape:
        num_groups = rng.choice((1, 1, 2, 3))
        length = rng.randint(2, 12)
        chains = rng.randint(1, 6)
        total = num_groups * length * chains
        return cls(
            num_groups,
            chains,
            length,
            rng.choice((0, 1, total // 4, total // 3, total // 2, total)),
            rng.choice((0.0, 0.0, 0.3, 1.0)),
            rng.random() < 0.2,
        )

    def chains(self, rng: random.Random) -> list[list[list[bytes]]]:
        """Return the keys by chain, position and group; later chains share earlier prefixes."""
        hashes: list[list[bytes]] = []
        for chain in range(self.num_chains):
            shared = rng.randint(0, self.chain_length) if hashes else 0
            prefix = rng.choice(hashes)[:shared] if hashes else []
            fresh = [
                hashlib.sha256(b"%d.%d" % (chain, position)).digest()
                for position in range(shared, self.chain_length)
            ]
            if self.odd_keys:  # short and long ones, some the beginning of others
                fresh = [
                    digest[: rng.choice((1, 2, 31, 32))] * rng.choice((1, 1, 3)) for digest in fresh
                ]
            hashes.append(prefix + fresh)
        return [
            [[bytes(make_offload_key(h, g)) for g in range(self.num_groups)] for h in chain]
            for chain in hashes
        ]


@dataclass
class Request:
    """One request, as the sequence sees it."""

    name: str
    contexts: Any
    keys: list[bytes]
    loads: list[list[bytes]] = field(default_factory=list)
    stores: list[list[bytes]] = field(default_factory=list)
    shown: set[bytes] = field(default_factory=set)
    finished: bool = False


class Drawn:
    """The keys of random chains, and the source of every later choice."""

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.rng = random.Random(seed)
        self.shape = shape or Shape.draw(self.rng)
        self.chains = self.shape.chains(self.rng)
        self.keys = list(
            dict.fromkeys(key for chain in self.chains for groups in chain for key in groups)
        )


class Sequence:
    """Drive a pair with random calls for the keys of a draw."""

    def __init__(self, pair: Pair, drawn: Drawn) -> None:
        self.pair = pair
        self.chains = drawn.chains
        self.rng = drawn.rng
        self.unpositioned = drawn.shape.unpositioned
        self.requests: list[Request] = []
        self.count = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.pair.stats()
        self.pair.take_events(None)

    def step(self) -> None:
        rng = self.rng
        if not self.requests or rng.random() < 0.1:
            self.new_request()
            return
        request = rng.choice(self.requests)
        action = rng.choices(
            ("lookup", "load", "store", "complete", "touch", "finish", "late", "rare"),
            (3, 6, 8, 10, 1, 2, 1, 1),
        )[0]
        getattr(self, action)(request)
        if len(self.requests) > 6:
            self.drop(next((r for r in self.requests if r.finished), self.requests[0]))

    def new_request(self) -> None:
        rng = self.rng
        chain = rng.choice(self.chains)[: rng.randint(1, len(self.chains[0]))]
        self.count += 1
        contexts = self.pair.context(f"r{self.count}")
        keys = [key for groups in chain for key in groups]
        if rng.random() < 0.5:  # by group, as the connector has them
            keys = [groups[g] for g in range(len(chain[0])) for groups in chain]
        partial = rng.random() < self.unpositioned
        noted = [
            (key, (position + 1) * 16)
            for position, groups in enumerate(chain)
            for key in groups
            if not partial or rng.random() < 0.6
        ]
        for key, position in rng.sample(noted, len(noted)) if rng.random() < 0.2 else noted:
            self.pair.set_position(contexts, bytes(bytearray(key)), position)
        request = Request(f"r{self.count}", contexts, list(dict.fromkeys(keys)))
        self.requests.append(request)
        if rng.random() < 0.9:
            self.pair.call("on_new_request", contexts=contexts)

    def some(self, keys: list[bytes]) -> list[bytes]:
        """Return a part of the keys: a run, a prefix or a sample out of order."""
        rng = self.rng
        if not keys:
            return []
        kind = rng.random()
        if kind < 0.5:
            start = rng.randrange(len(keys))
            return keys[start : start + rng.randint(1, len(keys))]
        if kind < 0.8:
            return keys[: rng.randint(1, len(keys))]
        return rng.sample(keys, rng.randint(1, len(keys)))

    def ready(self, keys: list[bytes]) -> list[bytes]:
        policy = self.pair.both[0]._policy
        return [key for key in keys if (chunk := policy.get(key)) is not None and chunk.is_ready]

    def allowed(self, request: Request, keys: list[bytes]) -> list[bytes]:
        """Return the keys that the request may still access."""
        return [key for key in keys if key in request.shown] if request.finished else keys

    # ---- actions ----

    def lookup(self, request: Request) -> None:
        for key in self.some(request.keys):
            self.pair.call("lookup", key, contexts=request.contexts)

    def load(self, request: Request) -> None:
        if request.finished:
            return
        keys = self.ready(self.some(request.keys))
        if self.rng.random() < 0.1:
            keys = keys + self.some(keys)  # repeats pin once more each
        self.pair.call("prepare_load", keys, contexts=request.contexts)
        request.shown.update(keys)
        if keys:
            request.loads.append(keys)

    def store(self, request: Request) -> None:
        if request.finished:
            return
        keys = self.some(request.keys)
        if self.rng.random() < 0.1:  # the same keys as other objects, at other positions
            keys = [bytes(bytearray(key)) for key in keys]
            for place, key in enumerate(keys[::2]):
                self.pair.set_position(request.contexts, key, (100 - place) * 16)
        output = self.pair.call("prepare_store", keys, contexts=request.contexts)
        self.note_shown(request)
        if output is not None and output.keys_to_store:
            request.stores.append(list(output.keys_to_store))

    def note_shown(self, request: Request) -> None:
        """Read off vLLM's state which keys the request has shown."""
        for state in request.contexts[0]._state.values():
            if hasattr(state, "seen_keys"):  # vLLM's own; ours keeps its to itself
                request.shown = set(state.seen_keys)

    def complete(self, request: Request) -> None:
        rng = self.rng
        if request.loads and rng.random() < 0.5:
            keys = request.loads.pop(rng.randrange(len(request.loads)))
            self.pair.call("complete_load", self.as_given(keys), contexts=request.contexts)
        elif request.stores:
            keys = request.stores.pop(rng.randrange(len(request.stores)))
            if rng.random() < 0.2:  # in two parts
                request.stores.append(keys[1:])
                keys = keys[:1]
            self.pair.call(
                "complete_store",
                keys if rng.random() < 0.8 else keys + self.some(request.keys),
                contexts=request.contexts,
                success=rng.random() < 0.85,
            )

    def as_given(self, keys: list[bytes]) -> Any:
        """Return keys as a set where they are one, as the connector does."""
        if len(set(keys)) == len(keys) and self.rng.random() < 0.3:
            return set(keys)
        return tuple(keys)

    def touch(self, request: Request) -> None:
        keys = self.some(request.keys)
        self.pair.call("touch", keys + self.some(keys), contexts=request.contexts)

    def finish(self, request: Request) -> None:
        self.pair.call("on_request_finished", contexts=request.contexts)
        self.note_shown(request)
        request.finished = True

    def late(self, request: Request) -> None:
        """Call again for keys that a finished request has shown before."""
        if not request.finished:
            return
        self.note_shown(request)
        keys = self.allowed(request, self.some(request.keys))
        if self.rng.random() < 0.5:
            keys = self.ready(keys)
            self.pair.call("prepare_load", keys, contexts=request.contexts)
            if keys:
                request.loads.append(keys)
        else:
            output = self.pair.call("prepare_store", keys, contexts=request.contexts)
            if output is not None and output.keys_to_store:
                request.stores.append(list(output.keys_to_store))

    def rare(self, request: Request) -> None:
        kind = self.rng.random()
        if kind < 0.35:
            self.pair.take_events(self.rng.choice(TAKEN))
        elif kind < 0.65:
            self.pair.stats()
        elif kind < 0.8:
            if not RELEASE.hit_sources:
                return
            key = self.rng.choice(request.keys)
            self.pair.call("get_load_source", key, contexts=request.contexts)
        elif kind < 0.9:
            self.pair.call("reset_cache")
            for other in self.requests:  # transfers in flight are void
                other.loads.clear()
                other.stores.clear()
                other.finished = False
                other.shown.clear()
        else:
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Forget a request; its transfers are completed first."""
        for keys in request.loads:
            self.pair.call("complete_load", keys, contexts=request.contexts)
        for keys in request.stores:
            self.pair.call("complete_store", keys, contexts=request.contexts, success=True)
        self.requests.remove(request)
