"""Metrics of watches read back from the exporters of an engine or a fleet, and advice."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvoffload._metrics import WATCH_METRICS, WATCH_PREFIX
from kvoffload.errors import describe
from kvoffload.managers._watching import KINDS, OTHERS
from kvoffload.types import MOST_SOURCES

from .metrics import EXACT, HEEDING, PLAIN, UNMARKED, memory_label

LEAST_GAIN = 0.01
"""Least gain of a change, less its error, that is reported."""
MOST_ENGINES = 4096
MOST_LINES = 2**17
LONGEST_LINE = 2**13
MOST_SERIES = 1024
"""Most series of one metric over all watches of a URL."""
LARGEST = 2.0**63
"""Largest value of a metric that is not a share."""
SHARES = ("shadow_hit_ratio", "shadow_error", "hint_hit_ratio", "hints_followed")

_KNOWN = {metric.name: metric for metric in WATCH_METRICS if metric.kind != "histogram"}

# Prometheus' text format. No alternatives of an expression match the same text, so that each takes
# time linear in a line; prometheus_client's parser copies a label for each of its escaped quotes.
_NAME = re.compile(
    rf"\s*((?:[\w:]*[:_])?{WATCH_PREFIX}({'|'.join(_KNOWN)})(?:_total)?)(?:\s*(\{{)|(?=\s))"
)
_LABEL = re.compile(r'(?a)[\s,]*([^\W\d]\w*)\s*=\s*"([^"\\]*(?:\\.[^"\\]*)*)"\s*(?=[,}])')
_END = re.compile(r"[\s,]*\}")
_VALUE = re.compile(r"\s*([^\s_]+)(?:\s+[-+.\de]+)?\s*(?:#.*)?")  # and a time, and an exemplar
_ESCAPED = re.compile(r'\\([\\n"])')

Series = tuple[str, ...]
"""The values of a metric's own labels."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The scraped metrics of one watch, by name and by the values of their own labels."""

    labels: tuple[tuple[str, str], ...]  # its URL, and the labels that are not the metrics' own
    values: dict[str, dict[Series, float]] = field(default_factory=lambda: defaultdict(dict))

    def value(self, name: str, *labels: str) -> float:
        """Return a value; 0 if it is missing."""
        return self.values.get(name, {}).get(labels, 0.0)


Shares = list[tuple[Engine, float]]


@dataclass(frozen=True, slots=True)
class Shadow:
    """A point of a fleet."""

    policy: str
    memory: float  # multiple of the present memory
    hit_ratio: float | None  # None if an engine with requests has none
    error: float | None  # likewise
    marks: tuple[str, ...] = ()  # of any engine; advice ignores marked points
    reasons: tuple[str, ...] = ()  # of any engine why it has no hit ratio


@dataclass(frozen=True, slots=True)
class SourceHints:
    """The hints of one source in a fleet."""

    source: str
    ends: float
    expects: float
    returns: float | None  # since each engine's start or last reset; None if no engine counts them
    factor: float | None  # the mean of the engines', weighted by returns; None without evidence


@dataclass(frozen=True, slots=True)
class HintTrials:
    """The mean of the engines' trials of hints, weighted by each engine's requested blocks."""

    hit_ratio: float
    plain: float
    error: float  # of the difference
    followed: float  # total weight of the engines that evict by the rule with hints


@dataclass(frozen=True, slots=True)
class View:
    """The sums over a fleet; counters are since the previous view, or since the start."""

    engines: int  # number of watches
    policy: str  # the policies in use, separated by commas
    capacity: float
    asked: float
    missed: float
    stored: float
    evicted: float
    declined: float
    refused: float
    failed: float
    resets: float
    tail_missed_tokens: float  # that windows or states kept from being loaded
    shadows: tuple[Shadow, ...]  # in the watches' own window, by policy and memory
    causes: dict[str, float]  # shares of the misses, largest first
    waste: float | None  # share of the evicted blocks that were never hit
    overdue: dict[str, float]  # blocks, by kind of transfer
    oldest: dict[str, float]  # age of the oldest open transfer in seconds, by kind
    hints: tuple[SourceHints, ...]  # by source, most hints first; the last sums all beyond 16
    hint_trials: HintTrials | None  # None if an engine with requests has none
    advice: tuple[str, ...]  # at most three sentences

    @property
    def hit_ratio(self) -> float | None:
        """Share of the requested blocks that were hits; None without requests."""
        return 1 - self.missed / self.asked if self.asked > 0 else None


