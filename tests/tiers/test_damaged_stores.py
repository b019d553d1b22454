"""What docs/explanation/which-stack.md says of damaged blocks holds for each store at hand."""

from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)

from examples.stacks.flipped_byte import DAMAGES, STORES, main, outcome  # noqa: E402


@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_a_slab_misses_a_damaged_block(damage):
    _, store = STORES["kvoffload slab"]
    expected = "the block" if damage is None else "miss"
    assert outcome(store, DAMAGES.get(damage, lambda *_: None)) == expected


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setattr("examples.stacks.flipped_byte.DAMAGES", {})
    main()
    missing = [name for name, (module, _) in STORES.items() if find_spec(module) is None]
    assert capsys.readouterr().out == "".join(f"{name}: not installed\n" for name in missing)
