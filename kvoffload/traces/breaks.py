"""Text that breaks prefixes: it differs between prompts while all behind it is equal.

A clock in a system prompt makes every prompt new from there on. Ids of blocks cannot show that;
only a log with text tells such prompts from different ones. A sample of the prompts is sorted;
where two neighbours share less than what stands equal behind their parting, the text that parts
them breaks their prefix. Nothing of the text is shown unless it is asked for.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace

Texts = list[tuple[str, str]]
"""The parts of a prompt: a role and a text each."""
Cuts = list[tuple[str, str]]
"""The beginning of a text, and the text behind the part that breaks it, for each."""

MOST_PROMPTS = 1_500  # in the sample
MOST_CHARACTERS = 2**14  # of a prompt in the sample
WINDOW = 2_048  # characters behind a parting in which equal text may begin
SHINGLE = 24  # characters that have to be equal for that
LEAST_EQUAL = 64  # characters behind the parting
LEAST_SHARE = 0.05  # of the tokens, below which nothing is said
LEAST_PART = 0.01  # of the tokens, below which one break of several is not listed
NAME_CHARACTERS = 40
MOST_SHARED = 200  # characters that neighbours may share of a text that parts them
SHOWN_CHARACTERS = 40
MOST_CUTS = 64  # beginnings behind which text is cut
_MONTH = (
    "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|January|February|March|April|June|July|"
    "August|September|October|November|December)"
)
_ATOM = "|".join(
    (
        r"\d{4}-\d\d-\d\d",
        r"\d{1,2}[./]\d{1,2}[./]\d{2,4}",
        r"\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d{1,9})?",
        r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b",
        rf"{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?",
        rf"\d{{1,2}}\.? {_MONTH}\b",
        r"1[5-9]\d{8}(?:\d{3})?(?:\.\d{1,9})?\b",
        r"(?<=[, ])(?:19|20)\d\d\b",
        r"[AaPp][Mm]\b|UTC|GMT|Z\b|[+-]\d\d:?\d\d\b",
    )
)
_TIME = re.compile(rf"(?:(?:{_ATOM})(?:,? |T|, at | at )?){{1,8}}")
_TOKEN = re.compile(r"[\w\-.@:/+]{1,200}")
_AROUND = 48  # characters around a parting in which a time is looked for


@dataclass(frozen=True, slots=True)
class Break:
    """Text that parts prompts whose rest is equal.

    Attributes
    ----------
    kind : str
        ``"a time"``, ``"an id"``, ``"a name"`` or ``"own text"``.
    role : str
        Whose message it is in; ``"tools"`` for the definitions of tools.
    character : int
        Where it most often begins in that message, counted from 1.
    requests, tokens : float
        Shares of the sampled prompts that have it, and of all tokens that stand equal behind it in
        two neighbours of the sorted sample.
    text : str
        An example, of at most 40 characters.
    """

    kind: str
    role: str
    character: int
    requests: float
    tokens: float
    text: str = field(repr=False)

    @property
    def place(self) -> str:
        """The kind and the place in words."""
        message = "prompt" if self.role == "prompt" else f"{self.role} message"
        where = "the definitions of the tools" if self.role == "tools" else f"the {message}"
        return f"{self.kind} at character {self.character:,} of {where}"


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A prompt of the sample: its parts as one text, and where each part begins and ends."""

    text: str
    parts: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Parting:
    """Place where two prompts part, and the text behind which they are equal."""

    kind: str
    role: str
    prefix: str  # of the part
    equal: int  # characters
    anchor: str
    text: str


