"""The forms that traces come in.

One file a form; each gives a `Form`: how a first line is recognised and how a line is parsed.
"""

from __future__ import annotations

from .base import Form, Parser
from .mooncake import MOONCAKE

FORMS: dict[str, Form] = {form.name: form for form in (MOONCAKE,)}

__all__ = ["FORMS", "MOONCAKE", "Form", "Parser"]
