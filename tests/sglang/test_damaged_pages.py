"""What docs/explanation/which-stack.md says of damaged pages in SGLang's file store still holds."""

from pathlib import Path

import pytest

if not (Path(__file__).parents[2] / "examples").is_dir():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)

from examples.stacks.flipped_byte import DAMAGES, STORES, outcome


@pytest.mark.parametrize(
    ("damage", "served"),
    [
        ("a flipped byte", "other bytes"),
        ("a cut file", "raises OSError"),
        ("another block's bytes", "other bytes"),
    ],
)
def test_the_page_says_what_sglang_serves(damage, served):
    _, store = STORES["SGLang file"]
    assert outcome(store, DAMAGES[damage]) == served