def read_engines(url: str, text: str) -> list[Engine]:
    """Parse a URL's answer in Prometheus' text format, ignoring lines that are not a watch's.

    Each set of labels that are not the metrics' own is an engine, to which gauges also belong that
    have a label ``pid`` besides: those of each API server of vLLM before 0.33. Raise ValueError if
    such a line is not in that format, if there are more or longer ones than watches export, or if a
    value is impossible.
    """
    engines: dict[tuple[tuple[str, str], ...], Engine] = {}
    series: dict[str, set[Series]] = defaultdict(set)
    lines = [line for line in text.split("\n") if WATCH_PREFIX in line]
    if len(lines) > MOST_LINES:
        raise ValueError(f"more than {MOST_LINES:,} lines are of a watch")
    if any(len(line) > LONGEST_LINE for line in lines):
        raise ValueError(f"a line is longer than {LONGEST_LINE:,} characters")
    for line in lines:
        start = _NAME.match(line)
        if start is None:
            continue  # a comment, or another metric
        name, metric = start[1], _KNOWN[start[2]]
        labels, value = _sample(line, start.end(), has_labels=bool(start[3]))
        if not math.isfinite(value) and metric.kind == "gauge":
            continue
        largest = 1.0 if metric.name in SHARES else LARGEST
        if not 0 <= value <= largest:
            raise ValueError(f"{name} must be 0 ... {largest:.3g}, got {value:.3g}")
        own = tuple(labels.get(label, "") for label in metric.labels)
        rest = sorted(pair for pair in labels.items() if pair[0] not in metric.labels)
        key = (("url", url), *rest)
        if len(engines) >= MOST_ENGINES and key not in engines:
            raise ValueError(f"more than {MOST_ENGINES:,} watches")
        series[metric.name].add(own)
        if len(series[metric.name]) > MOST_SERIES:
            raise ValueError(f"{name} has more than {MOST_SERIES:,} values of labels")
        engines.setdefault(key, Engine(key)).values[metric.name][own] = value
    for key in list(engines):
        engine = engines.get(tuple(pair for pair in key if pair[0] != "pid"))
        if engine is not None and engine.labels != key:
            for name, values in engines.pop(key).values.items():
                engine.values[name].update(values)
    return list(engines.values())


def _sample(line: str, end: int, *, has_labels: bool) -> tuple[dict[str, str], float]:
    """Return the labels and the value of a line, which begin at `end`."""
    labels: dict[str, str] = {}
    while has_labels:
        if closed := _END.match(line, end):
            end = closed.end()
            break
        label = _LABEL.match(line, end)
        if label is None or label[1] in labels:
            raise ValueError(f'labels must be name="value", each once, got {describe(line)}')
        labels[label[1]] = _ESCAPED.sub(_unescaped, label[2])
        end = label.end()
    number = _VALUE.fullmatch(line, end)
    try:
        return labels, float(number[1] if number else "")
    except ValueError:
        raise ValueError(f"value must be a number, got {describe(line[end:])}") from None


def _unescaped(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]


