"""Configurations of models: those of the table, and one per family beside the tests.

The latter have the fields of published configurations that determine the cache, with numbers of
layers that are small where they may be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kvoffload.advise.models as models

FAMILIES = Path(__file__).with_name("configs")
TABLE = Path(models.__file__).with_name("models.json")


def shipped() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the fields of each model of the table."""
    for name, model in json.loads(TABLE.read_text(encoding="utf-8")).items():
        yield name, model["config"]


def families() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the fields of each family."""
    for path in sorted(FAMILIES.glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))
