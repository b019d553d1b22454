"""The scales, labels and looks that all pictures share."""

import itertools

import pytest

pytest.importorskip("matplotlib", reason="pictures need the plot extra")

from kvoffload.advise.drawing import (
    DARK,
    LIGHT,
    MARKERS,
    Line,
    apart,
    ratio_text,
    ratio_ticks,
)

from .pages import contrast


@pytest.mark.parametrize(
    ("highest", "most", "expected"),
    [
        (0.0, 5, "0 %|0.1 %"),
        (0.338, 5, "0 %|10 %|20 %|30 %|40 %"),
        (0.338, 8, "0 %|5 %|10 %|15 %|20 %|25 %|30 %|35 %"),
        (0.3, 5, "0 %|10 %|20 %|30 %"),  # the highest is the last
        (0.0123, 5, "0 %|0.5 %|1 %|1.5 %"),
        (1.0, 5, "0 %|20 %|40 %|60 %|80 %|100 %"),
    ],
)
def test_ticks_are_round_and_reach_the_highest_ratio(highest, most, expected):
    ticks = ratio_ticks(highest, most)
    assert "|".join(map(ratio_text, ticks)) == expected
    assert ticks[-1] >= highest - 1e-9


@pytest.mark.parametrize(
    "positions", [[0.5] * 9, [0.0] * 20, [0.1, 0.5, 0.9], [0.98, 0.99, 1.0], [0.0, 0.01, 0.4, 0.41]]
)
def test_labels_keep_apart_and_stay_inside(positions):
    moved = apart(positions, 0.05, 1.0)
    gaps = [after - before for before, after in itertools.pairwise(moved)]
    assert min(gaps) >= 0.05 - 1e-9
    assert moved[-1] <= 1.0 + 1e-9


def test_labels_that_touch_are_centred_on_what_they_belong_to():
    assert apart([0.1, 0.5, 0.9], 0.05) == [0.1, 0.5, 0.9]
    assert apart([3.0, 3.0, 3.0, 9.0], 1.0) == [2.0, 3.0, 4.0, 9.0]
    assert apart([3.0, 3.0], 1.0, most=3.0) == [2.0, 3.0]


@pytest.mark.parametrize("look", [LIGHT, DARK])
def test_more_lines_than_colours_are_told_apart_by_their_marks(look):
    count = len(look.lines) * len(MARKERS)
    styles = [Line("", (), (), index).style(look) for index in range(count)]
    assert len({(style["color"], style["marker"]) for style in styles}) == count


@pytest.mark.parametrize("look", [LIGHT, DARK])
def test_what_is_drawn_stands_out_from_the_page(look):
    """WCAG 2.1: 4.5 to 1 for text, 3 to 1 for the parts of a drawing."""
    for colour, least in ((look.ink, 4.5), (look.soft, 4.5), *((one, 3) for one in look.lines)):
        assert contrast(parts(colour), parts(look.page)) >= least, colour


def parts(colour):
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
