"""What docs/explanation/which-stack.md says of damaged blocks in vLLM's `fs` tier still holds."""

import inspect
from pathlib import Path

import pytest
from vllm.v1.kv_offload.tiering.fs import io

if not (Path(__file__).parents[2] / "examples").is_dir():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)
if "use_o_direct" not in inspect.signature(getattr(io, "batch_load_block", len)).parameters:
    pytest.skip("the script calls the functions of vLLM 0.33", allow_module_level=True)

from examples.stacks.flipped_byte import DAMAGES, STORES, outcome


@pytest.mark.parametrize(
    ("damage", "served"),
    [
        ("a flipped byte", "other bytes"),
        ("a cut file", "miss"),
        ("another block's bytes", "other bytes"),
    ],
)
def test_the_page_says_what_vllm_serves(damage, served):
    _, store = STORES["vLLM fs"]
    assert outcome(store, DAMAGES[damage]) == served
