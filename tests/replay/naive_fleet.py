"""A fleet of engines behind a router, replayed naively: written to be read, not to be fast.

It is a second program for the rules of ``kvoffload.replay`` and shares no code with it: plain
lists, dicts and sets, one sorted list of events. Only the managers are the package's, and what
describes requests and fleets.

Rows are numbered by arrival, then by place. Times are whole nanoseconds.

Where two readings are possible, this is the one taken:

- Host memory and tier hear of a row when its prefill begins and again when it ends. The second time
  comes after `prepare_store` and before `complete_store`, and is no further use to a policy that
  counts uses.
- The i of `round-robin` and `random` counts arrivals as they happen, in a closed loop too.
- The recorded gap of a row without `think` is that of the arrivals in the trace. With ``recorded``
  it is added to the `service` of the row before.
- `cost` and `earliest` keep what they expected of a row when they routed it, whole until the end of
  its prefill.
- `match_blocks` shortens the row for all that `scored` does: the comparison, the count n, and what
  is remembered as sent.
- A block on the device counts for the leads of host memory and tier too, each block on its own.
- The time spans from the first arrival to the last finish.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from urllib.parse import parse_qsl

from kvoffload import CPUOffloadingManager
from kvoffload.replay import Configuration
from kvoffload.traces import Request

PLACES = ("device", "host", "tier")
SECOND = 10**9  # ns
MILLISECOND = 10**6  # ns

# Kinds of events; of those at the same time, the lower kind comes first.
FINISH, END_OF_PREFILL, INDEX_HEARS, ARRIVAL = range(4)


@dataclass(eq=False)
class Row:
    """A request, and what becomes of it."""

    number: int
    place: int  # in the trace
    arrival: int  # recorded; in a closed loop the simulated one, once it is known
    length: int
    output: int
    hashes: list[bytes]
    session: str | None
    service: int
    wait: int | None  # think, or the whole recorded gap; None for the first of a session
    after: Row | None = None  # the session's next row
    engine: int = -1
    expected: Fraction | int = 0  # tokens of the router `cost`, ns of the router `earliest`
    device_hits: int = 0
    host_hits: int = 0
    tier_hits: int = 0
    missed_tokens: int = 0
    stored: int = 0  # in host memory, with what was read from the tier
    tier_stored: int = 0
    pinned: list[int] = field(default_factory=list)  # positions of host hits
    prefill_ns: int = 0
    ttft: int = 0
    finish: int = 0


class Lru:
    """Blocks in order of use, the least recent first; 0 blocks are no bound."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.order: dict[bytes, None] = {}

    def use(self, hashes: Sequence[bytes]) -> None:
        """Insert blocks; the first becomes the most recent."""
        for block in reversed(hashes):
            self.order.pop(block, None)
            self.order[block] = None
        while self.bound and len(self.order) > self.bound:
            del self.order[next(iter(self.order))]


class Engine:
    """One engine: its caches, its queue, and what is open on it."""

    def __init__(self, fleet: Configuration) -> None:
        self.device = Lru(fleet.device)
        self.host = CPUOffloadingManager(1, fleet.host, fleet.policy)
        self.tier: CPUOffloadingManager | None = None
        self.queue: list[Row] = []  # waiting
        self.prefilling: Row | None = None
        self.request: Any = None  # of the host's manager, for the row that is prefilling
        self.on_tier: Any = None  # the same of the tier's manager
        self.taken_slots = 0
        self.open: list[Row] = []
        self.unfilled: list[Row] = []  # routed, prefill not ended
        self.routed = 0


def lead(hashes: Sequence[bytes], *places: Iterable[bytes]) -> int:
    """Count the leading blocks that are in any of the places."""
    count = 0
    for block in hashes:
        if not any(block in place for place in places):
            break
        count += 1
    return count


