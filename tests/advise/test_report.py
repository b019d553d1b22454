"""The report as a file: whole, escaped, and sealed by its content security policy."""

import base64
import re
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser

import pytest

pytest.importorskip("jinja2", reason="the report needs the report extra")
pytest.importorskip("matplotlib", reason="its pictures need the report extra")

from kvoffload.advise import chart
from kvoffload.advise.answer import column
from kvoffload.advise.choice import POLICIES
from kvoffload.advise.knee import Knee, Rung
from kvoffload.advise.report import report_html
from kvoffload.advise.tables import heats, routers
from kvoffload.advise.units import percent_text
from kvoffload.policies import registry

from .pages import (
    HOSTILE,
    fleet_page,
    fleet_subject,
    hostile_fleet_page,
    hostile_page,
    page,
    subject,
)

PICTURE = "data:image/svg+xml;base64,"


class Tags(HTMLParser):
    """A collector of the tags of a page, and of the text of its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.sealed = {"script": "", "style": ""}
        self.inside = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside in self.sealed:
            self.sealed[self.inside] += data


@pytest.fixture(scope="module")
def text():
    return page()


@pytest.mark.thorough
@pytest.mark.parametrize("make", [page, fleet_page])
def test_it_names_nothing_outside_itself(make):
    text = make()
    for tag, attributes in Tags(text).tags:
        for name in ("src", "href", "action", "data", "xlink:href"):
            target = attributes.get(name, "#")
            assert target.startswith(("#", "data:,", PICTURE)), (tag, attributes)
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("make", [page, pytest.param(fleet_page, marks=pytest.mark.thorough)])
def test_its_policy_admits_its_own_script_and_style_and_nothing_else(make):
    found = Tags(make())
    (policy,) = (a["content"] for t, a in found.tags if a.get("http-equiv"))
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for kind, content in found.sealed.items():
        assert content
        digest = base64.b64encode(sha256(content.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"


@pytest.mark.parametrize("make", [hostile_page, hostile_fleet_page])
def test_foreign_strings_are_text(make):
    hostile = make()
    tags = Tags(hostile).tags
    assert sum(tag == "script" for tag, _ in tags) == 1
    assert all(attributes["src"].startswith(PICTURE) for tag, attributes in tags if tag == "img")
    assert "onerror" not in "".join(name for _, attributes in tags for name in attributes)
    assert HOSTILE.splitlines()[0] not in hostile
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in hostile
    assert "{{7*7}}" in hostile
    assert "49" not in re.findall(r"<h1>.*?</h1>", hostile, re.DOTALL)[0]


def pictures(text):
    """Return the words of each picture of a page, by the width and scheme in which it is shown."""
    found = {}
    for tag, attributes in Tags(text).tags:
        address = attributes.get("srcset") if tag == "source" else attributes.get("src", "")
        if tag in ("source", "img"):
            drawn = base64.b64decode(address.removeprefix(PICTURE)).decode()
            words = re.findall("<!-- (.*?) -->", drawn, re.DOTALL)
            found.setdefault(attributes.get("media"), []).append(set(words))
    return found


@pytest.mark.parametrize("requests", [1, 20, 100])
def test_the_chart_names_every_policy_and_memory_in_each_size_and_scheme(requests):
    found = pictures(page(requests=requests))
    narrow = "(max-width: 640px)"
    dark = "(prefers-color-scheme: dark)"
    assert set(found) == {None, dark, narrow, f"{dark} and {narrow}"}
    for condition, (drawn, *_) in found.items():
        assert {*POLICIES, "belady", "infinite"} <= drawn
        sizes = {"100 MiB", "200 MiB", "asked for", "400 MiB", "800 MiB"}
        if condition is not None and narrow in condition:
            sizes = {part for size in sizes for part in (size.split() if "MiB" in size else [size])}
        assert sizes <= drawn
    assert [len(some) for some in found.values()].count(3) == 2  # details are drawn in one size


@pytest.mark.thorough
def test_a_fleet_has_a_chart_with_a_line_per_router(monkeypatch):
    advice = fleet_subject().advice
    found = pictures(fleet_page())
    assert {*routers(advice), "enough"} <= found[None][0]
    drawn = []
    monkeypatch.setattr(chart, "draw_lines", lambda _, lines, *__, **___: drawn.append(lines))
    chart.over_memory(fleet_subject())
    rows = next(iter(heats(advice).values()))
    for line, (router, results) in zip(drawn[0], rows.items(), strict=True):
        assert line.name == router
        shares = dict(zip(line.x, line.y, strict=True))
        assert [shares.get(place) for place in range(5)] == [one and one.saved for one in results]
        assert ("linewidth" in line.more) == (router == advice.case.router)


def test_what_reads_like_the_best_policy_of_a_column_is_bold_and_a_caption_says_so(text):
    for texts, marks in (
        (["55.2 %", "55.2 %", "55.1 %", "60 %"], [True, True, False, False]),
        (["55.2 %", "55.2 %", "55.2 %", "60 %"], [False] * 4),
    ):
        cells = column("hit ratio", texts, [0.5521, 0.5519, 0.5513]).cells
        assert [cell.best for cell in cells] == marks
    captions = re.findall("<caption>(.*?)</caption>", text)
    assert captions[0].endswith("; bold: the best policies of a column, if they differ")
    assert not any("bold" in caption for caption in captions[1:])
    assert all("bold" not in caption for caption in re.findall("<caption>.*", fleet_page()))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [page, fleet_page, hostile_page])
def test_no_line_ends_within_an_option(make):
    text = re.sub("<(style|script|code)>.*?</", "", make(), flags=re.DOTALL)
    said = re.findall(r"(.{21})--(device-memory|engines)\b", text)
    assert said
    assert {before for before, _ in said} == {'<span class="option">'}
    assert ".option { white-space: nowrap; }" in make()


def test_it_says_what_each_row_is(text):
    for name in POLICIES:
        meaning = registry.entry(name).summary.replace("'", "&#39;")
        assert f"<dt>{name}</dt><dd>{meaning}</dd>" in text
    assert "<dt>belady</dt>" in text
    assert "<dt>infinite</dt>" in text


def test_without_a_recommendation_there_is_no_configuration():
    short = page(requests=20)
    assert "No recommendation" in short
    assert "CPUOffloadingManager" not in short
    assert 'href="#table"' in short


@pytest.mark.thorough
def test_a_fleet_has_a_heat_map_for_each_policy_and_tier():
    subject, text = fleet_subject(), fleet_page().replace("\u00a0", " ")
    advice = subject.advice
    assert text.count('class="heat"') == 4
    assert text.count(' enough"') == 1
    for router in routers(subject.advice):
        assert text.count(f'<th scope="row">{router}</th>') == 5  # and one of first tokens
    for rows in heats(subject.advice).values():
        for results in rows.values():
            assert len(results) == 5
            for result in results:
                assert percent_text(result.saved) in text
    assert f"<b>{percent_text(advice.result.saved)}</b>" in text
    assert "cpu_bytes_to_use" in text


@pytest.mark.thorough
def test_a_fleet_without_a_recommendation_has_no_configuration():
    subject = fleet_subject()
    advice = replace(subject.advice, objections=["no reuse"], unbounded=0.0)
    text = report_html(replace(subject, advice=advice))
    assert "Offloading does not pay: no reuse." in text
    assert 'id="configuration"' not in text


def test_a_memory_for_which_nobody_asked_is_not_said_to_be():
    knee = Knee(1, 1, 1, is_shown=False, curve=(Rung(1, "lru", 0.0, 0.0, 0.0),))
    said = pictures(report_html(replace(subject(), knee=knee)))[None][0]
    assert "advised on" in said
    assert "asked for" not in said