class PrefixBreaks:
    """A sample of the prompts of a log, and what breaks their prefixes.

    Memory: `MOST_PROMPTS` prompts of `MOST_CHARACTERS`.

    Attributes
    ----------
    cuts : bool
        Whether `seen` returns prompts without what was found, instead of sampling them.
    """

    def __init__(self) -> None:
        self.cuts = False
        self._sample: list[_Sampled] = []
        self._seen = 0
        self._draw = random.Random(0)  # noqa: S311 - a sample that is the same each time
        self._cuts: dict[str, list[tuple[str, str]]] = {}
        self._found: list[tuple[Break, Cuts]] = []
        self._having: Counter[int] = Counter()  # prompts by what was found in them
        self._num_cut = 0  # prompts, so far

    def seen(self, texts: Texts) -> Texts:
        """Take a prompt into the sample, perhaps; return it, or what is left of it."""
        if self.cuts:
            self._num_cut += 1
            self._having.update(
                index
                for index, (found, cuts) in enumerate(self._found)
                if _has(found.role, cuts, texts)
            )
            return [(role, self.cut(role, text)) for role, text in texts]
        self._seen += 1
        if len(self._sample) < MOST_PROMPTS:
            self._sample.append(_sampled(texts))
        elif (place := self._draw.randrange(self._seen)) < MOST_PROMPTS:
            self._sample[place] = _sampled(texts)
        return texts

    def found(self) -> list[Break]:
        """Return what breaks prefixes, the most tokens first; none below 5 % of the tokens."""
        sample = sorted(self._sample, key=lambda prompt: prompt.text)
        characters = sum(len(prompt.text) for prompt in sample)
        groups: dict[tuple[str, str], list[_Parting]] = {}
        for one, other in itertools.pairwise(sample):
            parting = _parting(one, other)
            if parting is not None:
                groups.setdefault((parting.role, parting.kind), []).append(parting)
        groups = {key: _from_beginning(group) for key, group in groups.items()}
        cuts = Counter(
            (each.role, each.prefix, each.anchor) for group in groups.values() for each in group
        )
        for (role, prefix, anchor), _ in cuts.most_common(MOST_CUTS):
            self._cuts.setdefault(role, []).append((prefix, anchor))
        equal = {key: sum(each.equal for each in group) for key, group in groups.items()}
        if sum(equal.values()) < LEAST_SHARE * characters or not characters:
            return []
        found = [
            _break(group, sample, equal[key] / characters)
            for key, group in groups.items()
            if equal[key] >= LEAST_PART * characters
        ]
        self._found = sorted(found, key=lambda each: -each[0].tokens)
        return [each for each, _ in self._found]

    @property
    def is_part(self) -> bool:
        """Whether the log has more prompts than the sample."""
        return self._seen > MOST_PROMPTS

    @property
    def counted(self) -> list[Break]:
        """The breaks found, with their share of all prompts that were cut, not of the sample."""
        return [
            replace(found, requests=self._having[index] / max(1, self._num_cut))
            for index, (found, _) in enumerate(self._found)
        ]

    def cut(self, role: str, text: str) -> str:
        """Return a part of a prompt without what breaks its prefix; only after `found`."""
        for prefix, anchor in self._cuts.get(role, ()):
            at = _end_of(prefix, anchor, text)
            if at is not None:
                return prefix + text[at:]
        return text


def _from_beginning(group: list[_Parting]) -> list[_Parting]:
    """Return partings that begin where the text begins: neighbours may share a part of it."""
    begins: list[str] = []
    found: dict[str, str] = {}
    for prefix in sorted({each.prefix for each in group}, key=len):
        near = (begin for begin in begins if len(prefix) - len(begin) <= MOST_SHARED)
        found[prefix] = next((begin for begin in near if prefix.startswith(begin)), prefix)
        if found[prefix] == prefix:
            begins.append(prefix)
    return [replace(each, prefix=found[each.prefix]) for each in group]


def _sampled(texts: Texts) -> _Sampled:
    whole, parts, size = [], [], 0
    for role, text in texts:
        start = size + len(role) + 1
        whole.append(f"{role}\n{text[:MOST_CHARACTERS]}\n")
        parts.append((role, start, start + len(text)))
        size = start + len(text) + 1
        if size > MOST_CHARACTERS:
            break
    return _Sampled("".join(whole)[:MOST_CHARACTERS], tuple(parts))