def view(engines: Sequence[Engine], before: Sequence[Engine] | None = None) -> View:
    """Add up a fleet; count since `before`, the engines of the previous view, or since the start.

    An engine that has restarted, of which some counter has fallen, counts since then; one that
    `before` lacks does not count yet.
    """
    fleet = _added_up(engines, before)
    missed = fleet.values["sampled_missed_blocks"]
    all_missed = sum(missed.values())
    evicted = sum(fleet.values["sampled_evicted_blocks"].values())
    policies = {policy for policy, _ in fleet.values["watch_info"]}
    shares = _shares(engines)
    shadows = tuple(_shadows(fleet, shares))
    return View(
        engines=len(engines),
        policy=", ".join(sorted(policies)),
        capacity=fleet.value("capacity_blocks"),
        **{name: fleet.value(metric) for metric, name in EXACT.items()},
        shadows=shadows,
        causes={
            cause: count / all_missed
            for (cause,), count in sorted(missed.items(), key=lambda item: -item[1])
            if count > 0
        },
        waste=fleet.value("sampled_evicted_blocks", "false") / evicted if evicted > 0 else None,
        overdue={kind: fleet.value("overdue_blocks", kind) for kind in KINDS},
        oldest={
            kind: max((engine.value("oldest_open_seconds", kind) for engine in engines), default=0)
            for kind in KINDS
        },
        hints=tuple(_hints(engines, fleet)),
        hint_trials=_hint_trials(shares),
        advice=tuple(advise(policies, shadows)),
    )


def _added_up(engines: Sequence[Engine], before: Sequence[Engine] | None) -> Engine:
    """Return the sum of each series, for counters since `before`, as one engine."""
    former = {engine.labels: engine for engine in before or ()}
    fleet = Engine(())
    for engine in engines:
        past = Engine(()) if before is None else former.get(engine.labels, engine)
        counters = {name for name in engine.values if _KNOWN[name].kind == "counter"}
        if any(
            value < past.value(name, *labels)
            for name in counters
            for labels, value in engine.values[name].items()
        ):
            past = Engine(())
        for name, series in engine.values.items():
            sums = fleet.values[name]
            for labels, value in series.items():
                counted = past.value(name, *labels) if name in counters else 0.0
                sums[labels] = sums.get(labels, 0.0) + (value - counted)
    return fleet


def _hints(engines: Sequence[Engine], fleet: Engine) -> Iterable[SourceHints]:
    """Yield the hints of each source; if there are many, sum the smallest as others."""
    said = {
        source: (fleet.value("hints", source, "ends"), fleet.value("hints", source, "expects"))
        for source, kind in fleet.values["hints"]
        if kind in ("ends", "expects")
    }
    order = sorted(said, key=lambda source: (source == OTHERS, -sum(said[source]), source))
    rest = order[MOST_SOURCES:]
    for source in order if rest == [OTHERS] else order[:MOST_SOURCES]:
        yield SourceHints(source, *said[source], *_worth(engines, fleet, source))
    if rest not in ([], [OTHERS]):
        ends, expects = (sum(counts) for counts in zip(*(said[each] for each in rest), strict=True))
        yield SourceHints(OTHERS, ends, expects, None, None)


def _worth(
    engines: Sequence[Engine], fleet: Engine, source: str
) -> tuple[float | None, float | None]:
    """Return the number of returns and the factor of a source over the engines."""
    weight = factors = 0.0
    for engine in engines:
        factor = engine.values.get("hint_factor", {}).get((source,))
        if factor is not None:
            weight += engine.value("hint_returns", source)
            factors += engine.value("hint_returns", source) * factor
    return fleet.values["hint_returns"].get((source,)), factors / weight if weight else None


def _hint_trials(shares: Shares) -> HintTrials | None:
    hit_ratio = plain = followed = 0.0
    errors = []
    for engine, share in shares:
        trials = engine.values.get("hint_hit_ratio", {})
        if not {(HEEDING,), (PLAIN,)} <= trials.keys() or () not in engine.values["hint_error"]:
            return None
        hit_ratio += share * trials[HEEDING,]
        plain += share * trials[PLAIN,]
        errors.append(share * engine.value("hint_error"))
        followed += share * engine.value("hints_followed")
    if not shares:
        return None
    # A sum of shares may round to more than 1.
    return HintTrials(min(1.0, hit_ratio), min(1.0, plain), math.hypot(*errors), min(1.0, followed))