def time_for(amount: int, rate: int | None) -> int:
    """Return ns, rounded up."""
    return 0 if rate is None else -(-amount * SECOND // rate)


def nanoseconds(milliseconds: Any) -> int:
    """Return whole ns, half to even."""
    return round(milliseconds * MILLISECOND)


def first_8_bytes(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def nearest_rank(values: Iterable[int], percent: int) -> int:
    """Return the least value that `percent` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(1, -(-len(ordered) * percent // 100)) - 1] if ordered else 0


DEFAULTS = {
    "session": "blocks=4",
    "sticky": "blocks=4",
    "prefix": "abs=32&rel=1.1&threshold=.5&index_blocks=0",
    "scored": "prefix=3&queue=2&index_blocks=31250&match_blocks=0",
    "events": "prefix=2&queue=1&host=80&tier=80&sees=host&ahead=1&lag_ms=0",
    "cost": "weight=1&host=75&tier=25&sees=host&ahead=0&lag_ms=0",
    "earliest": "sees=host&ahead=0&lag_ms=0",
}


class Simulation:
    """A replay of requests, its state and its events; `run` leaves what became of them."""

    def __init__(self, requests: Sequence[Request], fleet: Configuration) -> None:
        self.fleet = fleet
        self.block_tokens = fleet.groups.block_tokens
        self.router, _, given = fleet.router.partition("?")
        self.options = dict(parse_qsl(f"{DEFAULTS.get(self.router, '')}&{given}"))
        self.engines = [Engine(fleet) for _ in range(fleet.engines)]
        tier = None
        for engine in self.engines:
            if fleet.tier is None:
                continue
            engine.host.policy.set_declining(False)
            if tier is None or fleet.tier.kind == "private":
                tier = CPUOffloadingManager(1, fleet.tier.slots, fleet.tier.policy)
            engine.tier = tier
        self.rows = numbered(requests, self.block_tokens)
        self.blocks = {block for row in self.rows for block in row.hashes}
        self.events: list[tuple[int, int, int, int]] = []
        self.arrivals = 0  # so far

        # The index of the routers that look at what they sent.
        bound = int(self.options.get("index_blocks", 0))
        self.sent = [Lru(bound) for _ in self.engines]
        self.sent_last: dict[bytes, int] = {}  # block -> engine; remembers what `sent` forgets
        self.homes: dict[str, int] = {}  # KEY -> engine, of `sticky`

        # The index of the routers that hear events.
        self.messages: list[tuple[Row, list[set[bytes]]]] = []
        self.lag = nanoseconds(Fraction(self.options.get("lag_ms", "0")))
        self.known: list[list[set[bytes]]] = [[set(), set(), set()] for _ in self.engines]
        self.ahead: list[list[Row]] = [[] for _ in self.engines]

    # Events

    def run(self) -> Simulation:
        for row in self.rows:
            if self.fleet.loop == "open" or row.wait is None:
                self.schedule(row.arrival, ARRIVAL, row.number)
        while self.events:
            now, kind, first, second = self.events.pop(0)
            if kind == FINISH:
                self.finish(now, first, self.rows[second])
            elif kind == END_OF_PREFILL:
                self.end_prefill(now, first, self.rows[second])
            elif kind == INDEX_HEARS:
                self.hear(*self.messages[first])
                continue
            else:
                first = self.arrive(now, self.rows[first])
            self.begin_if_possible(now, first)
        self.rows.sort(key=lambda row: row.place)
        return self

    def schedule(self, time: int, kind: int, first: int, second: int = 0) -> None:
        bisect.insort(self.events, (time, kind, first, second))

    def arrive(self, now: int, row: Row) -> int:
        """Route a row; return its engine."""
        row.arrival = now
        choose: Callable[[Row], int] = getattr(self, "choose_" + self.router.replace("-", "_"))
        row.engine = choose(row)
        self.arrivals += 1
        engine = self.engines[row.engine]
        engine.routed += 1
        engine.queue.append(row)
        engine.open.append(row)
        engine.unfilled.append(row)
        hashes = self.matched(row)
        if self.router in ("prefix", "scored"):
            self.sent[row.engine].use(hashes)
            self.sent_last.update((block, row.engine) for block in hashes)
        if self.options.get("ahead") == "1":
            self.ahead[row.engine].append(row)
        if self.fleet.loop == "recorded" and row.after is not None:
            self.schedule(now + row.service + (row.after.wait or 0), ARRIVAL, row.after.number)
        return row.engine

    def begin_if_possible(self, now: int, number: int) -> None:
        engine = self.engines[number]
        is_free = not self.fleet.slots or engine.taken_slots < self.fleet.slots
        if engine.queue and engine.prefilling is None and is_free:
            self.begin(now, engine)

    def begin(self, now: int, engine: Engine) -> None:
        fleet = self.fleet
        row = engine.prefilling = engine.queue.pop(0)
        engine.taken_slots += 1
        if fleet.device:
            row.device_hits = lead(row.hashes, engine.device.order)
            engine.device.use(row.hashes)
        engine.request = engine.host.begin(row.hashes)
        if engine.tier is not None:
            engine.on_tier = engine.tier.begin(row.hashes)
        self.read(engine, row)
        hits = row.device_hits + row.host_hits + row.tier_hits
        row.missed_tokens = row.length - min(hits * self.block_tokens, row.length)
        row.prefill_ns = self.prefill_time(row.missed_tokens, row.host_hits, row.tier_hits)
        self.schedule(now + row.prefill_ns, END_OF_PREFILL, row.engine, row.number)

    def prefill_time(self, missed: int, host_hits: int, tier_hits: int) -> int:
        fleet = self.fleet
        if fleet.rate is None:
            return 0
        return (
            time_for(missed, fleet.rate)
            + time_for(host_hits * fleet.block_bytes, fleet.link)
            + time_for(tier_hits * fleet.block_bytes, fleet.tier_link)
        )

    def read(self, engine: Engine, row: Row) -> None:
        """Find what host and tier have behind the device's blocks, and pin it in host."""
        request, tier = engine.request, engine.tier
        position = row.device_hits
        while True:
            for _ in range(request.lookup(position)):
                self.pin(request, row, position)
                position += 1
            rest = row.hashes[position:]
            on_tier = tier.lookup(rest) if tier is not None else 0
            if not on_tier:
                return
            output = request.prepare_store(position, position + on_tier)
            if output is None:
                return
            with_slots = set(output.block_hashes_to_store)
            row.stored += len(with_slots)
            read = []
            for block in rest[:on_tier]:
                if block in with_slots:
                    row.tier_hits += 1
                    read.append(block)
                elif block in engine.host:
                    self.pin(request, row, position)
                else:
                    break
                position += 1
            tier.prepare_load(read)
            tier.complete_load(read)
            if block not in engine.host:
                return

    def pin(self, request: Any, row: Row, position: int) -> None:
        request.prepare_load(position, position + 1)
        row.pinned.append(position)
        row.host_hits += 1

    def end_prefill(self, now: int, number: int, row: Row) -> None:
        engine = self.engines[number]
        request = engine.request
        request.complete_store()  # of what was read from the tier
        for position in row.pinned:
            request.complete_load(position, position + 1)
        output = request.prepare_store()
        stored = []
        if output is not None:
            stored = output.block_hashes_to_store
            row.stored += len(stored)
        given = None
        if engine.tier is not None and stored:
            given = engine.tier.prepare_store(stored)
        request.finish()
        request.complete_store()
        if engine.on_tier is not None:
            engine.on_tier.finish()
        if given is not None:
            engine.tier.complete_store(given.block_hashes_to_store)
            row.tier_stored = len(given.block_hashes_to_store)
        engine.prefilling = engine.request = engine.on_tier = None
        engine.unfilled.remove(row)
        row.ttft = now - row.arrival
        self.publish(now, row)
        row.finish = now
        if self.fleet.rate is not None:
            row.finish += row.output * self.fleet.decode_ns
        self.schedule(row.finish, FINISH, number, row.number)

    def publish(self, now: int, row: Row) -> None:
        engine, tier = self.engines[row.engine], self.engines[row.engine].tier or ()
        host = {block for block in self.blocks if block in engine.host}
        places = [set(engine.device.order), host, {block for block in self.blocks if block in tier}]
        if self.lag:
            self.schedule(now + self.lag, INDEX_HEARS, len(self.messages))
            self.messages.append((row, places))
        else:
            self.hear(row, places)

    def hear(self, row: Row, places: list[set[bytes]]) -> None:
        """Learn what a row's engine has after it, in each of PLACES."""
        sees = self.options.get("sees")
        if sees is not None:
            num_seen = PLACES.index(sees) + 1
            self.known[row.engine][:num_seen] = places[:num_seen]
        if sees == "tier" and self.fleet.tier.kind == "shared":
            for known in self.known:
                known[2] = places[2]
        if self.options.get("ahead") == "1":
            self.ahead[row.engine].remove(row)

    def finish(self, now: int, number: int, row: Row) -> None:
        engine = self.engines[number]
        engine.open.remove(row)
        engine.taken_slots -= 1
        if self.fleet.loop == "closed" and row.after is not None:
            self.schedule(now + (row.after.wait or 0), ARRIVAL, row.after.number)

    # Routers

    def least(self, costs: Sequence[Any]) -> int:
        """Return the engine of least cost; of those the one with fewest rows, then the lowest."""
        engines = range(len(self.engines))
        return min(engines, key=lambda e: (costs[e], self.engines[e].routed, e))

    def matched(self, row: Row) -> list[bytes]:
        """Return the blocks that the router looks at."""
        blocks = int(self.options.get("match_blocks", 0))
        return row.hashes[:blocks] if blocks else row.hashes

    def key(self, row: Row) -> str:
        if row.session is not None:
            return row.session
        if not row.hashes:
            return ""
        return row.hashes[min(int(self.options["blocks"]), len(row.hashes)) - 1].hex()

    def choose_round_robin(self, row: Row) -> int:
        return self.arrivals % len(self.engines)

    def choose_random(self, row: Row) -> int:
        return first_8_bytes(f"{self.fleet.seed}:{self.arrivals}") % len(self.engines)

    def choose_least_loaded(self, row: Row) -> int:
        return self.least([len(engine.open) for engine in self.engines])

    def choose_session(self, row: Row) -> int:
        key = self.key(row)
        draws = [first_8_bytes(f"{key}:{e}") for e in range(len(self.engines))]
        return draws.index(max(draws))

    def choose_sticky(self, row: Row) -> int:
        key = self.key(row)
        if key not in self.homes:
            self.homes[key] = self.choose_least_loaded(row)
        return self.homes[key]

    def choose_prefix(self, row: Row) -> int:
        loads = [len(engine.open) for engine in self.engines]
        most, fewest = max(loads), min(loads)
        absolute, relative = float(self.options["abs"]), float(self.options["rel"])
        if most - fewest > absolute and most > fewest * relative:
            return loads.index(fewest)
        known = lead(row.hashes, *(sent.order for sent in self.sent))
        ratio = known / len(row.hashes) if row.hashes else 0.0
        if ratio > float(self.options["threshold"]):
            last = row.hashes[known - 1]
            engine = self.sent_last[last]
            if last in self.sent[engine].order:
                return engine
            return next(e for e, sent in enumerate(self.sent) if last in sent.order)
        sizes = [len(sent.order) for sent in self.sent]
        return sizes.index(min(sizes))

    def choose_scored(self, row: Row) -> int:
        hashes = self.matched(row)
        leads = [lead(hashes, sent.order) for sent in self.sent]
        return self.most_of_prefix_and_queue(leads, len(hashes))

    def choose_events(self, row: Row) -> int:
        credited = [self.credit(row, e) for e in range(len(self.engines))]
        return self.most_of_prefix_and_queue(credited, len(row.hashes))

    def most_of_prefix_and_queue(self, prefixes: Sequence[Fraction | int], blocks: int) -> int:
        prefix, queue = Fraction(self.options["prefix"]), Fraction(self.options["queue"])
        waiting = [len(engine.queue) for engine in self.engines]
        most, fewest = max(waiting), min(waiting)
        costs = []
        for found, waits in zip(prefixes, waiting, strict=True):
            score = prefix * found / blocks if blocks else Fraction(0)
            if most > fewest:
                score += queue * Fraction(most - waits, most - fewest)
            costs.append(-score)
        return self.least(costs)

    def choose_cost(self, row: Row) -> int:
        tokens = self.block_tokens
        weight = Fraction(self.options["weight"])
        own, costs = [], []
        for e, engine in enumerate(self.engines):
            own.append(max(Fraction(0), row.length - self.credit(row, e) * tokens))
            promised = sum(other.expected for other in engine.unfilled)
            blocks = sum(len(other.hashes) for other in engine.open)
            costs.append(weight * (promised + own[e]) / tokens + blocks)
        chosen = self.least(costs)
        row.expected = own[chosen]
        return chosen

    def choose_earliest(self, row: Row) -> int:
        own, costs = [], []
        for e, engine in enumerate(self.engines):
            device, host, tier = self.leads(row, e)
            missed = row.length - min(tier * self.block_tokens, row.length)
            own.append(self.prefill_time(missed, host - device, tier - host))
            costs.append(sum(other.expected for other in engine.unfilled) + own[e])
        chosen = self.least(costs)
        row.expected = own[chosen]
        return chosen

    def leads(self, row: Row, e: int) -> tuple[int, int, int]:
        """Return the leads on the device, on it or host, and anywhere, as the index knows."""
        coming = {block for other in self.ahead[e] for block in other.hashes}
        device, host, tier = self.known[e]
        return (
            lead(row.hashes, coming, device),
            lead(row.hashes, coming, device, host),
            lead(row.hashes, coming, device, host, tier),
        )

    def credit(self, row: Row, e: int) -> Fraction:
        device, host, tier = self.leads(row, e)
        return (
            device
            + Fraction(self.options["host"]) / 100 * (host - device)
            + Fraction(self.options["tier"]) / 100 * (tier - host)
        )

    # Times

    def saved(self) -> float | None:
        """Return the share of the time in prefill that the caches save; None without rate."""
        prefill = sum(row.prefill_ns for row in self.rows)
        without = sum(time_for(row.length, self.fleet.rate) for row in self.rows)
        return 1 - prefill / without if without else None

    def busy(self) -> float | None:
        """Return the share of the engines' time in prefill; None without rate or span."""
        prefill = sum(row.prefill_ns for row in self.rows)
        span = max(row.finish for row in self.rows) - min(row.arrival for row in self.rows)
        return prefill / (len(self.engines) * span) if self.fleet.rate and span else None


def numbered(requests: Sequence[Request], block_tokens: int) -> list[Row]:
    """Return rows in the order of their numbers, linked within their sessions."""
    ordered = sorted(enumerate(requests), key=lambda one: nanoseconds(one[1].timestamp))  # stable
    made: list[Row] = []
    last: dict[str, Row] = {}
    for number, (place, one) in enumerate(ordered):
        arrival, ids = nanoseconds(one.timestamp), one.hash_ids
        row = Row(
            number=number,
            place=place,
            arrival=arrival,
            length=one.input_length or len(ids) * block_tokens,
            output=one.output_length,
            hashes=[hashlib.sha256(str(block).encode()).digest() for block in ids],
            session=one.session,
            service=nanoseconds(one.service or 0),
            wait=None,
        )
        if one.session in last:
            before = last[one.session]
            row.wait = arrival - before.arrival if one.think is None else nanoseconds(one.think)
            before.after = row
        if one.session is not None:
            last[one.session] = row
        made.append(row)
    return made
