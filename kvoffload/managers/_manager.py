"""The manager skeleton of the implementation that was chosen."""

from typing import TYPE_CHECKING

from kvoffload._implementation import IMPLEMENTATION

__all__ = ["Manager"]

if TYPE_CHECKING or IMPLEMENTATION == "python":
    from ._manager_py import Manager
else:
    from ._manager_c import Manager
