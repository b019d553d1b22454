"""Figures as text."""

import pytest

from kvoffload.advise.units import (
    bytes_text,
    change_text,
    count_text,
    duration_text,
    latency_text,
    percent_text,
    rate_text,
    unbroken,
)
from kvoffload.advise.wording import points

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (duration_text(-0.004), "0 s"),
        (latency_text(-1e-7), "0 ms"),
        (points(-0.0004), "less than 0.1 points"),
        (bytes_text(1023), "1,023 B"),
        (bytes_text(1.5 * 2**40), "1.5 TiB"),
        (bytes_text(512 * 2**30), "512 GiB"),
        (bytes_text(35_979_264), "34.3 MiB"),
        (duration_text(48.2 * 60), "48.2 min"),
        (bytes_text(10.26 * 2**10), "10.3 KiB"),
        (duration_text(24.183), "24.2 s"),
        (duration_text(120), "2 min"),
        (duration_text(7200), "2 h"),
        (latency_text(1), "1 s"),
        (duration_text(-24.183), "-24.2 s"),
        (duration_text(-4_000), "-66.7 min"),
        (rate_text(None), "-"),
        (rate_text(4_214_000_000), "4.21 GB/s"),
        (rate_text(950), "950 B/s"),
        (count_text(27_800_000), "27.8 million"),
        (count_text(9_120), "9,120"),
        (count_text(4_000_000_000), "4 billion"),
        (percent_text(0.36642), "36.6 %"),
        (percent_text(-0.0004), "0.0 %"),
        (change_text(-0.0004), "+0.0"),
        (percent_text(None), "-"),
        (points(0.0), "0.0 points"),
        (points(0.0004), "less than 0.1 points"),
        (points(0.0126), "1.3 points"),
    ],
)
def test_text(text, expected):
    assert text == expected


@pytest.mark.parametrize("figure", ["2 TiB", "512 B", "27.2 %", "1.0 points", "10 million"])
def test_no_line_ends_between_a_number_and_its_unit(figure):
    joined = figure.replace(" ", chr(160))
    assert unbroken(f"it is {figure}, and more.") == f"it is {joined}, and more."


def test_other_blanks_stay():
    text = "3 policies at 5 Bytes, 10 blocks % 2"
    assert unbroken(text) == text
