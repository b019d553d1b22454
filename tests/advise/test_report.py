"""The report as a file: whole, escaped, and sealed by its content security policy."""

import base64
import itertools
import re
import sys
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser

import pytest

pytest.importorskip("jinja2", reason="the report needs the report extra")

from kvoffload.advise.chart import chart
from kvoffload.advise.choice import POLICIES
from kvoffload.advise.report import report_html, write_report
from kvoffload.advise.units import percent_text
from kvoffload.errors import MissingExtraError
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


@pytest.mark.parametrize("make", [page, fleet_page])
def test_it_names_nothing_outside_itself(make):
    text = make()
    for tag, attributes in Tags(text).tags:
        for name in ("src", "href", "action", "data", "xlink:href"):
            target = attributes.get(name, "#")
            assert target.startswith("#") or target == "data:,", (tag, attributes)
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("make", [page, fleet_page])
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
    assert not any(tag == "img" for tag, _ in tags)
    assert HOSTILE.splitlines()[0] not in hostile
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in hostile
    assert "{{7*7}}" in hostile
    assert "49" not in re.findall(r"<h1>.*?</h1>", hostile, re.DOTALL)[0]


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


def test_a_fleet_has_a_heat_map_for_each_policy_and_tier():
    subject, text = fleet_subject(), fleet_page().replace("\u00a0", " ")
    advice = subject.advice
    assert text.count('class="heat"') == 4
    assert text.count(' enough"') == 1
    for router in subject.routers():
        assert text.count(f'<th scope="row">{router}</th>') == 5  # and one of first tokens
    for heat in subject.heats():
        for results in heat.rows.values():
            assert len(results) == 5
            for result in results:
                assert percent_text(result.saved) in text
    assert f"<b>{percent_text(advice.result.saved)}</b>" in text
    assert "cpu_bytes_to_use" in text


def test_a_fleet_without_a_recommendation_has_no_configuration():
    subject = fleet_subject()
    advice = replace(subject.advice, objections=("no reuse",))
    text = report_html(replace(subject, advice=advice))
    assert "Offloading does not pay: no reuse." in text
    assert 'id="configuration"' not in text


@pytest.mark.parametrize("requests", [1, 20, 300])
def test_names_at_the_lines_ends_keep_their_distance_and_stay_inside(requests):
    drawing = chart(subject(requests=requests).advice, width=340, height=360, label_height=16)
    positions = sorted(line.label_y for line in drawing.lines)
    assert all(b - a > 15.8 for a, b in itertools.pairwise(positions))  # rounded to tenths
    assert drawing.top <= positions[0]
    assert positions[-1] <= drawing.bottom
    for line in drawing.lines:
        for point in line.points:
            assert drawing.left <= point.x <= drawing.right
            assert drawing.top <= point.y <= drawing.bottom


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "out.html"
    path.write_text("before")
    write_report(subject(), path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    before = path.read_text(encoding="utf-8")
    broken = replace(subject(), advice=None)
    with pytest.raises(AttributeError):
        write_report(broken, path)
    assert path.read_text(encoding="utf-8") == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_report(subject(), tmp_path / "absent" / "out.html")


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"a report needs jinja2: .* 'kvoffload\["):
        write_report(subject(), tmp_path / "out.html")