def _shares(engines: Sequence[Engine]) -> Shares:
    """Return the engines with requests in their window, and their shares of all blocks."""
    weights = [(engine, engine.value("window_asked_blocks")) for engine in engines]
    whole = sum(weight for _, weight in weights)
    return [(engine, weight / whole) for engine, weight in weights if weight > 0]


def _shadows(fleet: Engine, shares: Shares) -> Iterable[Shadow]:
    """Yield the means of the engines' points, weighted by each engine's requested blocks."""
    parts: dict[Series, list[tuple[float, float]]] = defaultdict(list)  # of hit ratio, error
    marks: dict[Series, set[str]] = defaultdict(set)
    reasons: dict[Series, set[str]] = defaultdict(set)
    for engine, share in shares:
        for *key, reason in engine.values.get("shadow_withheld", {}):
            reasons[tuple(key)].add(reason)
        ratios: dict[Series, float] = {}
        for (*key, label), ratio in engine.values.get("shadow_hit_ratio", {}).items():
            # A point without the label comes from a version that did not export marks.
            marks[tuple(key)] |= {mark or "unknown" for mark in label.split(",")}
            ratios.setdefault(tuple(key), ratio)
        for point, ratio in ratios.items():
            parts[point].append((share * ratio, share * engine.value("shadow_error", *point)))
    names = ("shadow_missed_blocks", "shadow_hit_ratio", "shadow_withheld")
    points = {labels[:2] for name in names for labels in fleet.values[name]}
    for point in sorted(points, key=lambda point: (point[0], _number(point[1]))):
        policy, memory = point[0], _number(point[1])
        if not parts[point] or len(parts[point]) < len(shares):
            yield Shadow(policy, memory, None, None, (), tuple(sorted(reasons[point])))
            continue
        found, errors = zip(*parts[point], strict=True)
        yield Shadow(
            policy,
            memory,
            min(1.0, sum(found)),  # sums of shares may round to more
            math.hypot(*errors),
            tuple(sorted(marks[point] - {UNMARKED})),
        )


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.inf
    return value if math.isfinite(value) else math.inf


def advise(policies: Iterable[str], shadows: Sequence[Shadow]) -> list[str]:
    """Return at most three sentences, each about a change that gains a point or more.

    Marked points are ignored, except the present one, which is counted exactly. If several policies
    are in use, there is no advice.
    """
    live = list(policies)
    points = {
        (each.policy, each.memory): (each.hit_ratio, each.error or 0.0)
        for each in shadows
        if each.hit_ratio is not None
        and (not each.marks or (each.policy, each.memory) == (*live, 1.0))
    }
    if len(live) != 1 or (live[0], 1.0) not in points:
        return []
    present = points[live[0], 1.0][0]
    gains = {
        key: (ratio - present, error)
        for key, (ratio, error) in points.items()
        if ratio - present - error >= LEAST_GAIN
    }

    def sentence(what: str, gain: float, error: float) -> str:
        return f"{what}: {100 * gain:+.1f} ± {100 * error:.1f} points of hit ratio."

    found = []
    more = sorted(
        (memory, *gain)
        for (policy, memory), gain in gains.items()
        if policy == live[0] and memory > 1
    )
    if more:
        least, most = more[0], max(more, key=lambda each: each[1])
        found.append(sentence(f"{memory_label(least[0])}× memory", *least[1:]))
        if most[1] - least[1] - most[2] - least[2] >= LEAST_GAIN:
            found.append(sentence(f"{memory_label(most[0])}× memory", *most[1:]))
    others = [(*gain, policy) for (policy, memory), gain in gains.items() if memory == 1]
    if others:
        gain, error, policy = max(others)
        found.append(sentence(f"Policy {policy} at this memory", gain, error))
    return found