def _parting(one: _Sampled, other: _Sampled) -> _Parting | None:
    """Return where two neighbours part, if more stands equal behind that than before it."""
    a, b = one.text, other.text
    at = _same(a, 0, b, 0)
    part = next((part for part in one.parts if part[1] <= at <= part[2]), None)
    if at >= min(len(a), len(b)) or part is None:
        return None
    places = {b[place : place + SHINGLE]: place for place in range(_last(b, at), at - 1, -1)}
    for place in range(at, _last(a, at) + 1):
        shingle = a[place : place + SHINGLE]
        if shingle in places:
            break
    else:
        return None
    resumed = places[shingle]
    equal = _same(a, place, b, resumed)
    if equal <= max(at, LEAST_EQUAL):
        return None
    kind, start = _kind(a, b, part[1], at, max(place, resumed))
    return _Parting(
        kind,
        part[0],
        a[part[1] : start],
        equal,
        shingle,
        a[start : start + min(SHOWN_CHARACTERS, max(1, place - start))],
    )


def _last(text: str, at: int) -> int:
    """Return the last place at which equal text may begin."""
    return min(at + WINDOW, len(text) - SHINGLE)


def _same(a: str, start: int, b: str, other: int) -> int:
    """Return how many characters are equal from two places on."""
    most = min(len(a) - start, len(b) - other)
    low, step = 0, 64
    while low < most:
        step = min(step, most - low)
        if a[start + low : start + low + step] == b[other + low : other + low + step]:
            low += step
            step *= 2
        elif step == 1:
            break
        else:
            step = max(1, step // 4)
    return low


def _kind(a: str, b: str, start: int, at: int, end: int) -> tuple[str, int]:
    """Return the kind of the text that parts two prompts, and where it begins."""
    spans = [_time_at(text, start, at) for text in (a, b)]
    if spans[0] is not None and spans[1] is not None:
        return "a time", spans[0]
    begin = at
    while begin > start and _TOKEN.fullmatch(a[begin - 1]):
        begin -= 1
    tokens = [match[0] if (match := _TOKEN.match(text, begin)) else "" for text in (a, b)]
    if all(any(character.isdigit() for character in token) for token in tokens):
        return "an id", begin
    return ("a name" if end - begin <= NAME_CHARACTERS else "own text"), begin


def _time_at(text: str, start: int, at: int) -> int | None:
    """Return where a time begins that a place is in."""
    first = max(start, at - _AROUND)
    for match in _TIME.finditer(text, first, at + _AROUND):
        if match.start() <= at <= match.end():
            return match.start()
    return None


def _end_of(prefix: str, anchor: str, text: str) -> int | None:
    """Return where the text that breaks a prefix ends, None if there is none."""
    if not text.startswith(prefix):
        return None
    start = len(prefix)
    at = text.find(anchor, start + 1, start + WINDOW + 2 * SHINGLE)
    return at if at >= 0 else None


def _has(role: str, cuts: Cuts, texts: Texts) -> bool:
    """Return whether a prompt has a text that one of `cuts` takes out."""
    return any(
        name == role and _end_of(prefix, anchor, text) is not None
        for name, text in texts
        for prefix, anchor in cuts
    )


def _break(group: list[_Parting], sample: list[_Sampled], tokens: float) -> tuple[Break, Cuts]:
    role = group[0].role
    kinds = Counter((each.prefix, each.anchor) for each in group).most_common(MOST_CUTS)
    cuts = [cut for cut, _ in kinds]
    having = sum(
        _has(role, cuts, [(name, prompt.text[start:end]) for name, start, end in prompt.parts])
        for prompt in sample
    )
    places = Counter(len(each.prefix) for each in group)
    place = places.most_common(1)[0][0]
    text = next(each.text for each in group if len(each.prefix) == place)
    first = group[0]
    return Break(first.kind, role, place + 1, having / len(sample), tokens, text), cuts
